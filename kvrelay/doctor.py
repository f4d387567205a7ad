"""`kvrelay doctor`: hands a few KV blocks over between each prefill and each decode node of a
cluster.

Takes nothing that a node would miss: probes go into free blocks, one pair at a time, and what they
took is free again when a lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

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

__all__ = ["ExamineFailed", "NodeSeen", "PairSeen", "Report", "Sample", "judge", "examine"]

# Less than this is mostly the time of a message, and says nothing of the way.
_JUDGED_BYTES = 1 << 20
# 10 Gbit/s Ethernet is 1.25: who has RDMA has more.
_SLOW_NETWORK_GB_S = 1.5
# Of the same way between other nodes.
_SLOW_SHARE = 1 / 3


class NodeSeen(msgspec.Struct, frozen=True):
    """A node; `name` is its role and its place in the list."""

    name: str
    role: str
    url: str
    down: str | None = None
    """Why it cannot be examined."""
    recomputed_prompts: int = 0
    """Prompts that it computed itself since its start, because fetching their KV failed."""
    model: str = ""
    sampling_defaults: SamplingDefaults = PLAIN_SAMPLING


class Sample(msgspec.Struct, frozen=True):
    """A size's fastest probe; the data plane was reading for `read_s` of its `seconds`."""

    blocks: int
    num_bytes: int
    seconds: float
    read_s: float
    gb_s: float
    """10**9 bytes per second of `read_s`."""
    verified: bool
    """Whether the bytes of all probes arrived as they were sent."""


class PairSeen(msgspec.Struct, frozen=True):
    """A prefill and a decode node, and how KV gets from one to the other."""

    prefill: str
    decode: str
    refused: str | None = None
    """Why no KV can be handed over, in one sentence."""
    plane: str = ""
    same_host: bool = False
    missed: dict[str, str] = {}
    """Data planes that are preferred to `plane`, and why each cannot be used."""
    samples: list[Sample] = []

    @property
    def judged(self) -> Sample | None:
        """Return the largest sample, if it is large enough to say how fast the pair is."""
        largest = max(self.samples, key=lambda sample: sample.num_bytes, default=None)
        return largest if largest is not None and largest.num_bytes >= _JUDGED_BYTES else None

    @property
    def way(self) -> str:
        rate = f" at {_rate(self.judged.gb_s)}" if self.judged is not None else ""
        return f"{self.decode} reads {self.prefill} by {self.plane}{rate}"


def _rate(gb_s: float) -> str:
    return f"{gb_s:.0f} GB/s" if gb_s >= 10 else f"{gb_s:.2g} GB/s"


class Report(msgspec.Struct, frozen=True):
    """A report; healthy if each pair of nodes hands KV over and not a byte was wrong."""

    healthy: bool
    nodes: list[NodeSeen]
    pairs: list[PairSeen]
    failures: list[str]
    warnings: list[str]


def judge(
    nodes: Sequence[NodeSeen], pairs: Sequence[PairSeen], others: Sequence[str] = ()
) -> Report:
    """Return the report on these measurements; `others` are warnings about other nodes."""
    failures = [*_failures(nodes, pairs)]
    warnings = [*others, *_slow_ways(pairs), *_recomputing(nodes), *_sampling_apart(nodes)]
    return Report(not failures, list(nodes), list(pairs), failures, warnings)


def _failures(nodes: Sequence[NodeSeen], pairs: Sequence[PairSeen]) -> Iterator[str]:
    paired = {pair.prefill for pair in pairs}
    models = {node.model for node in nodes if node.down is None}
    for model in sorted(models) or [""]:
        if not any(node.model == model and node.name in paired for node in nodes):
            of = f" with the model {model!r}" if len(models) > 1 else ""
            yield f"there is no pair of a prefill and a decode node{of} that are both up"
    for node in nodes:
        if node.down is not None:
            yield f"{node.name} ({node.url}): {node.down}"
    for pair in pairs:
        if pair.refused is not None:
            yield f"{pair.decode} cannot take KV of {pair.prefill}: {pair.refused}"
        wrong = [str(sample.blocks) for sample in pair.samples if not sample.verified]
        if wrong:
            yield (
                f"{pair.way}, and the bytes that arrived are not those that were sent (probes of "
                f"{', '.join(wrong)}"
                " blocks): serve nothing this way, force another with --kv-connector, and report it"
            )


