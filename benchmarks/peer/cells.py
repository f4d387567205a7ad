"""Cells, the order in which they are measured, and their files.

A cell that has a file is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.peer.arms import Arm
from benchmarks.peer.client import Figures
from benchmarks.peer.servers import Stage
from benchmarks.peer.works import TRACE
from kvrelay.wire.errors import ConfigError

__all__ = [
    "Cell",
    "Row",
    "batches",
    "close_rows",
    "difference",
    "needed_s",
    "read_cells",
    "stage_of",
    "write_cell",
]

_FURTHER_SEEDS = (2, 3)
_AGAINST = ("colocated", "strict")
_OURS = ("told", "cluster")
_CELL_S, _ROUTER_S, _NODES_S, _VLLM_S = 25.0, 3.0, 50.0, 150.0


class Row(msgspec.Struct, frozen=True):
    """A load that all arms get, in turn or at once."""

    work: str
    factor: float = 0.0
    """Multiple of the work's rate; 0: a closed loop."""
    seed: int = 1
    after: str = ""

    @property
    def name(self) -> str:
        parts = [
            self.work.replace(":", "-"),
            f"x{self.factor:g}" if self.factor else "",
            f"s{self.seed}",
        ]
        return "_".join(
            [part for part in parts if part] + ([f"after-{self.after}"] if self.after else [])
        )


class Cell(msgspec.Struct, frozen=True):
    """A row by an arm."""

    row: Row
    arm: str
    run: str
    """When the command was started: cells of one run had the same machine."""
    figures: Figures


@dataclass(frozen=True, slots=True)
class Batch:
    """A group of arms that are measured at the same time, on servers of one stage."""

    stage: Stage
    arms: tuple[Arm, ...]


def stage_of(row: Row, arms: Iterable[Arm]) -> Stage:
    return Stage(tuple(kind for arm in arms for kind in arm.servers), row.work == TRACE)


def batches(row: Row, arms: Sequence[Arm], now: Stage | None, *, at_once: bool) -> list[Batch]:
    """Order the arms of a row so that few servers start: those first whose servers are up."""
    if at_once:
        return [Batch(stage_of(row, arms), tuple(arms))] if arms else []
    each = [Batch(stage_of(row, [arm]), (arm,)) for arm in arms]
    first = {batch.stage: at for at, batch in reversed(list(enumerate(each)))}
    return sorted(each, key=lambda batch: (batch.stage != now, first[batch.stage]))


def needed_s(order: Sequence[Batch], now: Stage | None, window_s: float) -> float:
    took = 0.0
    for batch in order:
        if batch.stage != now:
            took += _VLLM_S if any("vllm" in kind for kind in batch.stage.kinds) else _NODES_S
        now = batch.stage
        took += window_s + _CELL_S + _ROUTER_S
    return took


def close_rows(
    rows: Sequence[Row], done: Mapping[tuple[Row, str], Cell], within: float
) -> list[Row]:
    """Repeat rows with further seeds where one of ours is `within` so many points of the others."""
    found = []
    for row in rows:
        shares = {arm: cell.figures.in_time for (of, arm), cell in done.items() if of == row}
        gaps = [difference(shares, arm) for arm in _OURS]
        if any(gap is not None and abs(gap) <= within for gap in gaps):
            found += [msgspec.structs.replace(row, seed=seed) for seed in _FURTHER_SEEDS]
    return found


def difference(shares: Mapping[str, float | None], arm: str) -> float | None:
    """Count the points that an arm is ahead of the better fixed one that was measured, if any."""
    own, *others = [shares.get(name) for name in (arm, *_AGAINST)]
    known = [share for share in others if share is not None]
    return 100 * (own - max(known)) if own is not None and known else None


def write_cell(cell: Cell, folder: Path) -> None:
    path = folder / f"{cell.row.name}_{cell.arm}.json"
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(cell)))
    part.replace(path)


def read_cells(folders: Iterable[Path]) -> dict[tuple[Row, str], Cell]:
    """Read all that is done. Raises ConfigError for a file of something else."""
    found = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*_*.json"))):
        try:
            cell = msgspec.json.decode(path.read_bytes(), type=Cell)
        except msgspec.DecodeError as why:
            raise ConfigError(f"{path} is no cell of this version: {why}") from why
        found[cell.row, cell.arm] = cell
    return found
