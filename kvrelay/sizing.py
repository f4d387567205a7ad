"""`kvrelay plan`: how many nodes of which role, for a workload and targets, from rate cards.

Splits are estimated first; those worth a try are simulated.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from kvrelay.load.workloads import TRACE_BLOCK_TOKENS, Asked, read_trace
from kvrelay.planner.estimate import Demand, Estimate, Goal, Split, demand_of, plans
from kvrelay.planner.goodput import Served, at_rate, highest_rate, requests_needed
from kvrelay.planner.rate_card import RateCard, read_card
from kvrelay.planner.setting import Setting, Targets
from kvrelay.planner.speeds import Speeds
from kvrelay.planner.workloads import WORKLOADS
from kvrelay.wire.errors import ConfigError

__all__ = ["Asking", "Sized", "Wanted", "read_cards", "run", "setting_of", "sized", "workload_of"]

_SAMPLE = 4_000
_LENGTHS = re.compile(r"(\d{1,7}):(\d{1,7})")
_TRACED = (".jsonl", ".gz")
_CAPTION = (
    "requests/s in time for each GPU and asked in all; p90 of TTFT, TPOT and the longest "
    "gap of an answer, in ms"
)
_BEHIND = 0.6
"""Splits with an estimate below this share of the best simulated one are not simulated."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A sample of requests that stand for a workload, and the size of their named blocks in tokens."""

    make: Callable[[int], Sequence[Asked]]
    """Make so many requests; no more than a trace has."""
    block_size: int


def workload_of(name: str) -> Asking:
    """Return a workload by its name, as IN:OUT, or from a trace. Raises ConfigError."""
    if name in WORKLOADS:
        workload = WORKLOADS[name]
        return Asking(
            lambda count: workload.make(Random(f"{name} plan"), count), workload.block_size
        )
    lengths = _LENGTHS.fullmatch(name)
    if lengths:
        prompt, output = int(lengths[1]), int(lengths[2])
        if not prompt or not output:
            raise ConfigError(f"--workload {name} asks for no tokens; give at least 1:1")
        return Asking(lambda count: _alike(prompt, output, count), TRACE_BLOCK_TOKENS)
    if name.endswith(_TRACED):
        try:
            traced = read_trace(Path(name))
            return Asking(lambda count: traced[:count], TRACE_BLOCK_TOKENS)
        except (OSError, ValueError, KeyError, TypeError) as why:
            raise ConfigError(
                f"the trace {name} cannot be read: {why}; it has a JSON object a line"
            ) from why
    known = ", ".join(WORKLOADS)
    raise ConfigError(
        f"--workload {name!r} is none of {known}; nor lengths as 512:256, nor a trace (.jsonl, "
        f".jsonl.gz)"
    )


