"""`kvrelay replay`: simulates what a router has logged or a trace, with other nodes, policies, tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.load.measures import percentile
from kvrelay.load.workloads import TRACE_BLOCK_TOKENS, TRACED, Arrival, Work, sessions
from kvrelay.planner.incident import Incident, read_incident
from kvrelay.planner.rate_card import RateCard
from kvrelay.planner.sessions import streams_of_sessions
from kvrelay.planner.setting import Result, Setting, Stream, Streams
from kvrelay.planner.world import simulate
from kvrelay.wire.config import CacheConfig, Role
from kvrelay.wire.config_checks import gib
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.ladder import RUNGS
from kvrelay.wire.router_config import POLICY_NAMES

__all__ = ["run", "size_of"]

_SHARES = (0.5, 0.9, 0.99)
_RUNGS = RUNGS[:-1]


def size_of(nodes: str, roles: Sequence[Role]) -> tuple[int, int]:
    """Return how many prefill and decode nodes P:D names, or there were. Raises ConfigError."""
    if not nodes:
        return roles.count(Role.PREFILL), roles.count(Role.DECODE)
    prefill, _, decode = nodes.partition(":")
    if not (prefill.isdigit() and decode.isdigit() and int(decode)):
        raise ConfigError(
            f"--nodes must be P:D, as in 2:3, with one decode node at least, got {nodes!r}"
        )
    return int(prefill), int(decode)


def run(
    path: Path,
    card: RateCard,
    nodes: str,
    policies: Sequence[str],
    tiers: Sequence[CacheConfig],
    console: Console,
    *,
    pull: str,
) -> int:
    """Print a replayed log beside what happened, or a trace, for each policy and size of the tiers.

    Raises ConfigError.
    """
    for flag, values, known in (
        ("--policy", policies, POLICY_NAMES),
        ("--kv-pull", [pull], ("auto", "never")),
    ):
        for value in set(values).difference(known):
            raise ConfigError(f"{flag} {value!r} is not one of {', '.join(known)}")
    traced, left_out = path.name.endswith(TRACED), list[str]()
    if traced:
        drawn = [*sessions(Work(trace=f"{path}"), Arrival("trace"), "")]
        streams = streams_of_sessions(drawn, 0, TRACE_BLOCK_TOKENS)
        roles = [Role.PREFILL, Role.DECODE]
    else:
        whole = _logged(path)
        incident = whole.of_model(card.model)
        if not incident.requests:
            raise ConfigError(
                f"the log tells of no answered request on nodes of {card.model!r}, the model of the "
                f"card; take the card of {', '.join(sorted({each.model for each in whole.requests}))}"
            )
        streams, roles = incident.streams, [*incident.nodes.values()]
        left_out = [*_left_out(whole, incident)]
    prefill, decode = size_of(nodes, roles)
    setting = Setting(
        prefill=prefill,
        decode=decode,
        block_size=TRACE_BLOCK_TOKENS,
        prefixes=traced,
        pulls=pull == "auto",
        card=card,
    )
    of = ": % of the tokens that a cache could have had" if traced else ""
    title = f"{setting.name}, {len(streams)} requests{of}"
    table = Table("", title=title, title_justify="left")
    times = [f"{name} p{share * 100:g}, ms" for name in ("TTFT", "TPOT") for share in _SHARES]
    columns = [[*(("found", *_RUNGS) if traced else ()), *times, "refused"]]
    if not traced:
        table.add_column("then", justify="right")
        columns.append([*_times(streams), f"{len(whole.refused)}"])
    for policy, tier in product(policies, tiers):
        copies = [Stream(one.at, one.prompt, one.output, one.blocks) for one in streams]
        below = _tokens_below(card, tier)
        result = simulate(copies, replace(setting, policy=policy, below=below))
        refused = sum(stream.refused for stream in copies)
        columns.append([*(_found(result) if traced else ()), *_times(copies), f"{refused}"])
        sizes = map(gib, (tier.kv_host_memory, tier.kv_store_size))
        name = "\n{} host\n{} store".format(*sizes) if traced else ""
        table.add_column(policy + name, justify="right")
    for row in zip(*columns, strict=True):
        table.add_row(*("-" if "nan" in cell else cell for cell in row))
    console.print(table)
    for line in left_out:
        console.print(line)
    return 0


def _logged(path: Path) -> Incident:
    try:
        with path.open("rb") as lines:
            return read_incident(lines)
    except OSError as why:
        raise ConfigError(f"{why.filename} cannot be read: {why.strerror}") from why


def _tokens_below(card: RateCard, cache: CacheConfig) -> dict[str, int]:
    sizes = {"host": cache.kv_host_memory, "store": cache.kv_store_size}
    if any(sizes.values()) and not card.kv_token_bytes:
        raise ConfigError(
            "the rate card does not tell the bytes of KV of a token (kv_token_bytes); profile again"
        )
    return {name: size // card.kv_token_bytes for name, size in sizes.items() if size}


def _found(result: Result) -> Iterator[str]:
    rungs = result.rungs
    possible = max(1, rungs.total() - rungs["new"])
    yield f"{result.found:.2%}"
    yield from (f"{rungs[rung] / possible:.2%}" for rung in _RUNGS)


def _times(streams: Streams) -> list[str]:
    answered = [stream for stream in streams if stream.answered]
    ttft = [stream.ttft for stream in answered]
    tpot = [stream.tpot for stream in answered if stream.output > 1]
    return [f"{percentile(each, share):,.1f}" for each in (ttft, tpot) for share in _SHARES]


def _left_out(whole: Incident, replayed: Incident) -> Iterator[str]:
    if whole.refused or whole.unanswered:
        tokens = sum(each.tokens for each in whole.refused)
        yield (
            f"Left out: {len(whole.refused)} requests that were refused then, with about {tokens} "
            f"tokens of prompts, and {whole.unanswered} that began and had no answer; the log "
            "cannot say how long those would have been."
        )
    others = len(whole.requests) - len(replayed.requests)
    if others:
        yield f"Left out: {others} requests of models on other nodes than those of the card's."
    elif len(models := {each.model for each in replayed.requests}) > 1:
        yield f"All models are on all nodes here: {', '.join(sorted(models))}."