def _slow_ways(pairs: Sequence[PairSeen]) -> Iterator[str]:
    for pair in pairs:
        if pair.refused is not None:
            continue
        if pair.same_host and pair.plane != "direct":
            why = pair.missed.get("direct", "one of them was told to use another (--kv-connector)")
            yield f"{pair.way} although the two share a host and could use direct: {why}"
        elif not pair.same_host:
            for kind, why in pair.missed.items():
                if kind != "direct":  # is for one host only
                    yield f"{pair.way} and not by {kind}: {why}"
            if pair.judged is not None and pair.judged.gb_s < _SLOW_NETWORK_GB_S:
                yield (
                    f"{pair.way}, no more than 10 Gbit/s Ethernet gives: if there is RDMA between "
                    "the two hosts, UCX does not use it (does the container see /dev/infiniband, "
                    "and what does UCX_TLS say?)"
                )
        alike = [
            p.judged.gb_s
            for p in pairs
            if p.judged and (p.plane, p.same_host) == (pair.plane, pair.same_host)
        ]
        if pair.judged is not None and pair.judged.gb_s < _SLOW_SHARE * max(alike):
            yield (
                f"{pair.way}, and another pair does {_rate(max(alike))} the same way: compare "
                f"their hosts and links"
            )


def _recomputing(nodes: Sequence[NodeSeen]) -> Iterator[str]:
    for node in nodes:
        if node.recomputed_prompts:
            yield (
                f"{node.name} has computed {node.recomputed_prompts} prompts itself since its "
                "start, because their KV could not be fetched: its log says why for each, "
                "kvrelay_fetches_failed_total counts the causes"
            )


def _sampling_apart(nodes: Sequence[NodeSeen]) -> Iterator[str]:
    first: dict[str, NodeSeen] = {}
    for node in nodes:
        other = first.setdefault(node.model, node) if node.down is None else node
        if node.sampling_defaults != other.sampling_defaults:
            yield (
                f"{other.name} and {node.name} have different sampling defaults: an answer "
                f"depends on which of them "
                "begins it; give both the same --generation-config and --override-generation-config"
            )


_DEADLINE = aiohttp.ClientTimeout(total=70.0, sock_connect=2.0)
_HEALTH_DEADLINE = aiohttp.ClientTimeout(total=5.0, sock_connect=2.0)
# Blocks of a probe. The largest that both nodes can spare takes the place of those that they
# cannot.
_SIZES = (1, 8, 64)
_REPEATS, _SIZE_S = 3, 0.5
# So long a node may be busy: a probe that somebody abandoned ends with its lease (5 s by default).
_BUSY_S, _BUSY_WAIT_S = 10.0, 0.1
_OURS = "kvrelay"  # what a router calls the nodes that take probes
_RECOMPUTED = re.compile(r"^kvrelay_recomputed_prompts_total(?:\{.*\})? (\S+)$", re.MULTILINE)
_offer_decoder: msgspec.json.Decoder[ProbeOffered | ProbeRefused] = msgspec.json.Decoder(
    ProbeOffered | ProbeRefused
)
_fetch_decoder: msgspec.json.Decoder[ProbeFetched | ProbeRefused] = msgspec.json.Decoder(
    ProbeFetched | ProbeRefused
)
_Answer = TypeVar("_Answer", ProbeOffered, ProbeFetched)


class ExamineFailed(KvrelayError):
    """A node or the router cannot be asked, or has refused."""


