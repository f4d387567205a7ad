"""`kvrelay replay`: simulates what a router has logged, as it was or with other nodes or policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.load.measures import percentile
from kvrelay.planner.incident import Incident, events_of, read_incident, streams_of_incident
from kvrelay.planner.rate_card import RateCard
from kvrelay.planner.setting import NETWORK_MS, Setting
from kvrelay.planner.world import simulate
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import POLICY_NAMES

__all__ = ["Replayed", "check_policy", "replayed", "run", "size_of"]

_SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A summary: answered requests in sorted milliseconds, and counts of the others."""

    ttft: Sequence[float]
    tpot: Sequence[float]
    refused: int
    failed: int
    moved: int


def size_of(incident: Incident, nodes: str) -> tuple[int, int]:
    """Return how many prefill and decode nodes P:D names, or there were. Raises ConfigError."""
    if not nodes:
        count = sum(role is Role.PREFILL for role in incident.nodes.values())
        return count, len(incident.nodes) - count
    prefill, _, decode = nodes.partition(":")
    if not (prefill.isdigit() and decode.isdigit() and int(decode)):
        raise ConfigError(
            f"--nodes must be P:D, as in 2:3, with one decode node at least, got {nodes!r}"
        )
    return int(prefill), int(decode)


def check_policy(policy: str) -> None:
    if policy not in POLICY_NAMES:
        raise ConfigError(f"--policy {policy!r} is none of {', '.join(POLICY_NAMES)}")


def replayed(incident: Incident, card: RateCard, size: tuple[int, int], policy: str) -> Replayed:
    """Simulate the incident. Raises ConfigError for an unknown policy."""
    check_policy(policy)
    streams = streams_of_incident(incident)
    prefill, decode = size
    events = events_of(incident, prefill, decode)
    simulate(
        streams,
        Setting(policy, prefill, decode, prefixes=False, card=card, events=events),
    )
    answered = [stream for stream in streams if stream.answered]
    return Replayed(
        sorted(stream.ttft + NETWORK_MS for stream in answered),
        sorted(stream.tpot for stream in answered if stream.output > 1),
        sum(stream.refused for stream in streams),
        sum(stream.failed for stream in streams),
        sum(stream.moved > 0 for stream in streams),
    )


def run(path: Path, card: RateCard, nodes: str, policy: str, console: Console) -> int:
    """Replay an incident and print it beside what happened. Raises ConfigError."""
    try:
        with path.open("rb") as lines:
            incident = read_incident(lines)
    except OSError as why:
        raise ConfigError(f"{why.filename} cannot be read: {why.strerror}") from why
    whole, incident = incident, incident.of_model(card.model)
    size = size_of(incident, nodes)
    found = replayed(incident, card, size, policy)
    console.print(_table(incident, found, size, policy))
    happened = len(events_of(incident, *size))
    console.print(
        f"{len(incident.requests)} requests, {found.refused} of them refused and {found.failed} "
        f"given up; {happened} of {len(incident.happened)} events happened to these nodes; "
        f"{found.moved} requests lost a node and went on elsewhere."
    )
    for line in _left_out(whole, incident):
        console.print(line)
    return 0


def _left_out(whole: Incident, replayed: Incident) -> list[str]:
    told = []
    if whole.refused or whole.unanswered:
        told.append(
            f"Left out: {whole.refused} requests that were refused then, with about "
            f"{whole.refused_tokens} tokens of prompts, and {whole.unanswered} that began and had no "
            "answer; the log "
            "cannot say how long those would have been."
        )
    others = len(whole.requests) - len(replayed.requests)
    if others:
        told.append(
            f"Left out: {others} requests of models on other nodes than those of the card's."
        )
    elif len(models := {each.model for each in replayed.requests}) > 1:
        told.append(f"All models are on all nodes here: {', '.join(sorted(models))}.")
    return told


def _table(incident: Incident, found: Replayed, size: tuple[int, int], policy: str) -> Table:
    ttft = sorted(each.ttft_ms for each in incident.requests)
    tpot = sorted(
        (each.total_ms - each.ttft_ms) / (each.output - 1)
        for each in incident.requests
        if each.output > 1
    )
    table = Table(title="milliseconds", title_justify="left")
    for name in ("", *(f"p{share * 100:g}" for share in _SHARES)):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    replay = f"{size[0]}P{size[1]}D, {policy}"
    for name, values in (
        ("TTFT then", ttft),
        (f"TTFT {replay}", found.ttft),
        ("TPOT then", tpot),
        (f"TPOT {replay}", found.tpot),
    ):
        if values:
            table.add_row(name, *(f"{percentile(values, share):,.1f}" for share in _SHARES))
    return table
