"""A recorded incident: what was asked of a cluster and what happened to its nodes, as JSON lines or
of a router's log.

Times are milliseconds from the first request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from kvrelay.planner.setting import NodeEvent, Stream, What
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "Happened",
    "Incident",
    "LeftOut",
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
_FLIPS = re.compile(r"it changes its role from \w+ to (prefill|decode)$")
_STILL_THERE = ("it is draining", "it was removed")
"""Reasons of a node that takes no legs but ends those which it has."""


class NodeNamed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node as it began, and the models that it has served."""

    name: str
    role: Role
    models: list[str] = []


class _Nodes(msgspec.Struct, frozen=True, tag="nodes", tag_field="kind"):
    nodes: list[NodeNamed]
    version: int = _VERSION


class Requested(msgspec.Struct, frozen=True, tag="request", tag_field="kind", omit_defaults=True):
    """A request; `blocks` name the full blocks of its prompt as in a trace."""

    at_ms: float
    prompt: int
    output: int
    session: str = ""
    priority: int = 0
    blocks: list[int] = []
    ttft_ms: float | None = None
    model: str = ""
    total_ms: float | None = None


class Happened(msgspec.Struct, frozen=True, tag="node", tag_field="kind", omit_defaults=True):
    """An event of a node (see NodeEvent)."""

    at_ms: float
    name: str
    what: What
    role: Role | None = None
    pace: float = 1.0


_LINE: msgspec.json.Decoder[_Nodes | Requested | Happened] = msgspec.json.Decoder(
    _Nodes | Requested | Happened
)