class _Listed(msgspec.Struct, frozen=True):
    role: Role
    url: str
    kind: str = _OURS


class _RouterHealth(msgspec.Struct):
    nodes: list[_Listed]


class _NodeHealth(msgspec.Struct):
    role: Role
    model: str = ""
    sampling_defaults: SamplingDefaults = PLAIN_SAMPLING


def examine(
    router: str, prefill: Sequence[str], decode: Sequence[str], node_api_key: str, *, as_json: bool
) -> int:
    """Examine a cluster, print a report and return 0 if every pair hands KV over.

    Raises ConfigError, and ExamineFailed if the router does not say which nodes it has.
    """
    if prefill or decode:
        if router or not (prefill and decode):
            raise ConfigError(
                "name either a --router, or at least one --prefill URL and one --decode URL"
            )
        nodes = [_Listed(Role.PREFILL, url) for url in prefill]
        nodes += [_Listed(Role.DECODE, url) for url in decode]
    else:
        nodes = asyncio.run(_nodes_of_router(base_url(router or "http://127.0.0.1:8000")))
    nodes = [_Listed(node.role, base_url(node.url), node.kind) for node in nodes]
    report = asyncio.run(_examine(nodes, node_api_key))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _show(report, Console(highlight=False, soft_wrap=True))
    return 0 if report.healthy else 1


async def _nodes_of_router(url: str) -> list[_Listed]:
    async with aiohttp.ClientSession(timeout=_HEALTH_DEADLINE) as session:
        status, body = await _call(session, "GET", f"{url}/health")
    try:
        return msgspec.json.decode(body, type=_RouterHealth).nodes
    except msgspec.DecodeError as why:
        raise ExamineFailed(
            f"{url}/health answered with {status}, and not like a kvrelay router; name one with "
            "--router, or the nodes with --prefill and --decode"
        ) from why


async def _examine(listed: Sequence[_Listed], node_api_key: str) -> Report:
    headers = {"authorization": f"Bearer {node_api_key}"} if node_api_key else {}
    async with aiohttp.ClientSession(timeout=_DEADLINE, headers=headers) as session:
        counts: Counter[Role] = Counter()
        nodes: list[NodeSeen] = []
        others: list[str] = []
        for node in listed:
            if node.kind != _OURS:
                others.append(f"{node.url} is not examined: it is no kvrelay node ({node.kind})")
                continue
            nodes.append(await _look_at(session, f"{node.role}-{counts[node.role]}", node))
            counts[node.role] += 1
        up = [node for node in nodes if node.down is None]
        pairs = [
            await _examine_pair(session, prefill, decode)
            for prefill in up
            if prefill.role == Role.PREFILL
            for decode in up
            if decode.role == Role.DECODE and decode.model == prefill.model
        ]
    return judge(nodes, pairs, others)


async def _look_at(session: aiohttp.ClientSession, name: str, node: _Listed) -> NodeSeen:
    down, recomputed, model, sampling = None, 0, "", PLAIN_SAMPLING
    try:
        status, body = await _call(session, "GET", f"{node.url}/health", timeout=_HEALTH_DEADLINE)
        if status != 200:
            down = _message(status, body)
        elif (said := msgspec.json.decode(body, type=_NodeHealth)).role != node.role:
            down = f"it is listed as a {node.role} node and says that it is {said.role}"
        else:
            model, sampling = said.model, said.sampling_defaults
            _, text = await _call(session, "GET", f"{node.url}/metrics", timeout=_HEALTH_DEADLINE)
            recomputed = sum(int(float(value)) for value in _RECOMPUTED.findall(text.decode()))
    except (ExamineFailed, msgspec.DecodeError) as why:
        down = str(why)
    return NodeSeen(name, str(node.role), node.url, down, recomputed, model, sampling)


