"""`kvrelay doctor`: hands a few blocks over between each prefill and each decode node of a running
cluster.

Owns the calls and what is printed; what the measurements mean is in verdict.py. Takes nothing that
a node would miss: probes go into free blocks, one pair at a time, and what they took is free again
when a lease ends, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
from rich.console import Console
from rich.text import Text

from kvrelay.cluster_plan import NODE_API_KEY
from kvrelay.verdict import NodeSeen, PairSeen, Report, Sample, judge
from kvrelay.wire.config import Role
from kvrelay.wire.config_checks import base_url
from kvrelay.wire.engine_messages import ProbeFetched, ProbeOffered, ProbeRefused
from kvrelay.wire.errors import ConfigError, KvrelayError, Unavailable
from kvrelay.wire.sampling import PLAIN_SAMPLING, SamplingDefaults

__all__ = ["DoctorFailed", "run"]

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


class DoctorFailed(KvrelayError):
    """A node or the router cannot be asked, or refused what it was asked."""


@dataclass(frozen=True, slots=True)
class _Listed:
    role: Role
    url: str
    kind: str = _OURS


class _NodeLine(msgspec.Struct):
    url: str
    role: Role
    kind: str = _OURS


class _RouterHealth(msgspec.Struct):
    nodes: list[_NodeLine]


class _NodeHealth(msgspec.Struct):
    role: Role
    model: str = ""
    sampling_defaults: SamplingDefaults = PLAIN_SAMPLING


def run(
    router: str, prefill: Sequence[str], decode: Sequence[str], node_api_key: str, *, as_json: bool
) -> int:
    """The command: examine, print, and return 0 if every pair hands KV over, else 1.

    Raises ConfigError if it is not said what to examine, DoctorFailed if the router does not tell.
    """
    if prefill or decode:
        if router or not (prefill and decode):
            raise ConfigError(
                "name either a --router, or at least one --prefill URL and one --decode URL"
            )
        nodes = [_Listed(Role.PREFILL, url) for url in prefill] + [
            _Listed(Role.DECODE, url) for url in decode
        ]
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
        return [
            _Listed(node.role, node.url, node.kind)
            for node in msgspec.json.decode(body, type=_RouterHealth).nodes
        ]
    except msgspec.DecodeError as why:
        raise DoctorFailed(
            f"{url}/health answered with {status}, and not like a kvrelay router; name one with "
            f"--router, or the nodes "
            "with --prefill and --decode"
        ) from why


async def _examine(listed: Sequence[_Listed], node_api_key: str) -> Report:
    headers = {"authorization": f"Bearer {node_api_key}"} if node_api_key else {}
    async with aiohttp.ClientSession(timeout=_DEADLINE, headers=headers) as session:
        names: dict[Role, int] = {}
        nodes: list[NodeSeen] = []
        others = [
            f"{node.url} is not examined: it is no kvrelay node ({node.kind})"
            for node in listed
            if node.kind != _OURS
        ]
        for node in listed:
            if node.kind != _OURS:
                continue
            number = names[node.role] = names.get(node.role, -1) + 1
            nodes.append(await _look_at(session, f"{node.role}-{number}", node))
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
    except (DoctorFailed, msgspec.DecodeError) as why:
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
    except (DoctorFailed, Unavailable) as why:
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
        with contextlib.suppress(DoctorFailed):
            release = msgspec.json.encode({"request_ids": [ticket.remote_request_id]})
            await _call(session, "POST", f"{prefill.url}/kv/release", release)
        raise


async def _ask(session: aiohttp.ClientSession, node: NodeSeen, what: str, content: object) -> bytes:
    status, body = await _call(
        session, "POST", f"{node.url}/kv/probe/{what}", msgspec.json.encode(content)
    )
    if status == 401:
        raise DoctorFailed(
            f"{node.name} wants the nodes' key: give it with --node-api-key or in {NODE_API_KEY}, "
            f"or name the "
            "router of your own `kvrelay up` on this machine with --router"
        )
    if status != 200:
        raise DoctorFailed(f"{node.name}: {_message(status, body)}")
    return body


def _answer(
    node: NodeSeen, decoder: msgspec.json.Decoder[_Answer | ProbeRefused], body: bytes
) -> _Answer:
    try:
        answer = decoder.decode(body)
    except msgspec.DecodeError as why:
        raise DoctorFailed(
            f"{node.name} answers a probe like another version of kvrelay: {why}"
        ) from why
    if isinstance(answer, ProbeRefused):
        raise (Unavailable if answer.busy else DoctorFailed)(f"{node.name}: {answer.reason}")
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
        raise DoctorFailed(f"{url} cannot be reached: {said}") from why


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
