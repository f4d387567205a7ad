"""Goodput of prefill and decode nodes against colocated servers, on the same GPUs, with the same nodes.

    python -m benchmarks.goodput --out goodput                          # all of it, as far as there is time
    python -m benchmarks.goodput --out goodput --work chat --for-s 560
    python -m benchmarks.goodput --serve --out goodput-serve --work chat --rates 120,136
    python -m benchmarks.goodput --draw goodput goodput-serve --svg goodput.svg

Starts `kvrelay up`; for each work measures xPyD behind the router (`relay`) and the same nodes as colocated servers
that the client asks in turn (`direct`): the highest rate at which 90 % of the requests meet their targets, then rates
around it. At the end all nodes become decode nodes, and the router spreads requests among them as colocated servers
(`routed`): it goes on with that where it is better than in turn. `--serve` starts as many `kvrelay serve` instead, to
show that they are no other servers. Each probe is written as it ends, into files that `kvrelay bench --compare` reads,
too; started again with the same --out it goes on. `--draw` reads such folders and prints tables in Markdown.
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
from benchmarks.goodput.measuring import OutOfTime, Place, met_share
from benchmarks.goodput.nodes import Nodes, cluster, servers
from benchmarks.goodput.works import WORKS, Arm, Work, parse_work

_MODEL = Path(__file__).parents[1] / "models" / "llama-3.1-8b.json"
_LAST_TOKENS = 1_000
"""At the end of a vocabulary, where special tokens are: no prompt has them."""
_STOP_S = 25.0
_FACTORS = (0.6, 1.25)


class _Course:
    """One run of the command."""

    def __init__(self, asked: argparse.Namespace, nodes: Nodes, until: float) -> None:
        self._asked, self._nodes, self._until = asked, nodes, until
        model = json.loads(Path(asked.model).read_text(encoding="utf-8"))
        self._vocab_size = int(model["vocab_size"]) - asked.last_tokens
        self._found: dict[tuple[str, Arm], float] = {}
        self._practised: set[tuple[str, Arm]] = set()

    async def run(self) -> None:
        """As much of it as there is time for. Raises OutOfTime."""
        arms = [Arm.DIRECT] if self._asked.serve else [Arm(each) for each in self._asked.arms.split(",")]
        both = [arm for arm in (Arm.RELAY, Arm.DIRECT) if arm in arms]
        works: Sequence[Work] = self._asked.work
        for work in works:
            for arm in both:
                await self._measure(work, arm)
        if Arm.ROUTED in arms:
            for work in works:
                await (self._measure(work, Arm.ROUTED) if self._asked.rates else self._routed(work))
        if not self._asked.rates:
            for arm in both:
                for work in works:
                    found = self._found[work.name, arm]
                    await (await self._place(work, arm)).around(found, _FACTORS)

    async def _measure(self, work: Work, arm: Arm) -> None:
        place = await self._place(work, arm)
        if self._asked.rates:
            for rate in self._asked.rates:
                await place.probe(rate)
            return
        found = self._found[work.name, arm] = await place.search()
        print(f"== {work.name}, {work.arm_name(arm)}: {found:.4g} requests/s", flush=True)
        if arm is Arm.RELAY and work.smooth:
            smooth = await place.search(smooth=True)
            print(f"== {work.name}, {work.arm_name(arm)}, smooth: {smooth:.4g} requests/s", flush=True)

    async def _routed(self, work: Work) -> None:
        """At the rate that others of the kind held: whether it is better there, and if so, its own highest."""
        place = await self._place(work, Arm.ROUTED)
        rate = self._found.get((work.name, Arm.DIRECT)) or work.colocated_rate
        if not place.runs:
            await place.probe(rate)
        direct = await self._place(work, Arm.DIRECT, there=False)
        others = [met_share(run, smooth=False) for run in direct.runs if run.rate == rate]
        ours = [met_share(run, smooth=False) for run in place.runs if run.rate == rate]
        if ours and others and ours[0] < min(others):
            print(f"== {work.name}: asked in turn is as good or better: {others[0]:.1%} and {ours[0]:.1%}", flush=True)
            return
        found = await place.search()
        print(f"== {work.name}, {work.arm_name(Arm.ROUTED)}: {found:.4g} requests/s", flush=True)

    async def _place(self, work: Work, arm: Arm, *, there: bool = True) -> Place:
        """`there`: nodes have their roles for it, and it is ready to probe."""
        label = f"{len(self._nodes.urls)} x kvrelay serve, asked in turn" if self._asked.serve else ""
        sizes = self._until, self._vocab_size
        place = Place(work, arm, self._nodes, self._asked.out, *sizes, self._asked.hardware, label)
        if there:
            other = self._nodes.router and arm is not Arm.DIRECT
            flipped = other and await self._nodes.have(work.prefill if arm is Arm.RELAY else 0)
            await place.meet(practise=bool(flipped) or (work.name, arm) not in self._practised)
            self._practised.add((work.name, arm))
        return place


async def _course(asked: argparse.Namespace) -> int:
    until = time.monotonic() + asked.for_s - _STOP_S
    flags = [f"--model={Path(asked.model).resolve()}", "--load-format=dummy", "--no-prefix-cache", *asked.flag]
    first: Work = asked.work[0]
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="goodput-logs-"))
    asked.out.mkdir(parents=True, exist_ok=True)
    starting: AbstractAsyncContextManager[Nodes]
    if asked.serve:
        starting = servers(first.prefill + first.decode, flags, logs)
    else:
        starting = cluster(first.prefill, first.decode, flags, asked.router_flag, logs)
    async with starting as nodes:
        print(f"== {len(nodes.urls)} nodes are up after {nodes.started_s:.0f} s; logs in {logs}", flush=True)
        try:
            await _Course(asked, nodes, until).run()
        except OutOfTime as why:
            print(f"== out of time: {why}; what was measured is kept in {asked.out}", flush=True)
            return 3
    return 0


def _rates(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("goodput"), help="folder of the results")
    parser.add_argument("--work", type=parse_work, action="append", help=f"of {', '.join(WORKS)}; again for more")
    parser.add_argument("--arms", default="relay,direct,routed", help="which of these")
    parser.add_argument("--rates", type=_rates, default=[], help="these rates, and no search")
    parser.add_argument("--for-s", type=float, default=580.0, help="it has ended by then")
    parser.add_argument("--serve", action="store_true", help="kvrelay serve on each GPU, and no cluster")
    parser.add_argument("--model", default=str(_MODEL), help="a config.json")
    parser.add_argument("--last-tokens", type=int, default=_LAST_TOKENS, help="of the vocabulary, not asked")
    parser.add_argument("--flag", action="append", default=[], help="of the nodes; again for more")
    parser.add_argument("--router-flag", action="append", default=[], help="a router of its own with these flags")
    parser.add_argument("--hardware", default="", help="in words; else what nvidia-smi says")
    parser.add_argument("--logs", type=Path, help="folder of the processes' logs")
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FOLDER", help="measure nothing; tables of these")
    parser.add_argument("--svg", type=Path, help="with --draw: the plot")
    asked = parser.parse_args(argv)
    asked.work = asked.work or list(WORKS.values())
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """0; 3 if there was not time enough."""
    asked = _arguments(argv)
    if not asked.draw:
        return asyncio.run(_course(asked))
    found = read_folders(asked.draw)
    print(tables(found))
    if asked.svg is not None:
        asked.svg.write_text(drawn(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