async def _examine_pair(
    session: aiohttp.ClientSession, prefill: NodeSeen, decode: NodeSeen
) -> PairSeen:
    try:
        # The first contact makes connections, so its time says nothing.
        offered, fetched = await _probe(session, prefill, decode, 1)
        most = min(offered.spare_blocks, fetched.spare_blocks)
        samples = [
            await _sample(session, prefill, decode, size)
            for size in sorted({min(s, most) for s in _SIZES})
        ]
    except (ExamineFailed, Unavailable) as why:
        return PairSeen(prefill.name, decode.name, refused=why.message)
    same_host = bool(offered.host) and offered.host == fetched.host
    return PairSeen(
        prefill.name, decode.name, None, fetched.plane, same_host, fetched.missed, samples
    )


async def _sample(
    session: aiohttp.ClientSession, prefill: NodeSeen, decode: NodeSeen, blocks: int
) -> Sample:
    began, probes = time.monotonic(), list[ProbeFetched]()
    while len(probes) < _REPEATS and (not probes or time.monotonic() - began < _SIZE_S):
        probes.append((await _probe(session, prefill, decode, blocks))[1])
    best = min(probes, key=lambda probe: probe.read_s)
    rate = best.num_bytes / max(best.read_s, 1e-9) / 1e9
    verified = all(probe.verified for probe in probes)
    return Sample(blocks, best.num_bytes, best.seconds, best.read_s, rate, verified)


async def _probe(
    session: aiohttp.ClientSession, prefill: NodeSeen, decode: NodeSeen, blocks: int
) -> tuple[ProbeOffered, ProbeFetched]:
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            return await _probe_once(session, prefill, decode, blocks)
        except Unavailable:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_BUSY_WAIT_S)


async def _probe_once(
    session: aiohttp.ClientSession, prefill: NodeSeen, decode: NodeSeen, blocks: int
) -> tuple[ProbeOffered, ProbeFetched]:
    body = await _ask(session, prefill, "offer", {"blocks": blocks})
    offered = _answer(prefill, _offer_decoder, body)
    ticket = offered.ticket
    try:
        body = await _ask(session, decode, "fetch", {"ticket": ticket, "seed": offered.seed})
        return offered, _answer(decode, _fetch_decoder, body)
    except KvrelayError:
        # Its lease would end it, too, but the next probe need not wait for that.
        with contextlib.suppress(ExamineFailed):
            release = msgspec.json.encode({"request_ids": [ticket.remote_request_id]})
            await _call(session, "POST", f"{prefill.url}/kv/release", release)
        raise


async def _ask(session: aiohttp.ClientSession, node: NodeSeen, what: str, content: object) -> bytes:
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
    return body


def _answer(
    node: NodeSeen, decoder: msgspec.json.Decoder[_Answer | ProbeRefused], body: bytes
) -> _Answer:
    try:
        answer = decoder.decode(body)
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


def _show(report: Report, console: Console) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style))

    for pair in report.pairs:
        if pair.refused is not None:
            line(f"{pair.prefill} -> {pair.decode}: refused", "red")
            continue
        where = "one host" if pair.same_host else "two hosts"
        line(f"{pair.prefill} -> {pair.decode}: handshake ok, {pair.plane}, {where}")
        for sample in pair.samples:
            size = (
                f"{sample.blocks:4} {'block ' if sample.blocks == 1 else 'blocks'} "
                f"{sample.num_bytes / 1e6:8.1f} MB"
            )
            state = "verified" if sample.verified else "WRONG BYTES"
            line(f"  {size} {sample.read_s * 1e3:9.2f} ms {sample.gb_s:7.2f} GB/s  {state}")
    for failure in report.failures:
        line(f"failure: {failure}", "red")
    for warning in report.warnings:
        line(f"warning: {warning}", "yellow")
    if report.healthy:
        line(
            f"each of {len(report.pairs)} pairs hands KV over"
            + (", see the warnings" if report.warnings else "")
        )
