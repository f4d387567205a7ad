"""`kvrelay plan`: how many nodes of which role, for a workload and targets, from rate cards.

A split is simulated unless its nodes have no time for the rate of another one.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from kvrelay.load.measures import Targets
from kvrelay.load.workloads import (
    AGENTS,
    TRACE_BLOCK_TOKENS,
    TRACED,
    Arrival,
    Work,
    agents_of,
    lengths_of,
    sessions,
)
from kvrelay.planner.goodput import (
    AGENT_BLOCK_TOKENS,
    ATTAINMENT,
    Served,
    at_rate,
    at_sessions,
    bound_of,
    highest,
    requests_needed,
    turns_of,
)
from kvrelay.planner.rate_card import RateCard
from kvrelay.planner.sessions import streams_of_sessions
from kvrelay.planner.setting import Setting, Stream, Streams
from kvrelay.wire.config_checks import gib
from kvrelay.wire.errors import ConfigError

__all__ = ["Sized", "Wanted", "run", "sized", "workload_of"]

_SAMPLE, _AGENTS = 4_000, 50
_NOTHING_SHARED = 1 << 40  # tokens of a block: no prompt has a full one
_CAPTION = (
    "{} in time for each GPU and asked in all; p90 of TTFT and TPOT, p99 of the time "
    "between two tokens, in ms"
)
_POOLS, _PAYS = (1, 2, 4), 1.05
_FIRST = 0.8
"""Share of a split's bound at which its highest rate is looked for first."""


def workload_of(name: str) -> Work:
    """Return a workload by its name, as IN:OUT, or a trace. Raises ConfigError."""
    if name.partition(",")[0] in AGENTS:
        return Work(agents=agents_of(name))
    if name.endswith(TRACED):
        return Work(trace=name)
    lengths = lengths_of(name)
    return Work(lengths.prompt, lengths.output)


@dataclass(frozen=True, slots=True)
class Wanted:
    gpus: int
    card: RateCard
    work: Work
    targets: Targets
    rate: float
    """Requests a second, or sessions of agents at once; 0: as many as can be."""

    @property
    def unit(self) -> str:
        return "requests/s" if self.work.agents is None else "sessions"

    def asking(self, count: int) -> list[Stream]:
        """Return so many requests, or as many as a trace has. Raises ConfigError."""
        work = self.work
        if work.agents:
            return turns_of(work.agents, _AGENTS)[:count]
        drawn = sessions(work, Arrival("trace" if work.trace else "poisson", 1.0), "plan")
        block_tokens = TRACE_BLOCK_TOKENS if work.trace else _NOTHING_SHARED
        return streams_of_sessions([*islice(drawn, count)], 0, block_tokens)

    def serve(self, asks: Streams, setting: Setting, guess: float, bound: float) -> Served:
        """Simulate the rate, or find the highest from a guess on."""
        agents = self.work.agents

        def at(rate: float) -> Served:
            if agents:
                return at_sessions(agents, setting, max(1, round(rate)))
            return at_rate(asks, setting, rate)

        return at(self.rate) if self.rate else highest(at, guess, bound, whole=agents is not None)

    def requests(self, rate: float) -> tuple[int, Streams]:
        """Return how many requests a run at this rate needs, and as many, or as there are."""
        needed = requests_needed(self.asking(_SAMPLE), self.targets, rate)
        return needed, self.asking(needed)


@dataclass(frozen=True, slots=True)
class Sized:
    """A split with its bound, and the simulation of it, if it was worth one."""

    setting: Setting
    bound: float
    """Requests a second, or sessions, at which its nodes have no time left."""
    short: str
    served: Served | None = None

    @property
    def gpus(self) -> int:
        return (self.setting.prefill + self.setting.decode) * self.setting.card.gpus

    @property
    def goodput(self) -> float:
        """Requests a second, or sessions, that keep both targets."""
        return 0.0 if self.served is None else self.served.rate * self.served.attained

    @property
    def keeps(self) -> bool:
        return (
            self.served is not None and self.served.rate > 0 and self.served.attained >= ATTAINMENT
        )


def sized(wanted: Wanted, tried: Callable[[str], None] = lambda _: None) -> list[Sized]:
    """Return all splits, the best first; `tried` is told of each simulation. Raises ConfigError."""
    targets, agents, card = wanted.targets, wanted.work.agents, wanted.card
    nodes = wanted.gpus // card.gpus
    if nodes < 1:
        raise ConfigError(f"a node takes {card.gpus} GPUs and there are {wanted.gpus}; give more")
    sample = wanted.asking(_SAMPLE)
    # A turn of a session in time takes so many seconds at most, with the gap before it.
    turn_s = (
        1.0
        if agents is None
        else fmean(each.gap + targets.ttft_ms + targets.tpot_ms * each.output for each in sample)
        / 1e3
    )
    bounds = []
    for prefill in range(nodes):
        setting = Setting(
            prefill=prefill,
            decode=nodes - prefill,
            block_size=AGENT_BLOCK_TOKENS if agents else TRACE_BLOCK_TOKENS,
            prefixes=any(each.blocks for each in sample),
            card=card,
            targets=targets,
        )
        bound, short = bound_of(setting, sample)
        bounds.append(Sized(setting, bound * turn_s, short))
    bounds.sort(key=lambda each: -each.bound)
    # The same requests for all splits.
    asks = sample if agents else wanted.requests(wanted.rate or bounds[0].bound)[1]
    apart = next((each for each in bounds if each.setting.prefill), None)
    found, best = [], 0.0
    for each in bounds:
        if wanted.rate or each.bound > best or each is apart:
            tried(each.setting.name)
            served = wanted.serve(asks, each.setting, _FIRST * each.bound, each.bound)
            each = replace(each, served=served)
        found.append(each)
        best = max(best, each.goodput)
    return sorted(found, key=lambda each: (each.served is None, -each.goodput, -each.bound))


