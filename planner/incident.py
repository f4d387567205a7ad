"""An incident: what a router has logged of its requests, and the nodes that it had."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import msgspec

from kvrelay.planner.setting import Stream
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.frames import MALFORMED

__all__ = ["Incident", "read_incident"]

_UP = re.compile(r"(prefill|decode) node (\S+) is up")


class Logged(msgspec.Struct, frozen=True):
    """A line of the log."""

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

    @property
    def tokens(self) -> int:
        return self.prompt_tokens if isinstance(self.prompt_tokens, int) else 0

    @property
    def stream(self) -> Stream:
        last = self.time.timestamp() * 1e3
        at = last - (self.total_ms or 0.0)
        first = at + self.queue_ms + self.prefill_ms
        return Stream(at, self.tokens, self.output_tokens, first=first, last=last)


@dataclass(frozen=True, slots=True)
class Incident:
    nodes: dict[str, Role] = field(default_factory=dict)
    """The first role of each node."""
    models: dict[str, set[str]] = field(default_factory=dict)
    """Models that each node has served."""
    requests: Sequence[Logged] = ()
    """Requests that were answered."""
    refused: Sequence[Logged] = ()
    unanswered: int = 0

    @property
    def streams(self) -> list[Stream]:
        """Return the answered requests with their fate, in milliseconds from the first one."""
        streams = sorted((each.stream for each in self.requests), key=lambda each: each.at)
        begins = streams[0].at
        for each in streams:
            each.at, each.first, each.last = (
                round(at - begins, 3) for at in (each.at, each.first, each.last)
            )
        return streams

    def of_model(self, model: str) -> Incident:
        """Return what concerns a model: its nodes and all that they have served."""
        if not any(model in theirs for theirs in self.models.values()):
            return self
        nodes = {
            name: role
            for name, role in self.nodes.items()
            if model in self.models.get(name, {model})
        }
        theirs = {"", *(each for name in nodes for each in self.models.get(name, ()))}
        requests = [each for each in self.requests if each.model in theirs]
        return replace(self, nodes=nodes, requests=requests)


def read_incident(lines: Iterable[bytes]) -> Incident:
    """Read the log of a router with `--log-format json`. Raises ConfigError if no line tells."""
    decoder, nodes = msgspec.json.Decoder(Logged), dict[str, Role]()
    models: dict[str, set[str]] = {}
    requests, refused, unanswered = list[Logged](), list[Logged](), 0
    for line in lines:
        try:
            logged = decoder.decode(line)
        except MALFORMED:
            continue
        if logged.total_ms is not None:
            for role, names in ((Role.PREFILL, logged.prefill), (Role.DECODE, logged.decode)):
                for name in {*names.split(",")} - {"", "-"}:
                    nodes.setdefault(name, role)
                    models.setdefault(name, set()).update({logged.model} - {""})
            if logged.tokens and logged.output_tokens:
                requests.append(logged)
            else:
                unanswered += 1
        elif logged.status:
            refused.append(logged)
        elif up := _UP.match(logged.message):
            nodes.setdefault(up[2], Role(up[1]))
    if not requests:
        raise ConfigError(
            "the log tells of no request that was answered; it must be a router's, with "
            "--log-format json"
        )
    return Incident(nodes, models, requests, refused, unanswered)
