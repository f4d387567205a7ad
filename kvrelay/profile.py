"""`kvrelay profile`: measures one engine and its KV transfers, and writes a rate card."""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

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
    from kvrelay.profiling.engine import Measured
    from kvrelay.profiling.transfer_times import BlocksMoved

__all__ = ["Asked", "asked_of", "parse_points", "run"]

_SECONDS = {"cpu": 45.0, "cuda": 120.0}
# Of the time of all, for transfers and for mixed steps; and at most for the runs of one point.
_TRANSFERS_SHARE, _MIXED_SHARE = 0.3, 0.15
_POINT_SHARE, _POINT_S = 1 / 60, 1.0
_NOISY = 0.1
"""How much runs of a step may differ (`spread_of`): on two cores 0.02 alone, 0.15 to 0.3 beside two
busy processes.
"""
_DECODE_POINT = re.compile(r"(\d{1,5})x(\d{1,8})")
_PREFILL_POINT = re.compile(r"(\d{1,8})(?:\+(\d{1,8}))?")

Times = dict[tuple[str, int, int], list[float]]
"""Milliseconds of each run, by kind and point."""


def parse_points(decode: Sequence[str], prefill: Sequence[str]) -> list[Unit]:
    """Parse REQUESTSxCONTEXT, TOKENS and TOKENS+CONTEXT. Raises ConfigError."""
    found = []
    for text in decode:
        match = _DECODE_POINT.fullmatch(text)
        if match is None or not int(match[1]) or not int(match[2]):
            raise ConfigError(f"--decode {text!r} must be REQUESTSxCONTEXT, for example 32x4096")
        found.append(Unit(0, "decode", ((int(match[1]), int(match[2])),)))
    for text in prefill:
        match = _PREFILL_POINT.fullmatch(text)
        if match is None or not int(match[1]):
            raise ConfigError(
                f"--prefill {text!r} must be TOKENS or TOKENS+CONTEXT, for example 2048+8192"
            )
        found.append(Unit(0, "prefill", ((int(match[1]), int(match[2] or 0)),)))
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """A command line's settings beside those of the engine."""

    out: Path
    seconds: float
    """Time for measuring; 0 takes the device's default."""
    points: Sequence[Unit]
    """If there are any, only these are measured, and no card is written."""


def asked_of(values: dict[str, object]) -> Asked:
    """Take what is no setting out of the values. Raises ConfigError."""
    out, seconds = str(values.pop("out")), float(str(values.pop("seconds")))
    decode, prefill = (
        cast(list[str] | None, values.pop(kind)) or [] for kind in ("decode", "prefill")
    )
    points = parse_points(decode, prefill)
    if points and out:
        raise ConfigError("--out is for a whole rate card; leave it out, or --decode and --prefill")
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"--seconds must be a number from 0 on, got {seconds:g}; 0 takes the device's default"
        )
    return Asked(Path(out or "rate-card.json"), seconds, points)


def run(config: NodeConfig, asked: Asked, console: Console) -> int:
    """Measure, print tables and write the card; return 1 if the machine was noisy.

    Raises ConfigError.
    """
    from kvrelay.profiling.engine import measured_engine
    from kvrelay.profiling.transfer_times import BlocksMoved

    blocks = BlocksMoved(config.engine)
    seconds = asked.seconds or _SECONDS[blocks.devices[0].partition(":")[0]]
    moved: dict[str, list[TransferPoint]] = {}
    began = time.monotonic()
    if not asked.points:
        _check_writable(asked.out)
        moved = _transfers(blocks, config, seconds * _TRANSFERS_SHARE, console)
    left_s = began + seconds - time.monotonic()
    console.print("starting the engine ...", style="dim")
    with measured_engine(config.engine) as engine:
        card, times = _card(config, engine, left_s, asked.points, console)
    card = msgspec.structs.replace(card, transfer=moved)
    _show(card, times, console, spread=bool(asked.points))
    if not asked.points:
        write_card(card, asked.out)
        console.print(f"written to {asked.out}", markup=False)
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
    config: NodeConfig, engine: Measured, seconds: float, points: Sequence[Unit], console: Console
) -> tuple[RateCard, Times]:
    point_s = min(_POINT_S, max(0.0, seconds) * _POINT_SHARE)

    def timed(kind: str, point: tuple[int, int]) -> list[float]:
        try:
            measure = engine.timed.prefill if kind == "prefill" else engine.timed.decode
            return measure(*point, seconds=point_s)
        except ValueError as why:
            raise ConfigError(
                f"--{kind}: {why}; ask for less, or raise max_model_len or the KV pool"
            ) from why

    until = time.monotonic() + seconds
    times = _measured(
        points or units(_limits(engine)),
        timed,
        math.inf if points else until - seconds * _MIXED_SHARE,
        console,
    )
    mixed = [] if points else _mixed(engine, until, point_s, console)
    card = RateCard(
        model=config.served_model_name or engine.model,
        hardware=engine.hardware,
        kvrelay=RELEASE,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        kv_tokens=engine.kv_tokens,
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        step_tokens=engine.step_tokens,
        prefill=[
            PrefillPoint(*size, statistics.median(runs)) for size, runs in _of("prefill", times)
        ],
        decode=[DecodePoint(*size, statistics.median(runs)) for size, runs in _of("decode", times)],
        tensor_parallel_size=config.engine.tensor_parallel_size,
        mixed=mixed,
        ahead=engine.ahead,
    )
    return card, times


