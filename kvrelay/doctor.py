"""`kvrelay doctor`: hand a few KV blocks over between each prefill and each decode node.

Takes nothing that a node would miss: probes go into free blocks, one pair at a time, and what they
took is free again when a lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.text import Text

from kvrelay.cluster_plan import NODE_API_KEY
from kvrelay.wire.config import Role
from kvrelay.wire.config_checks import base_url
from kvrelay.wire.engine_messages import ProbeFetched, ProbeOffered, ProbeRefused
from kvrelay.wire.errors import ConfigError, KvrelayError, Unavailable
from kvrelay.wire.sampling import PLAIN_SAMPLING, SamplingDefaults

__all__ = ["ExamineFailed", "NodeSeen", "PairSeen", "Sample", "examine", "failures", "warnings"]

# Less than this is mostly the time of a message, and says nothing of the way.
_JUDGED_BYTES = 1 << 20
# 10 Gbit/s Ethernet is 1.25: who has RDMA has more.
_SLOW_NETWORK_GB_S = 1.5
_DEADLINE = aiohttp.ClientTimeout(total=70.0, sock_connect=2.0)
_HEALTH_DEADLINE = aiohttp.ClientTimeout(total=5.0, sock_connect=2.0)
# Blocks of a probe, as far as both nodes can spare them.
_SIZES = (1, 8, 64)
_REPEATS = 3
# So long a node may be busy: a probe that somebody abandoned ends with its lease (5 s by default).
_BUSY_S, _BUSY_WAIT_S = 10.0, 0.1
_OURS = "kvrelay"  # what a router calls the nodes that take probes


class ExamineFailed(KvrelayError):
    """A node or router that cannot be asked, or has refused."""


class NodeSeen(msgspec.Struct):
    """A node; its router lists the first three fields."""

    role: Role
    url: str
    kind: str = _OURS
    name: str = ""
    down: str = ""
    model: str = ""
    sampling_defaults: SamplingDefaults = PLAIN_SAMPLING


class Sample(msgspec.Struct, frozen=True):
    """A size's fastest probe; `gb_s` is 10**9 bytes per second of `read_s`."""

    blocks: int
    num_bytes: int
    read_s: float
    gb_s: float
    verified: bool
    """True if the bytes of all probes arrived as they were sent."""


class PairSeen(msgspec.Struct, frozen=True):
    """A prefill and a decode node, and how KV gets from one to the other."""

    prefill: str
    decode: str
    refused: str = ""
    """Why no KV can be handed over, in one sentence."""
    plane: str = ""
    same_host: bool = False
    missed: dict[str, str] = {}
    """Data planes that are preferred to `plane`, and why each cannot be used."""
    samples: list[Sample] = []

    @property
    def way(self) -> str:
        rate = f" at {self.gb_s:.2g} GB/s" if self.gb_s else ""
        return f"{self.decode} reads {self.prefill} by {self.plane}{rate}"

    @property
    def gb_s(self) -> float:
        """Return the rate of the largest sample; 0 if it is too small to tell."""
        largest = self.samples[-1]
        return largest.gb_s if largest.num_bytes >= _JUDGED_BYTES else 0.0


def failures(nodes: Sequence[NodeSeen], pairs: Sequence[PairSeen]) -> Iterator[str]:
    for node in nodes:
        if node.down:
            yield f"{node.name} ({node.url}): {node.down}"
    if not pairs:
        yield "there is no pair of a prefill and a decode node that are both up"
    for pair in pairs:
        if pair.refused:
            yield f"{pair.decode} cannot take KV of {pair.prefill}: {pair.refused}"
        elif not all(sample.verified for sample in pair.samples):
            yield (
                f"{pair.way}, and the bytes that arrived are not those that were sent: serve "
                "nothing this way, force another with --kv-connector, and report it"
            )