def _alike(prompt: int, output: int, count: int) -> list[Asked]:
    rng, now, asks = Random("plan"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(1.0)
        asks.append(Asked(now, prompt, output))
    return asks


@dataclass(frozen=True, slots=True)
class Wanted:
    """A question to `kvrelay plan`."""

    gpus: int
    cards: Sequence[RateCard]
    asking: Asking
    goal: Goal
    rate: float
    """Requests a second; 0: as many as can be."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A split, its estimate, and the simulation of it, if it was worth one."""

    guess: Estimate
    served: Served | None

    @property
    def goodput(self) -> float:
        """Requests a second that keep both targets."""
        if self.served is None:
            return self.guess.rate * self.guess.attained
        return self.served.rate * self.served.attained


def setting_of(split: Split, block_size: int, *, prefixes: bool) -> Setting:
    """Return the simulation of a split, with a router's default settings."""
    return Setting(
        prefill=split.prefill,
        decode=split.decode,
        block_size=block_size,
        prefixes=prefixes,
        speeds=Speeds(split.prefill_card),
        decode_speeds=Speeds(split.decode_card),
    )


def sized(wanted: Wanted, tried: Callable[[str], None] = lambda _: None) -> list[Sized]:
    """Return all splits, the best first; `tried` is told of each simulation. Raises ConfigError."""
    goal, sample = wanted.goal, wanted.asking.make(_SAMPLE)
    demand: Demand = demand_of(sample, wanted.asking.block_size)
    guesses = plans(wanted.gpus, wanted.cards, demand, goal)
    targets = Targets(goal.ttft_ms, goal.tpot_ms)
    # The same requests for all splits.
    asks = wanted.asking.make(requests_needed(sample, targets, wanted.rate or guesses[0].rate))
    prefixes = any(each.blocks for each in asks)
    apart = next((guess for guess in guesses if guess.split.prefill), None)
    found, best = [], 0.0
    for guess in guesses:
        setting = setting_of(guess.split, wanted.asking.block_size, prefixes=prefixes)
        if wanted.rate:
            tried(guess.split.name)
            found.append(Sized(guess, at_rate(asks, setting, targets, wanted.rate)))
        elif not guess.rate or (guess.rate < _BEHIND * best and guess is not apart):
            found.append(Sized(guess, None))
        else:
            tried(guess.split.name)
            found.append(
                Sized(guess, highest_rate(asks, setting, targets, goal.attainment, guess.rate))
            )
            best = max(best, found[-1].goodput)
    # A guess is not to be compared with what was seen.
    return sorted(found, key=lambda each: (each.served is None, -each.goodput))


def _keeps(each: Sized, goal: Goal) -> bool:
    return (
        each.served is not None and each.served.rate > 0 and each.served.attained >= goal.attainment
    )


def run(wanted: Wanted, console: Console, *, as_json: bool) -> int:
    """Print all splits and return 0 if one keeps the targets, else 1."""
    with console.status("planning") as status:
        found = sized(wanted, lambda name: status.update(f"simulating {name}"))
    goal = wanted.goal
    best = next((each for each in found if _keeps(each, goal)), None)
    if as_json:
        console.print_json(
            json.dumps(
                {"keeps_targets": best is not None, "splits": [_row(each) for each in found]}
            )
        )
        return 0 if best is not None else 1
    console.print(_table(found, wanted))
    if few := _too_few(wanted, found):
        console.print(few)
    if best is None:
        console.print(
            f"No split keeps the targets for {goal.attainment:.0%} of the requests: "
            f"{_why(found[0], wanted)}"
        )
        return 1
    console.print(f"Best: {best.guess.split.name}, {_why(best, wanted)}")
    apart = next((each for each in found if each.guess.split.prefill and _keeps(each, goal)), None)
    if apart is not None:
        if apart is not best:
            console.print(
                f"Best with prefill nodes: {apart.guess.split.name}, {_why(apart, wanted)}"
            )
        for line in _to_start(apart.guess.split, goal):
            console.print(line)
    return 0


def _too_few(wanted: Wanted, found: Sequence[Sized]) -> str:
    targets = Targets(wanted.goal.ttft_ms, wanted.goal.tpot_ms)
    rate = wanted.rate or max(each.guess.rate for each in found)
    needed = requests_needed(wanted.asking.make(_SAMPLE), targets, rate)
    there = len(wanted.asking.make(needed))
    if there == needed:
        return ""
    return (
        f"The trace has {there} requests, and at {rate:.1f} requests/s a run needs {needed} to "
        f"tell what lasts."
    )


def _row(each: Sized) -> dict[str, object]:
    split = each.guess.split
    return {
        "split": split.name,
        "prefill": split.prefill,
        "decode": split.decode,
        "gpus": split.gpus,
        "goodput": round(each.goodput, 3),
        "goodput_per_gpu": round(each.goodput / split.gpus, 3),
        "guessed_rate": round(each.guess.rate, 3),
        "short": each.guess.short,
        "prefill_use": round(each.guess.prefill_use, 3),
        "running": round(each.guess.running, 1),
        "simulated": None if each.served is None else dataclasses.asdict(each.served),
    }


def _table(found: Sequence[Sized], wanted: Wanted) -> Table:
    goal = wanted.goal
    asked = f"{wanted.rate:g} requests/s" if wanted.rate else f"the most at {goal.attainment:.0%}"
    title = f"{asked}: TTFT within {goal.ttft_ms:g} ms, TPOT within {goal.tpot_ms:g} ms"
    table = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    for name in ("split", "per GPU", "asked", "in time", "TTFT", "TPOT", "gap", "short of"):
        table.add_column(
            name, justify="left" if name in ("split", "short of") else "right", no_wrap=True
        )
    for each in found:
        guess, served = each.guess, each.served
        per_gpu = f"{each.goodput / guess.split.gpus:.2f}"
        if served is None:
            table.add_row(
                guess.split.name, f"~{per_gpu}", f"~{guess.rate:.1f}", "", "", "", "", guess.short
            )
            continue
        table.add_row(
            guess.split.name,
            per_gpu,
            f"{served.rate:.1f}",
            f"{served.attained:.0%}",
            f"{served.ttft_p90:,.0f}",
            f"{served.tpot_p90:.1f}",
            f"{served.longest_p90:,.0f}",
            guess.short,
        )
    return table


def _why(best: Sized, wanted: Wanted) -> str:
    guess, served = best.guess, best.served
    split = guess.split
    computing = "each server" if not split.prefill else "each prefill node"
    running = "each server" if not split.prefill else "each decode node"
    told = f"{best.goodput:.1f} requests/s in time, {best.goodput / split.gpus:.2f} for each GPU"
    if wanted.rate:
        told += f", where {guess.rate:.1f} requests/s are about the most that it keeps"
    told += (
        f". At its most {computing} computes prompts for {min(1.0, guess.prefill_use):.0%} of its "
        f"time and {running} "
        f"generates {guess.running:.0f} answers at once; {guess.short} is what it is short of first"
    )
    if served is not None and not split.prefill:
        told += (
            f". Answers wait for prompts beside them, {served.longest_p90:,.0f} ms at a time at p90"
        )
    return told + "."


def _to_start(split: Split, goal: Goal) -> list[str]:
    tp = ""
    if split.prefill_card.gpus > 1 or split.decode_card.gpus > 1:
        sizes = ("prefill", split.prefill_card.gpus), ("decode", split.decode_card.gpus)
        tp = "".join(f" --{role}-tensor-parallel-size {gpus}" for role, gpus in sizes)
    ids, model = ",".join(map(str, range(split.gpus))), shlex.quote(split.decode_card.model)
    return [
        f"kvrelay compose --model {model} --prefill {split.prefill} --decode {split.decode} "
        f"--gpus {ids}{tp} --ttft-target-ms {goal.ttft_ms:g} --tpot-target-ms {goal.tpot_ms:g}",
        f"kubectl -n kvrelay scale deployment/kvrelay-prefill --replicas={split.prefill}",
        f"kubectl -n kvrelay scale deployment/kvrelay-decode --replicas={split.decode}",
        "The simulated router knows the targets; on Kubernetes write both into its router.yaml.",
    ]


def read_cards(paths: Sequence[Path]) -> list[RateCard]:
    """Read rate cards of one model. Raises ConfigError."""
    cards = [read_card(path) for path in paths]
    for card in cards[1:]:
        if card.model != cards[0].model:
            raise ConfigError(
                f"the cards are of two models, {cards[0].model!r} and {card.model!r}; plan each "
                f"by itself"
            )
    return cards