def _mixed(engine: Measured, until: float, point_s: float, console: Console) -> list[MixedPoint]:
    found: list[MixedPoint] = []
    sizes = mixed_sizes(_limits(engine))
    with _progress(len(sizes), console) as tell:
        for requests, context, tokens in sizes:
            if found and time.monotonic() > until:
                break
            tell("mixed", (requests, tokens))
            with contextlib.suppress(ValueError):  # no room for it here
                ms = statistics.median(
                    engine.timed.mixed(requests, context, tokens, seconds=point_s)
                )
                found.append(MixedPoint(requests, context, tokens, ms))
    return found


def _limits(engine: Measured) -> Limits:
    from kvrelay.paged_engine.timed_steps import PREFILLS_AT_ONCE, STEPS

    return Limits(
        engine.max_model_len,
        engine.kv_tokens,
        engine.block_size,
        engine.max_num_seqs,
        engine.step_tokens,
        prompts_at_once=PREFILLS_AT_ONCE,
        decode_steps=STEPS,
    )


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
            bar.update(task, advance=1 if begun else 0, description=f"{kind} {_named(kind, point)}")
            begun = True

        yield tell


def _named(kind: str, point: tuple[int, int]) -> str:
    first, context = point
    return (
        f"{first}x{context}"
        if kind == "decode"
        else f"{first}+{context}"
        if context
        else str(first)
    )


def _of(kind: str, times: Times) -> list[tuple[tuple[int, int], list[float]]]:
    mine = (((first, context), runs) for (of, first, context), runs in times.items() if of == kind)
    return sorted(mine, key=lambda each: (each[0][1], each[0][0]))


def _show(card: RateCard, times: Times, console: Console, *, spread: bool) -> None:
    console.print(f"{card.model} on {card.gpus} x {card.hardware}", style="bold", markup=False)
    if spread:
        console.print(_runs(times))
        return
    for kind, corner in (("prefill", "tokens"), ("decode", "requests")):
        if of_kind := _of(kind, times):
            console.print(
                _grid(kind, corner, {point: statistics.median(runs) for point, runs in of_kind})
            )
    if card.mixed:
        console.print(_beside(card))
    if card.transfer:
        console.print(_ways(card))


def _grid(kind: str, corner: str, medians: dict[tuple[int, int], float]) -> Table:
    contexts = sorted({context for _, context in medians})
    table = Table(title=f"{kind}: ms of a step, by context", title_justify="left", title_style="")
    table.add_column(corner, justify="right")
    for context in contexts:
        table.add_column(f"{context:,}", justify="right")
    last = "tokens/s" if kind == "decode" else "tokens/s at first"
    table.add_column(last, justify="right")
    for first in sorted({each for each, _ in medians}):
        row = [medians.get((first, context)) for context in contexts]
        shown = ["" if ms is None else f"{ms:.2f}" for ms in row]
        known = next((ms for ms in row if ms is not None), 0.0)
        table.add_row(f"{first:,}", *shown, f"{first / known * 1e3:,.0f}" if known else "")
    return table


def _beside(card: RateCard) -> Table:
    table = Table(
        title="decodes beside a chunk of a prompt: ms of a step",
        title_justify="left",
        title_style="",
    )
    for name in ("requests", "context", "tokens of the chunk", "ms"):
        table.add_column(name, justify="right")
    for each in card.mixed:
        table.add_row(
            f"{each.requests:,}", f"{each.context:,}", f"{each.tokens:,}", f"{each.ms:.2f}"
        )
    return table


def _ways(card: RateCard) -> Table:
    sizes = sorted({point.tokens for points in card.transfer.values() for point in points})
    table = Table(
        title="transfer: ms that a request waits for its KV, by tokens",
        title_justify="left",
        title_style="",
    )
    table.add_column("connector")
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    for kind, points in card.transfer.items():
        known = {point.tokens: f"{point.ms:.2f}" for point in points}
        table.add_row(kind, *(known.get(size, "") for size in sizes))
    return table


def _runs(times: Times) -> Table:
    table = Table()
    for name in ("step", "runs", "median ms", "least", "most", "tokens/s"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for (kind, first, context), runs in times.items():
        ms = statistics.median(runs)
        numbers = (f"{each:.3f}" for each in (ms, min(runs), max(runs)))
        table.add_row(
            f"{kind} {_named(kind, (first, context))}",
            str(len(runs)),
            *numbers,
            f"{first / ms * 1e3:,.0f}",
        )
    return table
