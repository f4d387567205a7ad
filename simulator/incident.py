"""A recorded incident: what was asked of a cluster and what happened to its nodes, as JSON lines or of a router's log.

The first line names the nodes with their roles; each other one is a request, with what its client saw if that is known,
or something that happened to a node. Times are milliseconds from the first request. A router's log in JSON
(`--log-format json`) says when requests ended and how long each took, when nodes were lost and when they were there
again, also in another role. It does not say that a node was slow: such a line is added by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from simulator.setting import NodeEvent, What
from simulator.stream import Stream
from wire.config import Role
from wire.errors import ConfigError
from wire.frames import MALFORMED

__all__ = [
    "Happened",
    "Incident",
    "NodeNamed",
    "Requested",
    "events_of",
    "of_log",
    "read_incident",
    "streams_of_incident",
]

_VERSION = 1
_UP = re.compile(r"(prefill|decode) node (\S+) is up")
_OUT = re.compile(r"(prefill|decode) node (\S+) is kept out: (.*)")
_STILL_THERE = ("it is draining", "it was removed")
"""Why a node takes no legs that ends those which it has."""


class NodeNamed(msgspec.Struct, frozen=True):
    """A node as it began."""

    name: str
    role: Role


class _Nodes(msgspec.Struct, frozen=True, tag="nodes", tag_field="kind"):
    nodes: list[NodeNamed]
    version: int = _VERSION


class Requested(msgspec.Struct, frozen=True, tag="request", tag_field="kind", omit_defaults=True):
    """One request. `blocks` name the full blocks of its prompt, as a trace of load/workloads.py does."""

    at_ms: float
    prompt: int
    output: int
    session: str = ""
    priority: int = 0
    blocks: list[int] = []
    ttft_ms: float | None = None
    """As it was then; then, how long it took in all."""
    total_ms: float | None = None


class Happened(msgspec.Struct, frozen=True, tag="node", tag_field="kind", omit_defaults=True):
    """To a node: see NodeEvent."""

    at_ms: float
    name: str
    what: What
    role: Role | None = None
    pace: float = 1.0


_LINE: msgspec.json.Decoder[_Nodes | Requested | Happened] = msgspec.json.Decoder(_Nodes | Requested | Happened)


@dataclass(frozen=True, slots=True)
class Incident:
    """In the order of time."""

    nodes: Sequence[NodeNamed]
    requests: Sequence[Requested]
    happened: Sequence[Happened]

    def lines(self) -> list[bytes]:
        """As it is written."""
        later: list[Requested | Happened] = [*self.requests, *self.happened]
        later.sort(key=lambda each: each.at_ms)
        return [msgspec.json.encode(each) + b"\n" for each in (_Nodes(list(self.nodes)), *later)]


def read_incident(lines: Iterable[bytes]) -> Incident:
    """Of an incident's own lines, or of a router's log. Raises ConfigError, with the number of the line."""
    rows = [line for line in lines if line.strip()]
    if rows and b'"kind"' not in rows[0]:
        return of_log(rows)
    nodes: list[NodeNamed] = []
    requests: list[Requested] = []
    happened: list[Happened] = []
    for number, row in enumerate(rows, 1):
        try:
            line = _LINE.decode(row)
        except MALFORMED as why:
            raise ConfigError(f"line {number} of the incident is none: {why}") from why
        if isinstance(line, Requested):
            requests.append(line)
        elif isinstance(line, Happened):
            happened.append(line)
        elif line.version != _VERSION:
            raise ConfigError(f"the incident has version {line.version}, and this release reads {_VERSION}")
        else:
            nodes = line.nodes
    known = {node.name for node in nodes}
    unknown = next((each.name for each in happened if each.name not in known), None)
    if unknown is not None:
        raise ConfigError(f"something happened to {unknown}, which the incident's first line does not name")
    if not requests or not any(node.role is Role.DECODE for node in nodes):
        raise ConfigError("an incident needs a request and a decode node at least")
    return Incident(nodes, sorted(requests, key=lambda each: each.at_ms), sorted(happened, key=lambda each: each.at_ms))


class _Logged(msgspec.Struct, frozen=True):
    """What is read of a line of a router's log."""

    time: datetime
    message: str = ""
    prompt_tokens: int | str = "-"
    output_tokens: int = 0
    prefill: str = "-"
    decode: str = "-"
    key: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    total_ms: float | None = None


