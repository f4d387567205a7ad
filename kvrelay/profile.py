"""`kvrelay profile`: measures the steps of one engine, and writes a rate card."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvrelay.load.measures import percentile
from kvrelay.node.ranks import join_as_rank_0
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.timed_steps import PREFILLS_AT_ONCE, STEPS, TimedSteps
from kvrelay.planner.grid import Limits, Step, plan
from kvrelay.planner.rate_card import Point, RateCard, write_card
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.versions import RELEASE

__all__ = ["run", "spread_of"]

_SECONDS = {"cpu": 45.0, "cuda": 120.0}
_POINT_SHARE, _POINT_S = 1 / 60, 1.0
"""Limits for the runs of one step: a share of all the time, and seconds."""
_NOISY = 0.1
"""How much runs of a step may differ (`spread_of`): on two cores 0.02 alone, 0.15 to 0.3 beside two
busy processes.
"""
_FIXED_MS, _GB_S = 0.5, {"cpu": 5.0, "cuda": 300.0}
"""Assumed times of a transfer between two nodes of one host (benchmarks/RESULTS.md).

Reads from host memory and files are assumed, too.
"""
_TIERS_GB_S = ("host", 40.0), ("store", 4.0)
_FAR = 1 << 16

Times = dict[Step, list[float]]
"""Milliseconds of each run."""


def run(config: NodeConfig, out: Path, seconds: float, console: Console) -> int:
    """Measure, print and write the card; return 1 if the machine was noisy. Raises ConfigError."""
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"--seconds must be a number from 0 on, got {seconds:g}; 0 takes the device's default"
        )
    _check_writable(out)
    console.print("starting the engine ...", style="dim")
    with _measured_engine(config.engine) as engine:
        times = _measured(engine, seconds or _SECONDS[engine.device.type], console)
        card = _card(config, engine, times)
    _show(card, console)
    write_card(card, out)
    console.print(f"written to {out}", markup=False)
    spread = spread_of(times)
    if spread > _NOISY:
        console.print(
            "this machine was too noisy to believe these times: runs of one step differ by "
            f"{spread:.0%} of it, where {_NOISY:.0%} is the most that is usual; end what else runs "
            "here, or ask for more --seconds",
            style="red",
        )
    return int(spread > _NOISY)


def spread_of(times: Mapping[Step, Sequence[float]]) -> float:
    """Return the width of the middle half of a step's runs in medians, at three quarters of steps.

    Steps that were run once do not count; 0 if there are no others.
    """
    widths = []
    for runs in times.values():
        if len(runs) > 1:
            first, middle, last = statistics.quantiles(runs, n=4, method="inclusive")
            widths.append((last - first) / middle)
    return percentile(widths or [0.0], 0.75)


@contextlib.contextmanager
def _measured_engine(config: EngineConfig) -> Iterator[Engine]:
    engine = Engine(config, join_as_rank_0(config))
    gc.freeze()  # as in a node's own process (node/process.py)
    try:
        yield engine
    finally:
        gc.unfreeze()
        engine.close()


def _limits(engine: Engine) -> Limits:
    block_size = engine.pool.block_size
    return Limits(
        engine.max_model_len,
        engine.scheduler.pool.total * block_size,
        block_size,
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        prompts_at_once=PREFILLS_AT_ONCE,
        decode_steps=STEPS,
    )


def _measured(engine: Engine, seconds: float, console: Console) -> Times:
    steps, point_s = TimedSteps(engine), min(_POINT_S, seconds * _POINT_SHARE)
    times: Times = {}

    def measure(step: Step) -> None:
        requests, context, tokens = step
        where = (context, tokens, 0) if requests else (0, tokens, context)
        try:
            found = steps.times(requests, *where, seconds=point_s)
        except ValueError:
            if requests and tokens:
                return
            raise
        times[step] = times.get(step, []) + found

    until, groups = time.monotonic() + seconds, plan(_limits(engine))
    with Progress(console=console, transient=True) as bar:
        for level, group in bar.track(groups, description="measuring steps"):
            if level and time.monotonic() > until:
                break
            for step in group:
                measure(step)
    measure(next(iter(times)))  # once more, to see whether the machine has changed
    slowed = steps.slowed
    return {step: [ms * slowed for ms in runs] for step, runs in times.items()}


def _card(config: NodeConfig, engine: Engine, times: Times) -> RateCard:
    points = [
        Point(statistics.median(runs), tokens, context, requests)
        for (requests, context, tokens), runs in sorted(times.items())
    ]
    limits = _limits(engine)
    token_bytes = engine.pool.block_bytes // limits.block_size
    return RateCard(
        model=config.served_model_name or engine.model.name,
        hardware=_hardware(engine.device),
        kvrelay=RELEASE,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        kv_tokens=limits.kv_tokens,
        block_size=limits.block_size,
        max_num_seqs=engine.max_num_seqs,
        step_tokens=limits.step_tokens,
        prefill=[each for each in points if not each.requests],
        decode=[each for each in points if not each.tokens],
        mixed=[each for each in points if each.requests and each.tokens],
        transfer={
            name: [Point(_FIXED_MS), Point(_FIXED_MS + token_bytes / gb_s / 1e6 * _FAR, _FAR)]
            for name, gb_s in (("direct", _GB_S[engine.device.type]), *_TIERS_GB_S)
        },
        kv_token_bytes=token_bytes,
        tensor_parallel_size=config.engine.tensor_parallel_size,
        ahead=engine.runs_ahead,
        shapes=engine.shapes,
    )


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next(
            (line.partition(":")[2] for line in lines if line.startswith("model name")), name
        )
    return f"{' '.join(name.split())}, {torch.get_num_threads()} threads"


def _check_writable(path: Path) -> None:
    folder = path.resolve().parent
    if (
        path.is_dir()
        or not folder.is_dir()
        or not os.access(path if path.exists() else folder, os.W_OK)
    ):
        raise ConfigError(f"the rate card cannot be written to {path}; choose another --out")


def _show(card: RateCard, console: Console) -> None:
    console.print(f"{card.model} on {card.gpus} x {card.hardware}", style="bold", markup=False)
    prefill = [(each.tokens, each.context, each.ms) for each in card.prefill]
    decode = [(each.requests, each.context, each.ms) for each in card.decode]
    mixed = [(each.requests, each.tokens, each.ms) for each in card.mixed]
    for title, corner, points in (
        ("prefill: ms of a step, by context", "tokens", prefill),
        ("decode: ms of a step, by context", "requests", decode),
        ("decodes beside a chunk: ms of a step, by tokens of the chunk", "requests", mixed),
    ):
        columns = sorted({column for _, column, _ in points})
        table = Table(title=title, title_justify="left", title_style="")
        for name in (corner, *map("{:,}".format, columns)):
            table.add_column(name, justify="right")
        known = {(row, column): f"{ms:.2f}" for row, column, ms in points}
        for row in sorted({row for row, _, _ in points}):
            table.add_row(str(row), *(known.get((row, column), "") for column in columns))
        console.print(table)
