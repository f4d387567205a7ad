"""Goodput of prefill and decode nodes against colocated servers, on the same GPUs, with the same
nodes.

    python -m benchmarks.goodput --out goodput                          # all of it, as far as there
    is time python -m benchmarks.goodput --out goodput --work chat --for-s 560 python -m
    benchmarks.goodput --serve --out goodput-serve --work chat --rates 120,136 python -m
    benchmarks.goodput --draw goodput goodput-serve --svg goodput.svg

Starts `kvrelay up`; for each work measures xPyD behind the router (`relay`) and the same nodes as
colocated servers that the client asks in turn (`direct`), a probe of each in turn: the highest rate
at which 90 % of the requests meet their targets. Then all nodes become decode nodes, and the router
spreads requests among them as colocated servers (`routed`): it goes on with that where it holds
what they do not when asked in turn. What time is left goes into the highest rates without gaps, of
all three, and then into rates around, for the plot. `--serve` starts as many `kvrelay serve`
instead, to show that they are no other servers. Each probe is written as it ends, into files that
`kvrelay bench --compare` reads, too; started again with the same --out it goes on. `--draw` reads
such folders and prints tables in Markdown; a rate that is not known to 5 % is told as the two
between which it lies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.goodput.drawing import drawn, read_folders, tables
from benchmarks.goodput.measuring import OutOfTime, Place, judged
from benchmarks.goodput.nodes import Nodes, cluster, servers
from benchmarks.goodput.works import WORKS, Arm, Work, parse_work
from kvrelay.wire.errors import ConfigError

_MODEL = Path(__file__).parents[1] / "models" / "llama-3.1-8b.json"
_LAST_TOKENS = 1_000
"""At the end of a vocabulary, where special tokens are: no prompt has them."""
_STOP_S = 25.0
_FACTORS = (0.6, 1.25)
_MOST, _MOST_SMOOTH = 14, 5
"""Probes of an arm for its highest rate; then for the one without gaps, as all of the first are
judged for both.
"""


class _Course:
    """One run of the command."""

    def __init__(self, asked: argparse.Namespace, nodes: Nodes, until: float) -> None:
        self._asked, self._nodes = asked, nodes
        self._works: Sequence[Work] = asked.work
        self._arms = [Arm.DIRECT] if asked.serve else [Arm(each) for each in asked.arms.split(",")]
        model = json.loads(Path(asked.model).read_text(encoding="utf-8"))
        sizes = until, int(model["vocab_size"]) - asked.last_tokens
        label = f"{len(nodes.urls)} x kvrelay serve, asked in turn" if asked.serve else ""
        self._places = {
            (work.name, arm): Place(work, arm, nodes, asked.out, *sizes, asked.hardware, label)
            for work in self._works
            for arm in dict.fromkeys(
                [*self._arms, Arm.DIRECT]
            )  # what it has held before is where `routed` begins
        }
        self._practised: set[Place] = set()

    async def run(self) -> None:
        """As much of it as there is time for. Raises OutOfTime, and ConfigError if a file is of
        something else.
        """
        for place in self._places.values():
            await place.meet()
        if self._asked.rates:
            for place in [*self._split(self._works), *self._routed(self._works)]:
                for rate in self._asked.rates:
                    await self._probe(place, rate)
            return
        # All that is wanted first of all works comes before what is wanted second of one.
        for smooth in (False, True):
            for work in self._works:
                if work.smooth or not smooth:
                    await self._search(self._split([work]), smooth=smooth)
                    for place in self._routed([work]):
                        await self._search_routed(place, smooth=smooth)
        for place in sorted(self._split(self._works), key=lambda place: place.arm):
            for rate in place.beside(_FACTORS):
                await self._probe(place, rate)

    def told(self) -> list[str]:
        """What each arm holds, as far as it is known."""
        lines = []
        for (name, _), place in self._places.items():
            if place.runs:
                smooth = f"; without gaps: {place.held(smooth=True)}" if place.work.smooth else ""
                lines.append(
                    f"== {name}, {place.label}: {place.held(smooth=False)} requests/s{smooth}"
                )
        return lines

    def _split(self, works: Sequence[Work]) -> list[Place]:
        """Those for which nodes have both roles: asked in turn they go by none. That one is the
        first, so if time runs out it is not the one that was asked less.
        """
        return [
            self._places[work.name, arm]
            for work in works
            for arm in (Arm.DIRECT, Arm.RELAY)
            if arm in self._arms
        ]

    def _routed(self, works: Sequence[Work]) -> list[Place]:
        return [self._places[work.name, Arm.ROUTED] for work in works if Arm.ROUTED in self._arms]

    async def _search(self, places: Sequence[Place], *, smooth: bool) -> None:
        """Narrow down what each holds, by a probe of each in turn."""
        left = dict.fromkeys(places, _MOST_SMOOTH if smooth else _MOST)
        while left:
            for place in list(left):
                rate = place.wanted(smooth=smooth)
                if (
                    rate is None
                    or not left[place]
                    or not await self._probe(place, rate, smooth=smooth)
                ):
                    del left[place]
                else:
                    left[place] -= 1

    async def _search_routed(self, place: Place, *, smooth: bool) -> None:
        """First where they do not hold if they are asked in turn: there it holds, too, or it is no
        better.
        """
        breaks = self._places[place.work.name, Arm.DIRECT].held(smooth=smooth).breaks
        if breaks is not None:
            known = any(run.rate == breaks for run in judged(place.runs, smooth=smooth))
            if not known and not await self._probe(place, breaks, smooth=smooth):
                return
            ours = place.held(smooth=smooth).breaks
            if ours is not None and ours <= breaks:
                return
        await self._search([place], smooth=smooth)

    async def _probe(self, place: Place, rate: float, *, smooth: bool = False) -> bool:
        """With the roles that it wants; False if the client was too slow to tell. Raises OutOfTime."""
        place.in_time(rate)
        flipped = False
        if self._nodes.router and place.arm is not Arm.DIRECT:
            flipped = await self._nodes.have(place.work.prefill if place.arm is Arm.RELAY else 0)
        if flipped or place not in self._practised:
            await place.practise()
            self._practised.add(place)
        run = await place.probe(rate)
        told = bool(judged([run], smooth=smooth))
        if not told:
            print(f"the client was too slow: {run.measures.client.bottleneck}", flush=True)
        return told


async def _course(asked: argparse.Namespace) -> int:
    until = time.monotonic() + asked.for_s - _STOP_S
    flags = [
        f"--model={Path(asked.model).resolve()}",
        "--load-format=dummy",
        "--no-enable-prefix-caching",
        *asked.flag,
    ]
    first: Work = asked.work[0]
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="goodput-logs-"))
    asked.out.mkdir(parents=True, exist_ok=True)
    starting: AbstractAsyncContextManager[Nodes]
    if asked.serve:
        starting = servers(first.prefill + first.decode, flags, logs)
    else:
        starting = cluster(first.prefill, first.decode, flags, asked.router_flag, logs)
    async with starting as nodes:
        print(
            f"== {len(nodes.urls)} nodes are up after {nodes.started_s:.0f} s; logs in {logs}",
            flush=True,
        )
        course = _Course(asked, nodes, until)
        try:
            await course.run()
        except OutOfTime as why:
            print(f"== out of time: {why}; what was measured is kept in {asked.out}", flush=True)
            return 3
        finally:
            print("\n".join(course.told()), flush=True)
    return 0


def _rates(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.goodput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("goodput"), help="folder of the results")
    parser.add_argument(
        "--work", type=parse_work, action="append", help=f"of {', '.join(WORKS)}; again for more"
    )
    parser.add_argument("--arms", default="relay,direct,routed", help="which of these")
    parser.add_argument("--rates", type=_rates, default=[], help="these rates, and no search")
    parser.add_argument("--for-s", type=float, default=580.0, help="it has ended by then")
    parser.add_argument(
        "--serve", action="store_true", help="kvrelay serve on each GPU, and no cluster"
    )
    parser.add_argument("--model", default=str(_MODEL), help="a config.json")
    parser.add_argument(
        "--last-tokens", type=int, default=_LAST_TOKENS, help="of the vocabulary, not asked"
    )
    parser.add_argument("--flag", action="append", default=[], help="of the nodes; again for more")
    parser.add_argument(
        "--router-flag", action="append", default=[], help="a router of its own with these flags"
    )
    parser.add_argument("--hardware", default="", help="in words; else what nvidia-smi says")
    parser.add_argument("--logs", type=Path, help="folder of the processes' logs")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="FOLDER", help="measure nothing; tables of these"
    )
    parser.add_argument("--svg", type=Path, help="with --draw: the plot")
    asked = parser.parse_args(argv)
    asked.work = asked.work or list(WORKS.values())
    if len({work.prefill + work.decode for work in asked.work}) > 1:
        parser.error("these works want different numbers of nodes; run them one by one")
    if len({work.name for work in asked.work}) < len(asked.work):
        parser.error("two works have one name")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """0; 3 if there was not time enough; 2 if files cannot be gone on with, or compared."""
    asked = _arguments(argv)
    try:
        if not asked.draw:
            return asyncio.run(_course(asked))
        found = read_folders(asked.draw)
    except ConfigError as why:
        print(why, file=sys.stderr)
        return 2
    print(tables(found))
    if asked.svg is not None:
        asked.svg.write_text(drawn(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
