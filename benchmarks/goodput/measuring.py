"""Which rates are tried, on whom, and what is kept: a file for each work and arm, written again
after each probe.

A probe is one rate of `kvrelay bench`: a warm-up, seconds that count, and load behind them until
the last that count are answered. Owns the time: no probe begins that could not end by then.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.goodput.nodes import Nodes, router_cpu_s
from benchmarks.goodput.works import GAP_MS, Arm, Work
from kvrelay.bench import result_of
from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import Experiment
from kvrelay.load.results import Result, Run, read_result, write_result
from kvrelay.load.search import RateSearch
from kvrelay.wire.errors import ConfigError

__all__ = [
    "PRECISION",
    "WANTED",
    "Held",
    "OutOfTime",
    "Place",
    "difference",
    "held",
    "judged",
    "met_share",
    "probe_s",
]

WANTED, PRECISION = 0.9, 0.05
"""The share that has to meet its targets; and how far apart a rate that holds and one that does not
may be.
"""
_WARM_UP_S, _PRACTICE_S, _OVERHEAD_S, _DRAIN_S = 3.0, 3.0, 4.0, 2.0
_PRACTICE_TOKENS = 32
_STRIDE, _FAR_STRIDE = 1.15, 2.0
"""The second for answers without gaps, where hardly any was seen at the lowest rate: colocated
servers have them at each prompt, at whatever rate.
"""
_NEAR = 1.12


class OutOfTime(Exception):
    """What was kept is written; another run may go on with it."""


def met_share(run: Run, *, smooth: bool) -> float:
    """Of its requests that met their targets; `smooth`: and had no gap above GAP_MS."""
    good = sum(row.met and (not smooth or row.gap_ms <= GAP_MS) for row in run.rows)
    return good / max(1, len(run.rows))


def judged(runs: Iterable[Run], *, smooth: bool) -> list[Run]:
    """Those that say something of the server: not one that missed while its client was too slow."""
    return [
        run
        for run in runs
        if not run.measures.client.bottleneck or met_share(run, smooth=smooth) >= WANTED
    ]


@dataclass(frozen=True, slots=True)
class Held:
    """`rate`: the highest seen to hold below any that did not, 0 if none; `breaks`: the lowest that
    did not.
    """

    rate: float
    breaks: float | None

    @property
    def known(self) -> bool:
        """Whether the two are near enough for the first to be the answer."""
        return (
            self.rate > 0 and self.breaks is not None and self.breaks / self.rate <= 1 + PRECISION
        )

    def __str__(self) -> str:
        if self.breaks is None:
            return f"at least {self.rate:.3g}"
        if not self.rate:
            return f"below {self.breaks:.3g}"
        return f"{self.rate:.3g}" if self.known else f"{self.rate:.3g} to {self.breaks:.3g}"


def held(runs: Sequence[Run], *, smooth: bool = False, gpus: int = 1) -> Held:
    """Of runs of one work by one arm, per GPU. Several of one rate count as their mean."""
    shares: dict[float, list[float]] = {}
    for run in judged(runs, smooth=smooth):
        shares.setdefault(run.rate, []).append(met_share(run, smooth=smooth))
    means = {rate: sum(of) / len(of) for rate, of in shares.items()}
    breaks = min((rate for rate, share in means.items() if share < WANTED), default=None)
    holding = [
        rate
        for rate, share in means.items()
        if share >= WANTED and (breaks is None or rate < breaks)
    ]
    return Held(max(holding, default=0.0) / gpus, None if breaks is None else breaks / gpus)


def difference(one: Result, other: Result) -> str:
    """Why two results are not of the same servers asked the same; empty if they may be."""
    for name in ("work", "slo", "gpus", "model"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} is {getattr(one, name)} in one and {getattr(other, name)} in the other"
    flags = _flags_of(one), _flags_of(other)
    if one.label == other.label and flags[0] != flags[1]:
        return f"flags are {flags[0]} in one and {flags[1]} in the other"
    return ""


def _flags_of(result: Result) -> list[str]:
    """Of nodes and router, as they were typed."""
    words, found = shlex.split(result.made.command), []
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in ("--flag", "--router-flag"):
            found.append(f"{name}={value if equals else after}")
    return found


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
        """`until`: monotonic seconds. `label`: what the arm is called; empty takes the work's name
        for it.
        """
        self.work, self.arm, self._until, self._router = work, arm, until, nodes.router
        self.label = label or work.arm_name(arm)
        self._path = out / f"{work.name}-{arm}.json"
        lengths = work.lengths
        self._config = BenchConfig(
            url=nodes.router if arm is not Arm.DIRECT else ",".join(nodes.urls),
            api_key=nodes.key if arm is Arm.DIRECT else "",
            lengths=f"{lengths.prompt}:{lengths.output}",
            ttft_ms=lengths.ttft_ms,
            tpot_ms=lengths.tpot_ms,
            attainment=WANTED,
            find_rate=True,  # whoever is not answered soon after his targets is not waited for
            duration_s=work.window_s,
            warm_up_s=_WARM_UP_S,
            gpus=nodes.gpus,
            hardware=hardware,
            tell_targets=arm is not Arm.DIRECT,
            label=self.label,
            vocab_size=vocab_size,
            seed=int(time.time()),  # an earlier file's prompts are not asked again
        )
        self._began = datetime.datetime.now(datetime.UTC)
        self._experiment = Experiment(self._config)
        self._earlier: Result | None = read_result(self._path) if self._path.exists() else None
        self._header: Result | None = None

    @property
    def runs(self) -> Sequence[Run]:
        """All, also of an earlier file."""
        return [*(self._earlier.runs if self._earlier else ()), *self._experiment.runs]

    async def meet(self) -> None:
        """Ask who is there. Raises ConfigError if an earlier file is of others, or of another work."""
        await self._experiment.meet()
        if self._earlier is None:
            return
        why = difference(self._earlier, self._of_now())
        if self._earlier.label != self.label:
            why = f"it is of {self._earlier.label}, and this of {self.label}"
        if why:
            raise ConfigError(f"{self._path} cannot be gone on with: {why}; take another --out")

    async def practise(self) -> None:
        """Have seconds that count nowhere, for nodes to meet and to be known."""
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

    def in_time(self, rate: float) -> None:
        """Raises OutOfTime if a probe of that rate could not end by then."""
        if time.monotonic() + probe_s(self.work) > self._until:
            raise OutOfTime(f"no time for {self.work.name} by {self.label} at {rate:g} requests/s")

    async def probe(self, rate: float) -> Run:
        """One more. Raises OutOfTime."""
        self.in_time(rate)
        began, cpu_s = time.monotonic(), router_cpu_s(self._router)
        run = await self._experiment.probe(rate)
        took_s = time.monotonic() - began
        self._write()
        router = (router_cpu_s(self._router) - cpu_s) / took_s
        print(_told(self.work, self._config, run, took_s, router), flush=True)
        return run

    def wanted(self, *, smooth: bool) -> float | None:
        """The rate whose probe would tell most of the highest one at which 90 % meet their targets;
        None if that is known.
        """
        runs = judged(self.runs, smooth=smooth)
        lowest = min(runs, key=lambda run: run.rate, default=None)
        far = smooth and lowest is not None and met_share(lowest, smooth=True) < WANTED / 4
        stride = _FAR_STRIDE if far else _STRIDE
        search = RateSearch(self.work.rate(self.arm), WANTED, PRECISION, stride=stride)
        for run in runs:
            search.know(run.rate, met_share(run, smooth=smooth))
        rate = search.next()
        return None if rate is None else float(f"{rate:.3g}")

    def held(self, *, smooth: bool) -> Held:
        """What is known by now."""
        return held(self.runs, smooth=smooth)

    def beside(self, factors: Sequence[float]) -> list[float]:
        """These multiples of the highest rate that holds, for a plot; not those that were probed
        already.
        """
        rates = [float(f"{self.held(smooth=False).rate * factor:.3g}") for factor in factors]
        return [
            rate
            for rate in rates
            if rate and all(max(run.rate, rate) / min(run.rate, rate) >= _NEAR for run in self.runs)
        ]

    def _of_now(self) -> Result:
        """What is known of who was met, without runs."""
        if self._header is None:
            self._header = msgspec.structs.replace(
                result_of(self._config, self._experiment, self._began), runs=[]
            )
        return self._header

    def _write(self) -> None:
        runs = sorted(self.runs, key=lambda run: run.rate)
        write_result(msgspec.structs.replace(self._of_now(), runs=runs), self._path)


def _told(work: Work, config: BenchConfig, run: Run, took_s: float, router: float) -> str:
    of = run.measures
    gaps = sorted(row.gap_ms for row in run.rows if not row.failure)
    gap = gaps[math.ceil(0.9 * len(gaps)) - 1] if gaps else math.nan
    failed = ", ".join(f"{count} {kind}" for kind, count in of.failures.items())
    return (
        f"{work.name:10} {config.label:28} {run.rate:7.4g}/s {run.rate / config.gpus:6.3g}/GPU "
        f"n={of.requests:5} "
        f"met {of.attainment:6.1%} smooth {met_share(run, smooth=True):6.1%} "
        f"ttft {of.ttft_ms.p50:.0f} {of.ttft_ms.p90:.0f} {of.ttft_ms.p99:.0f} "
        f"tpot {of.tpot_ms.p50:.1f} {of.tpot_ms.p90:.1f} itl99 {of.itl_ms.p99:.1f} gap90 {gap:.0f} "
        f"late99 {of.client.late.p99:.1f} client {of.client.busiest:.0%} router {router:.0%} "
        f"took {took_s:.0f} s {failed}"
    )