@dataclass(slots=True)
class LeftOut:
    """A count of a log's requests that cannot be replayed."""

    refused: int = 0
    tokens: int = 0
    """Tokens of their prompts, as the router guessed."""
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident, in the order of time."""

    nodes: Sequence[NodeNamed]
    requests: Sequence[Requested]
    happened: Sequence[Happened]
    left_out: LeftOut = field(default_factory=LeftOut)

    def of_model(self, model: str) -> Incident:
        """Return what concerns a model: its nodes and all that they have served."""
        if not any(model in node.models for node in self.nodes):
            return self
        nodes = [node for node in self.nodes if model in node.models or not node.models]
        names = {node.name for node in nodes}
        theirs = {"", *(each for node in nodes for each in node.models)}
        return Incident(
            nodes,
            [each for each in self.requests if each.model in theirs],
            [each for each in self.happened if each.name in names],
            self.left_out,
        )

    def lines(self) -> list[bytes]:
        later: list[Requested | Happened] = [*self.requests, *self.happened]
        later.sort(key=lambda each: each.at_ms)
        return [msgspec.json.encode(each) + b"\n" for each in (_Nodes(list(self.nodes)), *later)]


def read_incident(lines: Iterable[bytes]) -> Incident:
    """Read an incident's own lines or a router's log. Raises ConfigError."""
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
            raise ConfigError(
                f"the incident has version {line.version}, and this release reads {_VERSION}"
            )
        else:
            nodes = line.nodes
    known = {node.name for node in nodes}
    unknown = next((each.name for each in happened if each.name not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"something happened to {unknown}, which the incident's first line does not name"
        )
    if not requests or not any(node.role is Role.DECODE for node in nodes):
        raise ConfigError("an incident needs a request and a decode node at least")
    return Incident(
        nodes,
        sorted(requests, key=lambda each: each.at_ms),
        sorted(happened, key=lambda each: each.at_ms),
    )


class _Logged(msgspec.Struct, frozen=True):
    time: datetime
    message: str = ""
    status: int = 0
    model: str = ""
    prompt_tokens: int | str = "-"
    output_tokens: int = 0
    prefill: str = "-"
    decode: str = "-"
    key: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    total_ms: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens if isinstance(self.prompt_tokens, int) else 0

    @property
    def ran_on(self) -> list[tuple[str, Role]]:
        named = ((self.prefill, Role.PREFILL), (self.decode, Role.DECODE))
        return [
            (name, role)
            for names, role in named
            for name in names.split(",")
            if name not in ("", "-")
        ]


@dataclass(frozen=True, slots=True)
class _Told:
    at: float
    name: str
    role: Role
    kept_out: str | None = None
    served: bool = False


def of_log(lines: Iterable[bytes]) -> Incident:
    """Read the log of a router with `--log-format json`. Raises ConfigError if no line tells."""
    decoder = msgspec.json.Decoder(_Logged)
    requests: list[Requested] = []
    told: list[_Told] = []
    models: dict[str, set[str]] = {}
    left_out = LeftOut()
    for line in lines:
        try:
            logged = decoder.decode(line)
        except MALFORMED:
            continue
        now = logged.time.timestamp() * 1e3
        if logged.total_ms is not None:
            for name, role in logged.ran_on:
                told.append(_Told(now, name, role, served=True))
                models.setdefault(name, set()).update(filter(None, [logged.model]))
            if logged.tokens and logged.output_tokens:
                requests.append(_requested(logged, now, logged.total_ms))
            else:
                left_out.unanswered += 1
        elif logged.status:
            left_out.refused += 1
            left_out.tokens += logged.tokens
        elif found := _UP.match(logged.message):
            told.append(_Told(now, found[2], Role(found[1])))
        elif found := _OUT.match(logged.message):
            told.append(_Told(now, found[2], Role(found[1]), found[3]))
    if not requests:
        raise ConfigError(
            "the log tells of no request that was answered; it must be a router's, with "
            "--log-format json"
        )
    begins = min(each.at_ms for each in requests)
    roles, happened = _happened(told, begins)
    ordered = sorted(roles.items(), key=lambda each: (each[1] is Role.DECODE, each[0]))
    nodes = [NodeNamed(name, role, sorted(models.get(name, ()))) for name, role in ordered]
    moved = [
        msgspec.structs.replace(each, at_ms=round(each.at_ms - begins, 3)) for each in requests
    ]
    return Incident(nodes, sorted(moved, key=lambda each: each.at_ms), happened, left_out)


def _requested(logged: _Logged, now: float, total_ms: float) -> Requested:
    return Requested(
        now - total_ms,
        logged.tokens,
        logged.output_tokens,
        ttft_ms=round(logged.queue_ms + logged.prefill_ms, 3),
        total_ms=total_ms,
        model=logged.model,
    )


def _happened(told: Sequence[_Told], begins: float) -> tuple[dict[str, Role], list[Happened]]:
    first: dict[str, _Told] = {}
    for each in told:
        first.setdefault(each.name, each)
    roles = {name: each.role for name, each in first.items()}
    # Of which the first that is heard is that it has come.
    later = [
        each
        for each in first.values()
        if each.at > begins and each.kept_out is None and not each.served
    ]
    happened = [Happened(0.0, each.name, What.DOWN) for each in later]
    out = {each.name for each in later}
    now_is = dict(roles)
    for each in told:
        at_ms, name = max(0.0, round(each.at - begins, 3)), each.name
        if each.served:
            continue
        if each.kept_out is None:
            if name in out:
                happened.append(Happened(at_ms, name, What.UP))
            if each.role is not now_is[name]:
                happened.append(Happened(at_ms, name, What.ROLE, each.role))
            now_is[name] = each.role
            out.discard(name)
        elif name in out:
            continue
        elif flips := _FLIPS.match(each.kept_out):
            now_is[name] = Role(flips[1])
            happened.append(Happened(at_ms, name, What.ROLE, now_is[name]))
        else:
            happened.append(
                Happened(at_ms, name, What.AWAY if each.kept_out in _STILL_THERE else What.DOWN)
            )
            out.add(name)
    return roles, happened


def streams_of_incident(incident: Incident) -> list[Stream]:
    return [
        Stream(
            each.at_ms, each.prompt, each.output, tuple(each.blocks), each.session, each.priority
        )
        for each in incident.requests
    ]


def events_of(incident: Incident, prefill: int, decode: int) -> list[NodeEvent]:
    """Return what happened to those of its nodes that a cluster of this size has."""
    numbers: dict[str, int] = {}
    for role, first, many in ((Role.PREFILL, 0, prefill), (Role.DECODE, prefill, decode)):
        names = [node.name for node in incident.nodes if node.role is role]
        numbers.update(zip(names, range(first, first + many), strict=False))
    return [
        NodeEvent(each.at_ms, numbers[each.name], each.what, each.role, each.pace)
        for each in incident.happened
        if each.name in numbers
    ]
