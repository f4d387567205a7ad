"""The simulator against reality: a cluster on this machine, and the same requests to the same nodes
in the simulator.

    python -m benchmarks.reality --splits 1P1D,2P2D --rates 0.5,0.8 --seconds 60 python -m
    benchmarks.reality --results goodput --card h200.json python -m benchmarks.reality --paced 50
    --model tiny.json --lengths 512:24 --rates 0.5,1 --splits 1P1D,0P2D python -m benchmarks.reality
    --model benchmarks/models/llama-3.1-8b.json --lengths 2048:64 --splits 3P1D --rates 24

Profiles a node (`kvrelay profile`, or --card), runs `kvrelay up` under the client of `kvrelay
bench`, and simulates each run from that card: the same lengths at the same times. What lies between
client and engine, which no card says, is seen in a few requests to idle nodes before. With
--results it runs nothing, and simulates what benchmarks.goodput has measured. With --paced 50 nodes
sleep until a step has taken 50 times what it takes on an H200, so that all but the device is
compared, on any machine; take a tiny --model then. Prints percentiles of both, and their ratios.
0P2D are two decode nodes that compute their prompts, as colocated servers. Unless it is paced the
machine must have nothing else to do, and on a CPU a core for each node. Exit code 1 if a percentile
of TTFT or TPOT, or the share of requests that had an answer, is off by more than --within.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.goodput.drawing import read_folders
from benchmarks.goodput.nodes import Nodes, cluster
from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import Experiment, usual_s
from kvrelay.load.measures import percentile
from kvrelay.load.results import Run
from kvrelay.load.sessions import Work, arrivals, sessions
from kvrelay.machine import embedded_model
from kvrelay.planner.rate_card import RateCard, read_card, write_card
from kvrelay.planner.setting import Setting, Stream, Targets
from kvrelay.planner.speeds import H200, Speeds, slowed
from kvrelay.planner.world import simulate
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.router_config import PRICE

__all__ = ["Compared", "compared", "main", "of_results", "streams_about", "streams_like", "told"]

_SHARES = (0.5, 0.9, 0.99)
_QUICKEST = 0.1
_SPLIT = re.compile(r"(\d+)P(\d+)D")
_COLOCATED = re.compile(r"(\d+) ")
_WARM_UP_S, _IDLE_S, _IDLE_RATE, _IDLE_USE = 5.0, 8.0, 5.0, 0.15
_PROFILE_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Compared:
    """Of one rate: name of a figure, what was measured and what was simulated, in milliseconds at
    _SHARES.
    """

    rate: float
    requests: int
    rows: dict[str, tuple[list[float], list[float]]]
    answered: tuple[float, float] = (1.0, 1.0)
    """The share of the requests that had an answer, of which alone the rows are."""

    @property
    def furthest(self) -> float:
        """By how much the worst of TTFT, TPOT and the share answered is off, as a share."""
        pairs = [
            pair
            for name in ("TTFT", "TPOT")
            if name in self.rows
            for pair in zip(*self.rows[name], strict=True)
        ]
        off = [abs(seen / real - 1) for real, seen in pairs if real]
        return max(*off, abs(self.answered[1] - self.answered[0]), 0.0)


def streams_like(config: BenchConfig, rate: float, number: int) -> list[Stream]:
    """What the client asks in its run of this number (load/experiment.py), as the simulator has it."""
    every = sessions(config.work, config.arrival(rate), f"{config.seed} {number}")
    some = list(itertools.islice(sessions(config.work, config.arrival(1.0), "0"), 1_000))
    sending_s = config.warm_up_s + config.duration_s + usual_s(some, config.slo)[0]
    asked = itertools.takewhile(lambda session: session.at < sending_s, every)
    return [Stream(each.at * 1e3, each.turns[0].prompt, each.turns[0].output) for each in asked]


def streams_about(run: Run, work: Work, after_s: float, seed: str) -> list[Stream]:
    """What was asked in a run of which only the file is left: the requests that counted, when they
    came; those before and behind them, which the file does not have, come by another Poisson
    process of the same rate.
    """
    ends_s = run.warm_up_s + run.window_s
    rng = random.Random(f"{seed} {run.rate}")
    made = itertools.takewhile(
        lambda at: at < ends_s + after_s, arrivals("poisson", run.rate, 1.0, rng)
    )
    others = [
        Stream(at * 1e3, work.prompt, work.output)
        for at in made
        if not run.warm_up_s <= at < ends_s
    ]
    judged = [
        Stream(row.due_s * 1e3, row.prompt_tokens or work.prompt, work.output) for row in run.rows
    ]
    return sorted([*others, *judged], key=lambda stream: stream.at)


def _counted(run: Run, streams: list[Stream], setting: Setting) -> list[Stream]:
    """Simulate a run; those that came in its window."""
    begin, end = run.warm_up_s * 1e3, (run.warm_up_s + run.window_s) * 1e3
    simulate(streams, setting)
    return [stream for stream in streams if begin <= stream.at < end]


def compared(run: Run, streams: list[Stream], setting: Setting, between_ms: float) -> Compared:
    """A run and its simulation; `between_ms`: from the client to the engine and back."""
    counted = _counted(run, streams, setting)
    judged = [stream for stream in counted if stream.answered]
    answered = [row for row in run.rows if not row.failure]
    rows = {
        "TTFT": (
            [row.ttft_ms for row in answered],
            [stream.ttft + between_ms for stream in judged],
        ),
        "TPOT": ([row.tpot_ms for row in answered], [stream.tpot for stream in judged]),
        "longest gap": ([row.gap_ms for row in answered], [stream.longest for stream in judged]),
    }
    at = {
        name: (
            [percentile(real, share) for share in _SHARES],
            [percentile(seen, share) for share in _SHARES],
        )
        for name, (real, seen) in rows.items()
        if real and seen
    }
    shares = (len(answered) / max(1, len(run.rows)), len(judged) / max(1, len(counted)))
    return Compared(run.rate, len(run.rows), at, shares)


def told(split: str, found: Sequence[Compared]) -> list[str]:
    """As rows of a table in Markdown."""
    lines = []
    for each in found:
        for name, (real, seen) in each.rows.items():
            cells = [
                f"{a:,.1f}, {b:,.1f} ({b / a:.2f})" if a else "-"
                for a, b in zip(real, seen, strict=True)
            ]
            lines.append(
                f"| {split} | {each.rate:g}/s, {each.requests} | {name} | "
                + " | ".join(cells)
                + " |"
            )
        shares = ", ".join(f"{share:.1%}" for share in each.answered)
        lines.append(
            f"| {split} | {each.rate:g}/s, {each.requests} | answered | {shares} |"
            + " |" * (len(_SHARES) - 1)
        )
    return lines


def _lacking_ms(run: Run, streams: list[Stream], setting: Setting) -> float:
    """By how much the quickest tenth of a run took longer to a first token than in its simulation."""
    seen = [stream.ttft for stream in _counted(run, streams, setting) if stream.answered]
    real = [row.ttft_ms for row in run.rows if not row.failure]
    return (
        max(0.0, percentile(real, _QUICKEST) - percentile(seen, _QUICKEST))
        if real and seen
        else 0.0
    )


async def _between_ms(config: BenchConfig, card: RateCard) -> float:
    """What a short prompt takes on idle nodes beside its step: of the quicker ones, which met no
    other there.
    """
    experiment = Experiment(config)
    await experiment.meet()
    alone_ms = card.prompt_ms(config.work.prompt)
    run = await experiment.probe(
        min(_IDLE_RATE, _IDLE_USE * 1e3 / (alone_ms + card.step_ms(1, config.work.prompt)))
    )
    return max(
        0.0, percentile([row.ttft_ms for row in run.rows if not row.failure], 0.2) - alone_ms
    )


async def _split(
    asked: argparse.Namespace, split: str, flags: Sequence[str], card: RateCard
) -> list[Compared]:
    match = _SPLIT.fullmatch(split)
    assert match is not None
    prefill, decode = int(match[1]), int(match[2])
    first = prefill or decode // 2
    found = []
    with tempfile.TemporaryDirectory(prefix="reality-") as logs:
        async with cluster(
            first, prefill + decode - first, flags, asked.router_flag, Path(logs)
        ) as nodes:
            await nodes.have(prefill)
            config = _config(asked, nodes)
            practice = _config(
                asked, nodes, lengths="16:2", spread=0.0, duration_s=_IDLE_S, warm_up_s=0.0, seed=1
            )
            await _between_ms(practice, card)  # nodes meet, and speeds are learnt
            between_ms = await _between_ms(practice, card)
            print(
                f"{split}: {nodes.started_s:.0f} s to start, {between_ms:.1f} ms from client to "
                f"engine",
                flush=True,
            )
            speeds = Speeds(card)
            setting = Setting(
                prefill=prefill,
                decode=decode,
                prefixes=False,
                speeds=speeds,
                strict_roles=asked.strict_roles,
            )
            experiment = Experiment(config)
            await experiment.meet()
            for number, rate in enumerate(asked.rates):
                run = await experiment.probe(rate)
                found.append(
                    compared(run, streams_like(config, run.rate, number), setting, between_ms)
                )
                if run.measures.failures or run.measures.client.bottleneck:
                    print(
                        f"  at {rate:g}/s: {run.measures.failures} {run.measures.client.bottleneck}",
                        flush=True,
                    )
                print("\n".join(told(split, found[-1:])), flush=True)
    return found


def of_results(folders: Sequence[Path], card: RateCard) -> list[tuple[str, Compared]]:
    """Runs of benchmarks.goodput and their simulation. What lies between client and engine is what
    the simulation of each place's lowest rate lacks.
    """
    found = []
    for each in read_folders(folders):
        result, speeds = each.result, Speeds(card)
        match, alike = _SPLIT.fullmatch(result.label), _COLOCATED.match(result.label)
        nodes = int(alike[1]) if alike else result.gpus
        prefill, decode = (int(match[1]), int(match[2])) if match else (0, nodes)
        targets = None if each.arm == "direct" else Targets(result.slo.ttft_ms, result.slo.tpot_ms)
        policy = "round_robin" if each.arm == "direct" else PRICE
        setting = Setting(policy, prefill, decode, prefixes=False, speeds=speeds, targets=targets)
        runs = sorted(result.runs, key=lambda run: run.rate)
        after_s = (result.slo.ttft_ms + result.slo.tpot_ms * result.work.output) / 1e3
        like = partial(
            streams_about, work=result.work, after_s=after_s, seed=f"{each.work} {each.arm}"
        )
        between_ms = _lacking_ms(runs[0], like(runs[0]), setting)
        found += [
            (f"{each.work}, {result.label}", compared(run, like(run), setting, between_ms))
            for run in runs
        ]
    return found


def _config(asked: argparse.Namespace, nodes: Nodes, **other: object) -> BenchConfig:
    values: dict[str, object] = {
        "url": nodes.router, "lengths": asked.lengths, "find_rate": True, "ttft_ms": 20_000.0, "tpot_ms": 1_000.0,
        "duration_s": asked.seconds, "warm_up_s": _WARM_UP_S, "vocab_size": asked.vocab, "seed": int(time.time()),
        "spread": asked.spread,
    }  # fmt: skip
    return BenchConfig(**(values | other))  # type: ignore[arg-type]


def _profiled(flags: Sequence[str], seconds: float, path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "kvrelay.cli",
        "profile",
        f"--out={path}",
        f"--seconds={seconds:g}",
        *flags,
    ]
    subprocess.run(argv, check=True, timeout=_PROFILE_DEADLINE_S, env=child_environ())


def _paced(factor: float, path: Path) -> list[str]:
    """Write a card by whose times the engines of all children will go; the flags of their nodes. KV
    of a tiny model is there at once.
    """
    card = msgspec.structs.replace(slowed(H200, factor), transfer={})
    write_card(card, path)
    folder = str(Path(__file__).parent / "paced")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    os.environ["KVRELAY_BENCH_CARD"] = str(path.resolve())
    limits = {"max-num-batched-tokens": card.step_tokens, "max-num-seqs": card.max_num_seqs}
    return [
        "--cpu",
        f"--max-gap-ms={card.max_gap_ms:g}",
        *(f"--{name}={most}" for name, most in limits.items()),
    ]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.reality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", help="a config.json, served with random weights; else the embedded model"
    )
    parser.add_argument("--flag", action="append", default=[], help="of the nodes; again for more")
    parser.add_argument(
        "--router-flag", action="append", default=[], help="a router of its own with these flags"
    )
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="of benchmarks.goodput; runs nothing",
    )
    parser.add_argument("--card", type=Path, help="a rate card of such a node; else it is profiled")
    parser.add_argument(
        "--paced",
        type=float,
        default=0.0,
        help="steps take so many times what an H200's take, slept",
    )
    parser.add_argument("--profile-s", type=float, default=60.0, help="of the profile")
    parser.add_argument("--splits", default="1P1D", help="as 1P1D,2P2D")
    parser.add_argument("--rates", default="0.5,0.8", help="requests/s")
    parser.add_argument("--lengths", default="96:24", help="IN:OUT in tokens")
    parser.add_argument(
        "--spread", type=float, default=0.5, help="of the lengths, as kvrelay bench has it"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate that count")
    parser.add_argument("--within", type=float, default=0.15, help="as a share")
    parser.add_argument("--out", type=Path, help="folder for the card")
    asked = parser.parse_args(argv)
    asked.rates = [float(each) for each in asked.rates.split(",")]
    asked.splits = asked.splits.split(",")
    if asked.results and asked.card is None:
        parser.error("--results wants the --card of such a node")
    if not all(map(_SPLIT.fullmatch, asked.splits)):
        parser.error("--splits must be as 1P1D,2P2D")
    asked.strict_roles = "--strict-roles" in asked.router_flag
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all percentiles are within."""
    asked = _arguments(argv)
    if asked.results:
        seen = of_results(asked.results, read_card(asked.card))
        return _verdict(
            [line for name, each in seen for line in told(name, [each])],
            [each for _, each in seen],
            asked,
        )
    model = Path(asked.model).resolve() if asked.model else embedded_model()
    dummy = ["--load-format=dummy"] if asked.model else []
    flags = [f"--model={model}", *dummy, "--no-enable-prefix-caching", *asked.flag]
    asked.vocab = (
        int(json.loads(model.read_text(encoding="utf-8"))["vocab_size"]) - 1_000
        if asked.model
        else 32_000
    )
    folder = asked.out or Path(tempfile.mkdtemp(prefix="reality-card-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = asked.card or folder / "card.json"
    if asked.paced:
        flags += _paced(asked.paced, path)
    elif asked.card is None:
        _profiled(flags, asked.profile_s, path)
    card = read_card(path)
    lines: list[str] = []
    every: list[Compared] = []
    for split in asked.splits:
        found = asyncio.run(_split(asked, split, flags, card))
        lines += told(split, found)
        every += found
    return _verdict(lines, every, asked)


def _verdict(lines: Sequence[str], found: Sequence[Compared], asked: argparse.Namespace) -> int:
    """Print the table; whether one is too far off."""
    furthest = max(each.furthest for each in found)
    shares = " | ".join(f"p{share * 100:g}: measured, simulated ms (ratio)" for share in _SHARES)
    print(f"\n| nodes | rate, requests | | {shares} |\n|---|---|---|" + "---|" * len(_SHARES))
    print("\n".join(lines))
    print(f"\nthe furthest is off by {furthest:.0%}; wanted: {asked.within:.0%}")
    return int(furthest > asked.within)


if __name__ == "__main__":
    sys.exit(main())