def of_log(lines: Iterable[bytes]) -> Incident:
    """Of the lines of a router with `--log-format json`; others are passed over. Raises ConfigError if none tells."""
    decoder = msgspec.json.Decoder(_Logged)
    requests: list[Requested] = []
    told: list[tuple[float, str, Role, str | None]] = []
    roles: dict[str, Role] = {}
    for line in lines:
        try:
            logged = decoder.decode(line)
        except MALFORMED:
            continue
        now = logged.time.timestamp() * 1e3
        if logged.total_ms is not None:
            _see(roles, logged)
            if isinstance(logged.prompt_tokens, int) and logged.prompt_tokens and logged.output_tokens:
                requests.append(_requested(logged, now))
        elif found := _UP.match(logged.message):
            told.append((now, found[2], Role(found[1]), None))
        elif found := _OUT.match(logged.message):
            told.append((now, found[2], Role(found[1]), found[3]))
    if not requests:
        raise ConfigError(
            "the log tells of no request that was answered; it must be a router's, with --log-format json"
        )
    begins = min(each.at_ms for each in requests)
    nodes, happened = _happened(told, roles, begins)
    moved = [msgspec.structs.replace(each, at_ms=round(each.at_ms - begins, 3)) for each in requests]
    return Incident(nodes, sorted(moved, key=lambda each: each.at_ms), happened)


def _see(roles: dict[str, Role], logged: _Logged) -> None:
    for names, role in ((logged.prefill, Role.PREFILL), (logged.decode, Role.DECODE)):
        for name in names.split(","):  # several, of a request with several prompts
            if name not in ("", "-"):
                roles.setdefault(name, role)


def _requested(logged: _Logged, now: float) -> Requested:
    assert isinstance(logged.prompt_tokens, int)
    assert logged.total_ms is not None
    return Requested(
        now - logged.total_ms,
        logged.prompt_tokens,
        logged.output_tokens,
        ttft_ms=round(logged.queue_ms + logged.prefill_ms, 3),
        total_ms=logged.total_ms,
    )


def _happened(
    told: Sequence[tuple[float, str, Role, str | None]], roles: dict[str, Role], begins: float
) -> tuple[list[NodeNamed], list[Happened]]:
    """The nodes as they began, and what happened to each from then on."""
    first = roles | {name: role for _, name, role, _ in reversed(told)}
    now_is, is_down = dict(first), set[str]()
    happened = []
    for at, name, role, why in told:
        at_ms = max(0.0, round(at - begins, 3))
        if why is None:
            if role is not now_is[name]:
                happened.append(Happened(at_ms, name, What.ROLE, role))
            elif name in is_down:
                happened.append(Happened(at_ms, name, What.UP))
            now_is[name] = role
            is_down.discard(name)
        elif why not in _STILL_THERE and name not in is_down:
            happened.append(Happened(at_ms, name, What.DOWN))
            is_down.add(name)
    ordered = sorted(first.items(), key=lambda each: (each[1] is Role.DECODE, each[0]))
    return [NodeNamed(name, role) for name, role in ordered], happened


def streams_of_incident(incident: Incident) -> list[Stream]:
    """Its requests, to be served anew."""
    return [
        Stream(each.at_ms, each.prompt, each.output, tuple(each.blocks), each.session, each.priority)
        for each in incident.requests
    ]


def events_of(incident: Incident, prefill: int, decode: int) -> list[NodeEvent]:
    """What happened, to the nodes of a cluster of this size; what happened to nodes that it lacks is left out."""
    numbers: dict[str, int] = {}
    for role, first, many in ((Role.PREFILL, 0, prefill), (Role.DECODE, prefill, decode)):
        names = [node.name for node in incident.nodes if node.role is role]
        numbers.update(zip(names, range(first, first + many), strict=False))
    return [
        NodeEvent(each.at_ms, numbers[each.name], each.what, each.role, each.pace)
        for each in incident.happened
        if each.name in numbers
    ]