def warnings(nodes: Sequence[NodeSeen], pairs: Sequence[PairSeen]) -> Iterator[str]:
    """Yield what is slower than it could be, or differs between nodes of one model."""
    first: dict[str, NodeSeen] = {}
    for node in nodes:
        if node.kind != _OURS:
            yield f"{node.url} is not examined: it is no kvrelay node ({node.kind})"
        elif not node.down:
            other = first.setdefault(node.model, node)
            if node.sampling_defaults != other.sampling_defaults:
                yield (
                    f"{other.name} and {node.name} have different sampling defaults: give both the "
                    "same --generation-config and --override-generation-config"
                )
    for pair in pairs:
        if pair.refused:
            continue
        if pair.same_host and pair.plane != "direct":
            why = pair.missed.get("direct", "one of them was told to use another (--kv-connector)")
            yield f"{pair.way} although the two share a host and could use direct: {why}"
        elif not pair.same_host:
            for kind, why in pair.missed.items():
                if kind != "direct":  # is for one host only
                    yield f"{pair.way} and not by {kind}: {why}"
            if 0 < pair.gb_s < _SLOW_NETWORK_GB_S:
                yield (
                    f"{pair.way}, no more than 10 Gbit/s Ethernet gives: if there is RDMA between "
                    "the two hosts, UCX does not use it (does the container see /dev/infiniband, "
                    "and what does UCX_TLS say?)"
                )


def examine(
    router: str, prefill: Sequence[str], decode: Sequence[str], node_api_key: str, *, as_json: bool
) -> int:
    """Examine a cluster, print a report and return 0 if every pair hands KV over.

    Raises ConfigError, and ExamineFailed if the router does not say which nodes it has.
    """
    if (prefill or decode) and (router or not (prefill and decode)):
        raise ConfigError(
            "name either a --router, or at least one --prefill URL and one --decode URL"
        )
    nodes = [NodeSeen(Role.PREFILL, base_url(url)) for url in prefill]
    nodes += [NodeSeen(Role.DECODE, base_url(url)) for url in decode]
    nodes, pairs = asyncio.run(_examine(router or "http://127.0.0.1:8000", nodes, node_api_key))
    failed, warned = [*failures(nodes, pairs)], [*warnings(nodes, pairs)]
    if as_json:
        report = {
            "healthy": not failed,
            "nodes": nodes,
            "pairs": pairs,
            "failures": failed,
            "warnings": warned,
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _show(pairs, failed, warned)
    return 1 if failed else 0


async def _examine(
    router: str, nodes: Sequence[NodeSeen], node_api_key: str
) -> tuple[list[NodeSeen], list[PairSeen]]:
    if not nodes:
        async with aiohttp.ClientSession(timeout=_HEALTH_DEADLINE) as session:
            _, body = await _call(session, "GET", f"{router}/health")
        try:
            listed = msgspec.json.decode(body)["nodes"]
            nodes = [
                msgspec.convert({key: each[key] for key in ("role", "url", "kind")}, NodeSeen)
                for each in listed
            ]
        except (msgspec.MsgspecError, LookupError, TypeError) as why:
            raise ExamineFailed(
                f"{router}/health does not answer like a kvrelay router; name one with --router, "
                "or the nodes with --prefill and --decode"
            ) from why
    headers = {"authorization": f"Bearer {node_api_key}"} if node_api_key else {}
    async with aiohttp.ClientSession(timeout=_DEADLINE, headers=headers) as session:
        counts: Counter[Role] = Counter()
        for node in nodes:
            if node.kind == _OURS:
                node.name = f"{node.role}-{counts[node.role]}"
                counts[node.role] += 1
                await _look_at(session, node)
        up = [node for node in nodes if node.name and not node.down]
        pairs = [
            await _examine_pair(session, prefill, decode)
            for prefill in up
            if prefill.role == Role.PREFILL
            for decode in up
            if decode.role == Role.DECODE and decode.model == prefill.model
        ]
    return list(nodes), pairs


async def _look_at(session: aiohttp.ClientSession, node: NodeSeen) -> None:
    try:
        status, body = await _call(session, "GET", f"{node.url}/health", timeout=_HEALTH_DEADLINE)
        if status != 200:
            node.down = _message(status, body)
            return
        said = msgspec.json.decode(body)
        if said["role"] != node.role:
            node.down = f"it is listed as a {node.role} node and says that it is {said['role']}"
        node.model = said["model"]
        node.sampling_defaults = msgspec.convert(said["sampling_defaults"], SamplingDefaults)
    except (ExamineFailed, msgspec.MsgspecError, LookupError, TypeError) as why:
        node.down = str(why)


async def _examine_pair(
    session: aiohttp.ClientSession, prefill: NodeSeen, decode: NodeSeen
) -> PairSeen:
    samples = []
    try:
        # The first contact makes connections, so its time says nothing.
        offered, fetched = await _probe(session, prefill, decode, 1)
        most = min(offered.spare_blocks, fetched.spare_blocks)
        for size in sorted({min(size, most) for size in _SIZES}):
            probes = [(await _probe(session, prefill, decode, size))[1] for _ in range(_REPEATS)]
            best = min(probes, key=lambda probe: probe.read_s)
            rate = best.num_bytes / max(best.read_s, 1e-9) / 1e9
            verified = all(probe.verified for probe in probes)
            samples.append(Sample(size, best.num_bytes, best.read_s, rate, verified))
    except (ExamineFailed, Unavailable) as why:
        return PairSeen(prefill.name, decode.name, why.message)
    same_host = bool(offered.host) and offered.host == fetched.host
    return PairSeen(
        prefill.name, decode.name, "", fetched.plane, same_host, fetched.missed, samples
    )


async def _probe(
    session: aiohttp.ClientSession, prefill: NodeSeen, decode: NodeSeen, blocks: int
) -> tuple[ProbeOffered, ProbeFetched]:
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            offered: ProbeOffered = await _ask(
                session, prefill, "offer", {"blocks": blocks}, ProbeOffered
            )
            content = {"ticket": offered.ticket, "seed": offered.seed}
            return offered, await _ask(session, decode, "fetch", content, ProbeFetched)
        except Unavailable:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_BUSY_WAIT_S)


