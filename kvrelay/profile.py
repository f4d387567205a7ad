"""`kvrelay profile`: measures one engine and its KV transfers, and writes a rate card."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrelay.load.measures import percentile
from kvrelay.planner.grid import Limits, Unit, mixed_sizes, sizes_of_transfers, units
from kvrelay.planner.rate_card import (
    DecodePoint,
    MixedPoint,
    PrefillPoint,
    RateCard,
    TransferPoint,
    write_card,
)
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.versions import RELEASE

if TYPE_CHECKING:
    from kvrelay.paged_engine.engine import Engine
    from kvrelay.paged_engine.timed_steps import TimedSteps
    from kvrelay.profiling.transfer_times import BlocksMoved

__all__ = ["run", "spread_of"]

_SECONDS = {"cpu": 45.0, "cuda": 120.0}
# Of the time of all, for transfers and for mixed steps; and at most for the runs of one point.
_TRANSFERS_SHARE, _MIXED_SHARE = 0.3, 0.15
_POINT_SHARE, _POINT_S = 1 / 60, 1.0
_NOISY = 0.1
"""How much runs of a step may differ (`spread_of`): on two cores 0.02 alone, 0.15 to 0.3 beside two
busy processes.
"""

Times = dict[tuple[str, int, int], list[float]]
"""Milliseconds of each run, by kind and point."""


def run(config: NodeConfig, out: Path, seconds: float, console: Console) -> int:
    """Measure, print tables and write the card; return 1 if the machine was noisy.

    `seconds` 0 takes the device's default. Raises ConfigError.
    """
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"--seconds must be a number from 0 on, got {seconds:g}; 0 takes the device's default"
        )
    from kvrelay.profiling.engine import measured_engine
    from kvrelay.profiling.transfer_times import BlocksMoved

    blocks = BlocksMoved(config.engine)
    seconds = seconds or _SECONDS[blocks.devices[0].partition(":")[0]]
    _check_writable(out)
    began = time.monotonic()
    moved = _transfers(blocks, config, seconds * _TRANSFERS_SHARE, console)
    left_s = began + seconds - time.monotonic()
    console.print("starting the engine ...", style="dim")
    with measured_engine(config.engine) as engine:
        card, times = _card(config, engine, left_s, console)
    card = msgspec.structs.replace(card, transfer=moved)
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


def spread_of(times: Times) -> float:
    """Return the width of the middle half of a step's runs in medians, at three quarters of steps.

    Steps that were run once do not count; 0 if there are no others.
    """
    widths = []
    for runs in times.values():
        if len(runs) > 1:
            first, middle, last = statistics.quantiles(runs, n=4, method="inclusive")
            widths.append((last - first) / middle)
    return percentile(widths or [0.0], 0.75)


def _card(
    config: NodeConfig, engine: Engine, seconds: float, console: Console
) -> tuple[RateCard, Times]:
    from kvrelay.paged_engine.timed_steps import PREFILLS_AT_ONCE, STEPS, TimedSteps
    from kvrelay.profiling.engine import hardware_of

    steps, point_s = TimedSteps(engine), min(_POINT_S, max(0.0, seconds) * _POINT_SHARE)
    limits = Limits(
        engine.max_model_len,
        engine.scheduler.pool.total * engine.pool.block_size,
        engine.pool.block_size,
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        prompts_at_once=PREFILLS_AT_ONCE,
        decode_steps=STEPS,
    )

    def timed(kind: str, point: tuple[int, int]) -> list[float]:
        measure = steps.prefill if kind == "prefill" else steps.decode
        return measure(*point, seconds=point_s)

    until = time.monotonic() + seconds
    times = _measured(units(limits), timed, until - seconds * _MIXED_SHARE, console)
    mixed = _mixed(steps, limits, until, point_s, console)
    medians = sorted(
        ((kind, context, first), statistics.median(runs))
        for (kind, first, context), runs in times.items()
    )
    card = RateCard(
        model=config.served_model_name or engine.model.name,
        hardware=hardware_of(engine.device),
        kvrelay=RELEASE,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        kv_tokens=limits.kv_tokens,
        block_size=limits.block_size,
        max_num_seqs=engine.max_num_seqs,
        step_tokens=limits.step_tokens,
        prefill=[
            PrefillPoint(first, context, ms)
            for (kind, context, first), ms in medians
            if kind == "prefill"
        ],
        decode=[
            DecodePoint(first, context, ms)
            for (kind, context, first), ms in medians
            if kind == "decode"
        ],
        tensor_parallel_size=config.engine.tensor_parallel_size,
        mixed=mixed,
        ahead=engine.runs_ahead,
    )
    return card, times


def _mixed(
    steps: TimedSteps, limits: Limits, until: float, point_s: float, console: Console
) -> list[MixedPoint]:
    found: list[MixedPoint] = []
    sizes = mixed_sizes(limits)
    with _progress(len(sizes), console) as tell:
        for requests, context, tokens in sizes:
            if found and time.monotonic() > until:
                break
            tell("mixed", (requests, tokens))
            with contextlib.suppress(ValueError):  # no room for it here
                ms = statistics.median(steps.mixed(requests, context, tokens, seconds=point_s))
                found.append(MixedPoint(requests, context, tokens, ms))
    return found


def _check_writable(path: Path) -> None:
    folder = path.resolve().parent
    if (
        path.is_dir()
        or not folder.is_dir()
        or not os.access(path if path.exists() else folder, os.W_OK)
    ):
        raise ConfigError(f"the rate card cannot be written to {path}; choose another --out")


def _transfers(
    blocks: BlocksMoved, config: NodeConfig, seconds: float, console: Console
) -> dict[str, list[TransferPoint]]:
    from kvrelay.profiling.transfer_times import transfer_times

    source, reader = blocks.devices
    console.print(f"transfers from {source} to {reader} ...", style="dim")
    sizes = sizes_of_transfers(blocks.block_size, blocks.longest, blocks.most_blocks)

    def told(why: str) -> None:
        console.print(f"not measured: {why}", style="yellow", markup=False)

    times = transfer_times(blocks, sizes, config.transfer.kv_connector, seconds / 3, told)
    return {
        kind: [TransferPoint(count * blocks.block_size, ms) for count, ms in of_kind.items()]
        for kind, of_kind in times.items()
    }


def _measured(
    plan: Sequence[Unit],
    timed: Callable[[str, tuple[int, int]], list[float]],
    until: float,
    console: Console,
) -> Times:
    times: Times = {}
    with _progress(sum(len(unit.points) for unit in plan), console) as tell:
        for unit in plan:
            if unit.level and time.monotonic() > until:
                break
            for point in unit.points:
                tell(unit.kind, point)
                times[unit.kind, *point] = timed(unit.kind, point)
        first, point = plan[0].kind, plan[0].points[0]
        times[first, *point] += timed(first, point)
    return times


@contextlib.contextmanager
def _progress(count: int, console: Console) -> Iterator[Callable[[str, tuple[int, int]], None]]:
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=count)
        begun = False

        def tell(kind: str, point: tuple[int, int]) -> None:
            nonlocal begun
            bar.update(
                task, advance=1 if begun else 0, description=f"{kind} {point[0]}, {point[1]}"
            )
            begun = True

        yield tell


def _show(card: RateCard, console: Console) -> None:
    console.print(f"{card.model} on {card.gpus} x {card.hardware}", style="bold", markup=False)
    for title, corner, points in (
        (
            "prefill: ms of a step, by context",
            "tokens",
            [(each.tokens, each.context, each.ms) for each in card.prefill],
        ),
        (
            "decode: ms of a step, by context",
            "requests",
            [(each.requests, each.context, each.ms) for each in card.decode],
        ),
        (
            "decodes beside a chunk of a prompt: ms of a step, by tokens of the chunk",
            "requests",
            [(each.requests, each.tokens, each.ms) for each in card.mixed],
        ),
        (
            "transfer: ms that a request waits for its KV, by tokens",
            "connector",
            [
                (kind, each.tokens, each.ms)
                for kind, measured in card.transfer.items()
                for each in measured
            ],
        ),
    ):
        if points:
            console.print(_grid(title, corner, points))


def _grid(title: str, corner: str, points: Sequence[tuple[object, int, float]]) -> Table:
    columns = sorted({column for _, column, _ in points})
    table = Table(title=title, title_justify="left", title_style="")
    for name in (corner, *map("{:,}".format, columns)):
        table.add_column(name, justify="right")
    known = {(row, column): f"{ms:.2f}" for row, column, ms in points}
    for row in dict.fromkeys(row for row, _, _ in points):
        table.add_row(str(row), *(known.get((row, column), "") for column in columns))
    return table
