"""Which rates are tried, on whom, and what is kept: a file for each work and arm, written again after each probe.

A probe is one rate of `kvrelay bench`: a warm-up, seconds that count, and load behind them until the last that count
are answered. Owns the time: no probe begins that could not end by then.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.goodput.nodes import Nodes, router_cpu_s
from benchmarks.goodput.works import GAP_MS, Arm, Work
from kvrelay.bench import result_of
from load.config import BenchConfig
from load.experiment import Experiment
from load.results import Result, Run, read_result, write_result
from load.search import RateSearch

__all__ = ["OutOfTime", "Place", "met_share", "probe_s"]

_WARM_UP_S, _PRACTICE_S, _OVERHEAD_S, _DRAIN_S = 3.0, 3.0, 4.0, 2.0
_PRACTICE_TOKENS = 32
_STRIDE, _PRECISION = 1.15, 0.05
_MOST_SMOOTH = 3
"""Probes more for answers without gaps."""
_NEAR = 1.12


class OutOfTime(Exception):
    """What was kept is written; another run may go on with it."""


def met_share(run: Run, *, smooth: bool) -> float:
    """Of its requests that met their targets; `smooth`: and had no gap above GAP_MS."""
    good = sum(row.met and (not smooth or row.gap_ms <= GAP_MS) for row in run.rows)
    return good / max(1, len(run.rows))


def probe_s(work: Work) -> float:
    """How long one takes, about."""
    return _WARM_UP_S + work.window_s + 2 * work.answer_s + _DRAIN_S + _OVERHEAD_S


class Place:
    """Where one work is measured by one arm: its runs, those of an earlier file with them."""

    def __init__(
        self,
        work: Work,
        arm: Arm,
        nodes: Nodes,
        out: Path,
        until: float,
        vocab_size: int,
        hardware: str = "",
        label: str = "",
    ) -> None:
        """`until`: monotonic seconds. `label`: what the arm is called; empty takes the work's name for it."""
        self.work, self.arm, self._until, self._router = work, arm, until, nodes.router
        self._path = out / f"{work.name}-{arm}.json"
        lengths = work.lengths
        self._config = BenchConfig(
            url=nodes.router if arm is not Arm.DIRECT else ",".join(nodes.urls),
            api_key=nodes.key if arm is Arm.DIRECT else "",
            lengths=f"{lengths.prompt}:{lengths.output}",
            ttft_ms=lengths.ttft_ms,
            tpot_ms=lengths.tpot_ms,
            find_rate=True,  # whoever is not answered soon after his targets is not waited for
            duration_s=work.window_s,
            warm_up_s=_WARM_UP_S,
            gpus=work.prefill + work.decode,
            hardware=hardware,
            tell_targets=arm is not Arm.DIRECT,
            label=label or work.arm_name(arm),
            vocab_size=vocab_size,
            seed=int(time.time()),  # an earlier file's prompts are not asked again
        )
        self._began = datetime.datetime.now(datetime.UTC)
        self._experiment = Experiment(self._config)
        self._earlier: Result | None = read_result(self._path) if self._path.exists() else None

    @property
    def runs(self) -> Sequence[Run]:
        """All, also of an earlier file."""
        return [*(self._earlier.runs if self._earlier else ()), *self._experiment.runs]

    async def meet(self, *, practise: bool) -> None:
        """Ask who is there; `practise`: then have seconds that count nowhere, for nodes to meet and to be known."""
        if practise:
            of = self.work.lengths
            config = dataclasses.replace(
                self._config,
                lengths=f"{of.prompt}:{min(_PRACTICE_TOKENS, of.output)}",
                ttft_ms=500.0,  # so long answers are waited for
                tpot_ms=5.0,
                tell_targets=False,
                duration_s=_PRACTICE_S,
                warm_up_s=0.0,
            )
            experiment = Experiment(config)
            await experiment.meet()
            await experiment.probe(self.work.rate(self.arm) / 2)
        await self._experiment.meet()

    async def probe(self, rate: float) -> Run:
        """One more. Raises OutOfTime."""
        if time.monotonic() + probe_s(self.work) > self._until:
            raise OutOfTime(f"no time for {self.work.name} by {self._config.label} at {rate:g} requests/s")
        began, cpu_s = time.monotonic(), router_cpu_s(self._router)
        run = await self._experiment.probe(rate)
        took_s = time.monotonic() - began
        self._write()
        print(
            _told(self.work, self._config.label, run, took_s, (router_cpu_s(self._router) - cpu_s) / took_s), flush=True
        )
        return run

    async def search(self, *, smooth: bool = False, start: float = 0.0) -> float:
        """The highest rate at which 90 % meet their targets, that was seen to hold. Raises OutOfTime."""
        wanted = self._config.attainment
        most = _MOST_SMOOTH if smooth else 14
        search = RateSearch(start or self.work.rate(self.arm), wanted, _PRECISION, most, _STRIDE)
        for run in self.runs:
            search.know(run.rate, met_share(run, smooth=smooth))
        while (rate := search.next()) is not None:
            run = await self.probe(float(f"{rate:.3g}"))
            search.tell(met_share(run, smooth=smooth), rate=run.rate)
            if run.measures.client.bottleneck and run.measures.attainment < wanted:
                print(f"the client was too slow: {run.measures.client.bottleneck}", flush=True)
                break
        return search.found().holds

    async def around(self, found: float, factors: Sequence[float]) -> None:
        """These multiples of it, too, for a plot; not those that were probed already. Raises OutOfTime."""
        for factor in factors:
            rate = float(f"{found * factor:.3g}")
            if rate and not any(max(run.rate, rate) / min(run.rate, rate) < _NEAR for run in self.runs):
                await self.probe(rate)

    def _write(self) -> None:
        result = result_of(self._config, self._experiment, self._began)
        runs = sorted(self.runs, key=lambda run: run.rate)
        write_result(msgspec.structs.replace(result, runs=runs), self._path)


def _told(work: Work, label: str, run: Run, took_s: float, router: float) -> str:
    of = run.measures
    gpus = work.prefill + work.decode
    gaps = sorted(row.gap_ms for row in run.rows if not row.failure)
    gap = gaps[math.ceil(0.9 * len(gaps)) - 1] if gaps else math.nan
    failed = ", ".join(f"{count} {kind}" for kind, count in of.failures.items())
    return (
        f"{work.name:10} {label:28} {run.rate:7.4g}/s {run.rate / gpus:6.3g}/GPU n={of.requests:5} "
        f"met {of.attainment:6.1%} smooth {met_share(run, smooth=True):6.1%} "
        f"ttft {of.ttft_ms.p50:.0f} {of.ttft_ms.p90:.0f} {of.ttft_ms.p99:.0f} "
        f"tpot {of.tpot_ms.p50:.1f} {of.tpot_ms.p90:.1f} itl99 {of.itl_ms.p99:.1f} gap90 {gap:.0f} "
        f"late99 {of.client.late.p99:.1f} client {of.client.busiest:.0%} router {router:.0%} "
        f"took {took_s:.0f} s {failed}"
    )
