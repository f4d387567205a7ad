"""The price against fixed splits: share of requests in time, simulated; and a decision's cost.

    python -m benchmarks.placement [--nodes 2 4 16] [--seconds 60] [--card FILE]

Works at rates of the issue for each GPU, and mixtures of them whose lengths are log-normal,
arriving by Poisson and in bursts (rates of chat, code, summarise). `colocated`: servers in turn
that compute what they generate; `strict`: the price, roles kept; `price`: decode nodes compute
prompts as it says, by targets that it is not told; `told`: of targets, so that it refuses who would
miss them; `roles`: told, and nodes change their roles. `best split` is the best of colocated and of
strict splits of as many nodes (of 16, each fourth). With more than two nodes the first two minutes
do not count, until roles have changed. Equal seeds give equal figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

from benchmarks.roles import H200, RoleController
from kvrelay.load.measures import Targets, percentile
from kvrelay.load.workloads import LENGTHS
from kvrelay.planner.engine import Engine
from kvrelay.planner.goodput import is_good
from kvrelay.planner.rate_card import RateCard, read_card
from kvrelay.planner.router import Router
from kvrelay.planner.setting import Setting, Stream
from kvrelay.planner.world import World
from kvrelay.router.placement import Placement

__all__ = ["main"]

_CARD = Path(__file__).parent / "rate_cards" / "h200-llama-3.1-8b.json"
_WORKS = {"chat": (35, 39, 41), "code": (8, 10, 11.6), "summarise": (2.05, 2.35, 2.6)}
_MIXTURES = ((20, 0, 1.0), (30, 0, 1.0), (10, 3, 1.6), (20, 6, 0), (15, 4, 0.8))
_SPLITS = {2: (1,), 4: (2, 3), 16: (4,)}
_RUNS = 6
"""Nodes times seeds of a cell, at least one."""
_SETTLES_S = 120.0
_CALLS, _EACH = 2_000, 4
"""Decisions that are timed, and how many a node has got before."""


def decisions_us(nodes: int) -> list[float]:
    """Return the microseconds of decisions over so many nodes with work, in order."""
    half = nodes // 2
    engines = [Engine(H200, 128, lambda *_: None, None) for _ in range(nodes)]
    setting = Setting(prefill=half, decode=nodes - half, prefixes=False, card=H200)
    router, took = Router(setting, engines), []
    for at in range(_CALLS):
        began = time.process_time()
        wanted = router.wanted(Stream(0.0, 500 + 37 * at % 977, 100))
        found = router.placer.find(wanted)
        took.append((time.process_time() - began) * 1e6)
        assert isinstance(found, Placement)
        if at < _EACH * nodes:
            router.placer.take(wanted, found)
    return sorted(took)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The load of each GPU: requests per second by kind; their targets, or 0.2 s and 0.1 ms a
    token, and 15 ms.
    """

    name: str
    rates: dict[str, float]
    targets: Targets | None = None
    shape: float = 1.0
    """Shape of the gamma distribution of the gaps between two requests of a kind."""
    spread: float = 0.0

    def streams(self, gpus: int, seconds: float, seed: int) -> list[Stream]:
        rng = Random(seed)
        made = [
            each
            for kind in self.rates
            for each in self._kind(kind, gpus * self.rates[kind], seconds * 1e3, rng)
        ]
        return sorted(made, key=lambda each: each.at)

    def _kind(self, kind: str, rate: float, duration_ms: float, rng: Random) -> Iterator[Stream]:
        now = 0.0
        while (
            rate
            and (now := now + rng.gammavariate(self.shape, 1e3 / (rate * self.shape))) < duration_ms
        ):
            tokens = [
                int(mean * rng.lognormvariate(-(self.spread**2) / 2, self.spread))
                for mean in (LENGTHS[kind].prompt, LENGTHS[kind].output)
            ]
            prompt, output = max(16, tokens[0]), max(4, tokens[1])
            yield Stream(
                now, prompt, output, targets=self.targets or Targets(200 + 0.1 * prompt, 15)
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One run: a load on a cluster."""

    load: Load
    setting: Setting
    told: bool
    seconds: float
    seed: int
    changes_roles: bool = False

    def in_time(self) -> float:
        gpus = self.setting.prefill + self.setting.decode
        first = _SETTLES_S * 1e3 if gpus > 2 else 0.0
        streams = self.load.streams(gpus, self.seconds + first / 1e3, self.seed)
        wanted = {stream: stream.targets for stream in streams}
        if not self.told:
            for stream in streams:
                stream.targets = None
        gc.disable()
        try:
            world = World(streams, self.setting)
            if self.changes_roles:
                RoleController(world, 0.0)
            world.run()
        finally:
            gc.enable()
            gc.collect()
        kept = [
            is_good(stream, targets)
            for stream, targets in wanted.items()
            if stream.at >= first and targets
        ]
        return sum(kept) / len(kept)


def loads(gpus: int) -> list[Load]:
    """Return those that so many nodes are tried with; the larger the cluster, the fewer."""
    works = [
        Load(
            f"{name} {rate:g}", {name: rate}, Targets(LENGTHS[name].ttft_ms, LENGTHS[name].tpot_ms)
        )
        for name, rates in _WORKS.items()
        for rate in _some(rates, gpus)
    ]
    mixed = [
        Load(
            ", ".join(f"{rate:g}" for rate in rates) + bursts,
            dict(zip(_WORKS, rates, strict=True)),
            None,
            shape,
            0.5,
        )
        for shape, bursts in (((1.0, ""), (0.3, ", bursts")) if gpus <= 4 else ((1.0, ""),))
        for rates in (_MIXTURES if gpus == 2 else _MIXTURES[-1:])
    ]
    return works + mixed


def _some(rates: Sequence[float], gpus: int) -> Sequence[float]:
    return rates if gpus == 2 else rates[1:] if gpus == 4 else rates[1:2]


def ways(gpus: int, card: RateCard) -> dict[str, tuple[Setting, bool]]:
    """Return the ways of so many nodes to serve, and whether the router is told of targets."""
    step, plain = max(1, gpus // 4), Setting(prefixes=False, card=card)
    found = {
        "colocated": (
            dataclasses.replace(plain, policy="round_robin", prefill=0, decode=gpus),
            False,
        )
    }
    for prefill in range(step, gpus, step):
        split = dataclasses.replace(plain, prefill=prefill, decode=gpus - prefill)
        found[f"strict {prefill}"] = dataclasses.replace(split, strict_roles=True), False
        if prefill in _SPLITS[gpus]:
            found |= {f"price {prefill}": (split, False), f"told {prefill}": (split, True)}
            if gpus > 2:
                found[f"roles {prefill}"] = split, True
    return found


def rows(load: Load, gpus: int, shares: dict[str, float]) -> Iterator[str]:
    """Return a line for each split, of the shares of all ways."""
    fixed = {
        name: share for name, share in shares.items() if name.startswith(("colocated", "strict"))
    }
    best = max(fixed, key=lambda name: fixed[name])
    named = best if best == "colocated" else _split(int(best.split()[1]), gpus)
    for prefill in _SPLITS[gpus]:
        names = (
            "colocated",
            *(f"{name} {prefill}" for name in ("strict", "price", "told", "roles")),
        )
        cells = [f"{shares[name]:.1%}" if name in shares else "" for name in names]
        yield (
            f"| {_split(prefill, gpus)} | {load.name} | {' | '.join(cells)} | "
            f"{fixed[best]:.1%}, {named} |"
        )


def _split(prefill: int, gpus: int) -> str:
    return f"{prefill}P{gpus - prefill}D"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "benchmarks.placement", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", choices=_SPLITS, default=list(_SPLITS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--card", type=Path, default=_CARD, help="of the nodes")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args(argv)
    card, seconds = read_card(arguments.card), arguments.seconds
    with ProcessPoolExecutor(arguments.jobs) as processes:

        def shares(cells: Mapping[str, Sequence[Cell]]) -> dict[str, float]:
            found = processes.map(Cell.in_time, [cell for of in cells.values() for cell in of])
            return {name: sum(next(found) for _ in of) / len(of) for name, of in cells.items()}

        print(
            "| nodes | load for each GPU | colocated | strict | price | told | roles | best split |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for gpus in arguments.nodes:
            seeds = range(1, 1 + max(1, _RUNS // gpus))
            for load in loads(gpus):
                cells = {
                    name: [
                        Cell(load, setting, told, seconds, seed, name.startswith("roles"))
                        for seed in seeds
                    ]
                    for name, (setting, told) in ways(gpus, card).items()
                }
                print("\n".join(rows(load, gpus, shares(cells))), flush=True)
    decisions = decisions_us(100)
    print(
        f"\nA decision over 100 nodes: p50 {percentile(decisions, 0.5):.0f} us, p99 "
        f"{percentile(decisions, 0.99):.0f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
