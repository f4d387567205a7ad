"""Roles that follow the load against every static ratio: chat, code, long documents, chat again.

    python -m benchmarks.roles [--nodes 6] [--minutes 10] [--load 0.65]

A simulation with the rate card of an H200 whose steps all take eight times as long, targets too, so
that an hour is simulated in a minute; changes of role take 1 s and what the drained node still has
to do. They begin at both ends: with one prefill node, and with one decode node. Good are requests
that keep both targets. Equal seeds give equal figures.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvrelay.load.measures import Targets
from kvrelay.planner.goodput import attained
from kvrelay.planner.rate_card import Point, RateCard, read_card
from kvrelay.planner.router import MODEL
from kvrelay.planner.setting import Result, Setting, Stream
from kvrelay.planner.world import World
from kvrelay.router.roles import EVERY_S, OTHER, RolePlanner, work_of
from kvrelay.wire.config import Role

__all__ = ["H200", "TARGETS", "Phase", "RoleController", "main", "run", "slowed"]

H200 = read_card(Path(__file__).parent / "rate_cards" / "h200-fitted.json")
"""The card of an H200 with a model of 8 billion parameters in bf16, fitted to RESULTS.md.

Measured: prompts of 4k at 43,400 tokens/s, 512 MiB in 2 ms, decode steps of 4.03, 5.18 and 9.2 ms
at 1, 32 and 128 requests of 1k, and of 8.1 ms at 32 of 4k.
"""

SLOWER = 8.0
TARGETS = Targets(1_000.0 * SLOWER, 15.0 * SLOWER)
# Requests a second that an H200 serves at most, in whatever role: the physics.
_WORK = (
    ("chat", 40.0, 512, 256),
    ("code", 13.0, 2_048, 64),
    ("documents", 2.5, 8_192, 256),
    ("chat", 40.0, 512, 256),
)


def slowed(card: RateCard, factor: float) -> RateCard:
    """Return the card of a node on which everything takes so many times as long."""

    def times(points: Sequence[Point]) -> list[Point]:
        return [msgspec.structs.replace(each, ms=each.ms * factor) for each in points]

    return msgspec.structs.replace(
        card,
        prefill=times(card.prefill),
        decode=times(card.decode),
        mixed=times(card.mixed),
        transfer={name: times(points) for name, points in card.transfer.items()},
        max_gap_ms=card.max_gap_ms * factor,
    )


def phases_of(nodes: int, seconds: float, load: float) -> list[Phase]:
    """Each kind of work for so long, at this share of what so many nodes could serve."""
    return [
        Phase(seconds, load * rate * nodes / SLOWER, prompt, output)
        for _, rate, prompt, output in _WORK
    ]


Flips = list[tuple[float, Role, str]]
"""Role changes: when, to which role, and why."""


class RoleController:
    """A clock for role changes of a simulated cluster, which router/roles.py decides."""

    def __init__(self, world: World, tpot_ms: float) -> None:
        self._world, self._tpot_ms, self._roles = world, tpot_ms, RolePlanner()
        self.flips: Flips = []
        world.clock.later(EVERY_S * 1e3, self._look)

    def _look(self, now: float) -> None:
        world, roles = self._world, self._roles
        nodes = {role: world.router.pool.up(role) for role in OTHER}
        loads = {role: [node.state for node in of] for role, of in nodes.items()}
        up = {role: len(of) for role, of in nodes.items()}
        hindered = "a node is changing its role" if world.switching else ""
        refused = world.router.placer.refused_work(now / 1e3).get(MODEL, (0.0, 0.0))
        role = roles.look(up, *work_of(loads, self._tpot_ms, refused), hindered)
        if role is not None:
            node = max(nodes[OTHER[role]], key=lambda node: node.url)
            self.flips.append((now, role, roles.why))
            world.change_role(node, role, now)
        world.clock.later(now + EVERY_S * 1e3, self._look)


def run(
    phases: Sequence[Phase], prefill: int, nodes: int, seed: int = 0, *, changes: bool
) -> tuple[Result, Flips]:
    card = slowed(H200, SLOWER)
    setting = Setting(
        prefill=prefill,
        decode=nodes - prefill,
        prefixes=False,
        seed=seed,
        card=card,
        targets=TARGETS,
    )
    world = World(shifting(phases, seed), setting)
    flips = RoleController(world, TARGETS.tpot_ms).flips if changes else []
    gc.disable()
    try:
        return world.run(), flips
    finally:
        gc.enable()
        gc.collect()


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each static ratio and for roles that follow, then each decision."""
    parser = argparse.ArgumentParser(
        "benchmarks.roles", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each kind of work")
    parser.add_argument(
        "--load", type=float, default=0.65, help="of what the best ratio for each kind could serve"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    nodes, seconds = arguments.nodes, arguments.minutes * 60
    phases = phases_of(nodes, seconds, arguments.load)
    print(f"| ratio | good | {' | '.join(name for name, *_ in _WORK)} | changes |")
    print("|---|---|" + "---|" * len(_WORK) + "---|")
    flips = []
    for prefill, changes in [*((x, False) for x in range(1, nodes)), (1, True), (nodes - 1, True)]:
        result, changed = run(phases, prefill, nodes, arguments.seed, changes=changes)
        streams = result.streams
        shares = [
            attained([each for each in streams if at <= each.at / 1e3 / seconds < at + 1], TARGETS)
            for at in range(len(phases))
        ]
        name = f"{prefill}P{nodes - prefill}D" + (", changing" if changes else "")
        cells = " | ".join(f"{share:.1%}" for share in shares)
        print(
            f"| {name} | {attained(streams, TARGETS):.1%} | {cells} | {len(changed)} |",
            flush=True,
        )
        flips += [(name, at, why) for at, _, why in changed]
    for name, at, why in flips:
        print(f"{name}, {at / 1e3:,.0f} s: {why}")
    return 0


_SPREAD = 0.4
"""Standard deviation of the logarithm of lengths."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Poisson arrivals for so long; lengths are log-normal around their medians."""

    seconds: float
    rate_s: float
    prompt: int
    output: int


def shifting(phases: Sequence[Phase], seed: int) -> list[Stream]:
    rng, begins, streams = random.Random(f"shifting {seed}"), 0.0, []
    for phase in phases:
        now = begins
        ends = begins + phase.seconds * 1e3
        while (now := now + rng.expovariate(phase.rate_s) * 1e3) < ends:
            prompt = max(1, round(phase.prompt * rng.lognormvariate(0, _SPREAD)))
            streams.append(
                Stream(now, prompt, max(2, round(phase.output * rng.lognormvariate(0, _SPREAD))))
            )
        begins = ends
    return streams


if __name__ == "__main__":
    sys.exit(main())
