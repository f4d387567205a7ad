"""An incident: what was asked of a cluster and what happened to its nodes, from a router's log.

Times are milliseconds from the first request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

import msgspec

from kvrelay.planner.setting import NodeEvent, Stream, What
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.frames import MALFORMED

__all__ = ["Incident", "Requested", "events_of", "read_incident", "streams_of_incident"]

_UP = re.compile(r"(prefill|decode) node (\S+) is up")
_OUT = re.compile(r"(prefill|decode) node (\S+) is kept out: (.*)")
_FLIPS = re.compile(r"it changes its role from \w+ to (prefill|decode)$")
_STILL_THERE = ("it is draining", "it was removed")
"""Reasons of a node that takes no legs but ends those which it has."""


@dataclass(frozen=True, slots=True)
class Requested:
    at_ms: float
    prompt: int
    output: int
    ttft_ms: float
    total_ms: float
    model: str = ""


@dataclass(slots=True)
class Incident:
    """An incident, in the order of time."""

    nodes: dict[str, Role] = field(default_factory=dict)
    """The role of each node as it began, prefill nodes first."""
    models: dict[str, set[str]] = field(default_factory=dict)
    requests: list[Requested] = field(default_factory=list)
    happened: list[tuple[float, str, What, Role | None]] = field(default_factory=list)
    """Time, node, what, and its new role."""
    refused: int = 0
    refused_tokens: int = 0
    """Tokens of prompts that were refused, as the router guessed."""
    unanswered: int = 0

    def of_model(self, model: str) -> Incident:
        """Return what concerns a model: its nodes and all that they have served."""
        if not any(model in theirs for theirs in self.models.values()):
            return self
        names = [name for name in self.nodes if model in self.models.get(name, {model})]
        theirs = {"", *(each for name in names for each in self.models.get(name, ()))}
        return replace(
            self,
            nodes={name: self.nodes[name] for name in names},
            requests=[each for each in self.requests if each.model in theirs],
            happened=[each for each in self.happened if each[1] in names],
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
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    total_ms: float | None = None


def read_incident(lines: Iterable[bytes]) -> Incident:
    """Read the log of a router with `--log-format json`. Raises ConfigError if no line tells."""
    decoder, found = msgspec.json.Decoder(_Logged), Incident()
    ups: dict[str, float] = {}
    now_is: dict[str, Role] = {}
    out: set[str] = set()

    def known(name: str, role: str) -> Role:
        return now_is.setdefault(name, found.nodes.setdefault(name, Role(role)))

    for line in lines:
        try:
            logged = decoder.decode(line)
        except MALFORMED:
            continue
        now = logged.time.timestamp() * 1e3
        tokens = logged.prompt_tokens if isinstance(logged.prompt_tokens, int) else 0
        if logged.total_ms is not None:
            for role, names in ((Role.PREFILL, logged.prefill), (Role.DECODE, logged.decode)):
                for name in names.split(","):
                    if name not in ("", "-"):
                        known(name, role)
                        found.models.setdefault(name, set()).update({logged.model} - {""})
            if tokens and logged.output_tokens:
                ttft_ms, total_ms = logged.queue_ms + logged.prefill_ms, logged.total_ms
                asked = now - total_ms, tokens, logged.output_tokens, ttft_ms, total_ms
                found.requests.append(Requested(*asked, logged.model))
            else:
                found.unanswered += 1
        elif logged.status:
            found.refused += 1
            found.refused_tokens += tokens
        elif up := _UP.match(logged.message):
            role, name = Role(up[1]), up[2]
            if name not in now_is:
                ups[name] = now
            if name in out:
                found.happened.append((now, name, "up", None))
            if known(name, role) is not role:
                found.happened.append((now, name, "role", role))
            now_is[name] = role
            out.discard(name)
        elif (gone := _OUT.match(logged.message)) and gone[2] not in out:
            name, why = gone[2], gone[3]
            known(name, gone[1])
            if flips := _FLIPS.match(why):
                now_is[name] = Role(flips[1])
                found.happened.append((now, name, "role", now_is[name]))
            else:
                what: What = "away" if why in _STILL_THERE else "down"
                found.happened.append((now, name, what, None))
                out.add(name)
    if not found.requests:
        raise ConfigError(
            "the log tells of no request that was answered; it must be a router's, with "
            "--log-format json"
        )
    return _from_the_first(found, ups)


def _from_the_first(found: Incident, ups: dict[str, float]) -> Incident:
    begins = min(each.at_ms for each in found.requests)
    for name, at in ups.items():
        if at > begins:  # it was not there at first
            found.happened += [(begins, name, "down", None), (at, name, "up", None)]
    in_order = sorted(found.nodes.items(), key=lambda each: (each[1] is Role.DECODE, each[0]))
    requests = [replace(each, at_ms=round(each.at_ms - begins, 3)) for each in found.requests]
    return replace(
        found,
        nodes=dict(in_order),
        requests=sorted(requests, key=lambda each: each.at_ms),
        happened=[
            (max(0.0, round(at - begins, 3)), name, what, role)
            for at, name, what, role in sorted(found.happened, key=lambda each: each[0])
        ],
    )


def streams_of_incident(incident: Incident) -> list[Stream]:
    return [Stream(each.at_ms, each.prompt, each.output) for each in incident.requests]


def events_of(incident: Incident, prefill: int, decode: int) -> list[NodeEvent]:
    """Return what happened to those of its nodes that a cluster of this size has."""
    numbers: dict[str, int] = {}
    for role, first, many in ((Role.PREFILL, 0, prefill), (Role.DECODE, prefill, decode)):
        names = [name for name, began in incident.nodes.items() if began is role]
        numbers.update(zip(names, range(first, first + many), strict=False))
    return [
        NodeEvent(at, numbers[name], what, role)
        for at, name, what, role in incident.happened
        if name in numbers
    ]