def run(wanted: Wanted, console: Console, *, as_json: bool) -> int:
    """Print all splits and return 0 if one keeps the targets, else 1."""
    with console.status("planning") as status:
        found = sized(wanted, lambda name: status.update(f"simulating {name}"))
    best = next((each for each in found if each.keeps), None)
    if as_json:
        rows = [_row(each) for each in found]
        told = msgspec.json.encode({"keeps_targets": best is not None, "splits": rows})
        console.print_json(told.decode())
        return int(best is None)
    console.print(_table(found, wanted))
    rate = wanted.rate or max(each.bound for each in found)
    needed, asks = (0, ()) if wanted.work.agents else wanted.requests(rate)
    if len(asks) < needed:
        console.print(
            f"The trace has {len(asks)} requests, and at {rate:.1f} requests/s a run needs {needed} to "
            f"tell what lasts."
        )
    if best is None:
        console.print(f"No split keeps the targets for {ATTAINMENT:.0%} of the requests.")
        return 1
    console.print(f"Best: {_why(best, wanted.unit)}")
    if wanted.work.agents:
        for line in _host_lines(wanted, best):
            console.print(line)
    apart = next((each for each in found if each.setting.prefill and each.keeps), None)
    if apart is not None:
        if apart is not best:
            console.print(f"Best with prefill nodes: {_why(apart, wanted.unit)}")
        for line in _to_start(apart, wanted.targets):
            console.print(line)
    return 0


def _row(each: Sized) -> dict[str, object]:
    return {
        "split": each.setting.name,
        "prefill": each.setting.prefill,
        "decode": each.setting.decode,
        "gpus": each.gpus,
        "goodput": round(each.goodput, 3),
        "goodput_per_gpu": round(each.goodput / each.gpus, 3),
        "bound": round(each.bound, 3),
        "short": each.short,
        "simulated": None if each.served is None else dataclasses.asdict(each.served),
    }


def _table(found: Sequence[Sized], wanted: Wanted) -> Table:
    targets = wanted.targets
    asked = f"{wanted.rate:g} {wanted.unit}" if wanted.rate else f"the most at {ATTAINMENT:.0%}"
    title = f"{asked}: TTFT within {targets.ttft_ms:g} ms, TPOT within {targets.tpot_ms:g} ms"
    table = Table(
        title=title,
        title_justify="left",
        caption=_CAPTION.format(wanted.unit),
        caption_justify="left",
    )
    for name in ("split", "per GPU", "asked", "in time", "TTFT", "TPOT", "gap", "short of"):
        table.add_column(
            name, justify="left" if name in ("split", "short of") else "right", no_wrap=True
        )
    for each in found:
        served = each.served
        if served is None:
            cells = [f"< {each.bound / each.gpus:.2f}", f"< {each.bound:.1f}", *[""] * 4]
        else:
            cells = [
                f"{each.goodput / each.gpus:.2f}",
                f"{served.rate:.1f}",
                f"{served.attained:.0%}",
                f"{served.ttft_p90:,.0f}",
                f"{served.tpot_p90:.1f}",
                f"{served.itl_p99:,.0f}",
            ]
            cells = [cell.replace("nan", "-") for cell in cells]
        table.add_row(each.setting.name, *cells, each.short)
    return table


def _host_lines(wanted: Wanted, best: Sized) -> Iterator[str]:
    """Tell what host memory of one, two, four pools brings to the best split, while it brings more."""
    card, before = best.setting.card, best.goodput
    if not card.kv_token_bytes:
        yield "The card does not tell the bytes of KV of a token (kv_token_bytes): profile again."
        return
    for pools in _POOLS:
        tokens = pools * card.kv_tokens
        setting = replace(best.setting, below={"host": tokens})
        served = wanted.serve((), setting, before, best.bound)
        held, size = served.rate * served.attained, gib(tokens * card.kv_token_bytes)
        pays = held >= before * _PAYS
        yield (
            f"Host memory of {size} for each node{'' if pays else ' does not pay'}: {held:.0f} "
            f"sessions in time, {held / best.gpus:.1f} for each GPU, "
            f"{served.found:.1%} of what caches could have."
        )
        if not pays:
            return
        before = held


def _why(best: Sized, unit: str) -> str:
    told = (
        f"{best.setting.name}, {best.goodput:.1f} {unit} in time, {best.goodput / best.gpus:.2f} "
        f"for each GPU; it is short of {best.short} first"
    )
    if best.served is not None and not best.setting.prefill:
        told += (
            f". Answers wait for prompts beside them, {best.served.itl_p99:,.0f} ms between two "
            "tokens at p99"
        )
    return f"{told}."


def _to_start(best: Sized, targets: Targets) -> list[str]:
    split, card, tp = best.setting, best.setting.card, ""
    if card.gpus > 1:
        tp = "".join(
            f" --{role}-tensor-parallel-size {card.gpus}" for role in ("prefill", "decode")
        )
    ids, model = ",".join(map(str, range(best.gpus))), shlex.quote(card.model)
    return [
        f"kvrelay compose --model {model} --prefill {split.prefill} --decode {split.decode} "
        f"--gpus {ids}{tp} --ttft-target-ms {targets.ttft_ms:g} --tpot-target-ms "
        f"{targets.tpot_ms:g}",
        f"kubectl -n kvrelay scale deployment/kvrelay-prefill --replicas={split.prefill}",
        f"kubectl -n kvrelay scale deployment/kvrelay-decode --replicas={split.decode}",
        "The simulated router knows the targets; on Kubernetes write both into its router.yaml.",
    ]