async def _ask(
    session: aiohttp.ClientSession, node: NodeSeen, what: str, content: object, kind: Any
) -> Any:
    status, body = await _call(
        session, "POST", f"{node.url}/kv/probe/{what}", msgspec.json.encode(content)
    )
    if status == 401:
        raise ExamineFailed(
            f"{node.name} wants the nodes' key: give it with --node-api-key or in {NODE_API_KEY}, "
            "or name the router of your own `kvrelay up` on this machine with --router"
        )
    if status != 200:
        raise ExamineFailed(f"{node.name}: {_message(status, body)}")
    try:
        answer = msgspec.json.decode(body, type=kind | ProbeRefused)
    except msgspec.DecodeError as why:
        raise ExamineFailed(
            f"{node.name} answers a probe like another version of kvrelay: {why}"
        ) from why
    if isinstance(answer, ProbeRefused):
        raise (Unavailable if answer.busy else ExamineFailed)(f"{node.name}: {answer.reason}")
    return answer


async def _call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes | None = None,
    timeout: aiohttp.ClientTimeout = _DEADLINE,
) -> tuple[int, bytes]:
    try:
        async with session.request(
            method, url, data=body, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as why:
        said = str(why) or f"no answer within {timeout.total:g} s"
        raise ExamineFailed(f"{url} cannot be reached: {said}") from why


def _message(status: int, body: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError):
        return str(msgspec.json.decode(body)["error"]["message"])
    return f"it answered with status {status}"


def _show(pairs: Sequence[PairSeen], failed: Sequence[str], warned: Sequence[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for pair in pairs:
        if pair.refused:
            console.print(Text(f"{pair.prefill} -> {pair.decode}: refused", style="red"))
            continue
        where = "one host" if pair.same_host else "two hosts"
        console.print(f"{pair.prefill} -> {pair.decode}: handshake ok, {pair.plane}, {where}")
        for each in pair.samples:
            console.print(
                f"  {each.blocks:4} blocks {each.num_bytes / 1e6:8.1f} MB "
                f"{each.read_s * 1e3:9.2f} ms {each.gb_s:7.2f} GB/s  "
                f"{'verified' if each.verified else 'WRONG BYTES'}"
            )
    for failure in failed:
        console.print(Text(f"failure: {failure}", style="red"))
    for warning in warned:
        console.print(Text(f"warning: {warning}", style="yellow"))
    if not failed:
        console.print(f"each of {len(pairs)} pairs hands KV over")
