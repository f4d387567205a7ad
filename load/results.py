"""The result of `kvrelay bench` as a file: JSON with a version."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.load.measures import Measures, Slo, e2e_ms, met, tpot_ms, ttft_ms
from kvrelay.load.records import Record
from kvrelay.load.search import Found
from kvrelay.load.sessions import Work
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "CDF_SHARES",
    "Made",
    "Result",
    "Row",
    "Run",
    "cdfs_of",
    "read_result",
    "row_of",
    "write_result",
]

VERSION = 1
_MOST_SHORT = 0.1
CDF_SHARES = (*(at / 100 for at in range(100)), 0.995, 0.999, 1.0)


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request, in milliseconds but for `due_s`; 0 where there is nothing."""

    due_s: float
    late_ms: float
    ttft_ms: float
    tpot_ms: float
    gap_ms: float
    """The longest between two of its chunks."""
    e2e_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    met: bool
    failure: str = ""


class Run(msgspec.Struct, frozen=True):
    """One rate, or one number of clients."""

    rate: float
    """Requests a second that were wanted; 0: as the trace has them, or a closed loop."""
    concurrency: int
    warm_up_s: float
    window_s: float
    measures: Measures
    cdfs: dict[str, list[float]]
    """Milliseconds of ttft, tpot, itl and e2e at CDF_SHARES."""
    rows: list[Row]
    after_s: float = 0.0
    """Seconds after the window in which requests went on to come."""

    @property
    def short(self) -> bool:
        """Whether fewer requests came than were wanted, by more than chance."""
        wanted = self.rate * self.window_s
        return wanted - self.measures.requests > max(_MOST_SHORT * wanted, 3 * math.sqrt(wanted))

    @property
    def offered(self) -> float:
        """Requests a second that were wanted, or that came if those were fewer."""
        return (
            self.measures.offered_per_s if self.short else self.rate or self.measures.offered_per_s
        )


class Made(msgspec.Struct, frozen=True):
    """How and with what a result was made."""

    command: str
    at: str
    """ISO 8601, UTC."""
    client: str
    versions: dict[str, str]
    seed: int = 0


class Result(msgspec.Struct, frozen=True):
    """The result for one server; rates are of all its GPUs."""

    label: str
    model: str
    url: str
    gpus: int
    hardware: str
    lengths: str
    arrivals: str
    work: Work
    slo: Slo
    attainment: float
    """Share of requests that has to meet its targets."""
    made: Made
    runs: list[Run]
    found: Found | None = None
    version: int = VERSION
    endpoint: str = ""

    @property
    def shown(self) -> Run:
        """The run that stands for the result: the fastest that holds, else the first."""
        holding = [run for run in self.runs if run.measures.attainment >= self.attainment]
        return max(holding, key=lambda run: run.measures.goodput_per_s, default=self.runs[0])


def row_of(record: Record, slo: Slo) -> Row:
    """Return a request as it stands in the file."""
    answered = not record.failure
    return Row(
        round(record.due_s, 3),
        round((record.sent_s - record.due_s) * 1e3, 2),
        round(ttft_ms(record), 2) if record.chunks else 0.0,
        round(tpot_ms(record) or 0.0, 3) if answered else 0.0,
        round(max(record.gaps_s, default=0.0) * 1e3, 2),
        round(e2e_ms(record), 2) if answered else 0.0,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        met(record, slo),
        record.failure,
    )


def cdfs_of(records: list[Record]) -> dict[str, list[float]]:
    """Return the distributions of the requests that were answered."""
    good = [record for record in records if not record.failure]
    every = {
        "ttft": map(ttft_ms, good),
        "tpot": (each for each in map(tpot_ms, good) if each is not None),
        "itl": (gap * 1e3 for record in good for gap in record.gaps_s),
        "e2e": map(e2e_ms, good),
    }
    return {name: _quantiles(sorted(values)) for name, values in every.items()}


def _quantiles(ordered: list[float]) -> list[float]:
    return (
        [round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) for share in CDF_SHARES]
        if ordered
        else []
    )


def write_result(result: Result, path: Path) -> None:
    """Write the file. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(result) + b"\n")
    except OSError as why:
        raise ConfigError(f"cannot write {path}: {why.strerror}") from why


def read_result(path: Path) -> Result:
    """Read the file. Raises ConfigError if it is none, or of another version."""
    try:
        said: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, *MALFORMED) as why:
        raise ConfigError(f"cannot read {path}: {why}") from why
    version = said.get("version") if isinstance(said, dict) else None
    if version != VERSION:
        raise ConfigError(
            f"{path} is a result of version {version}; this release reads version {VERSION}"
        )
    try:
        return msgspec.convert(_with_nan(said), Result)
    except msgspec.ValidationError as why:
        raise ConfigError(f"{path} is no result of kvrelay bench: {why}") from why


def _with_nan(said: Any) -> Any:
    if isinstance(said, dict):
        return {
            key: _with_nan(value) if key != "found" and key != "breaks" else value
            for key, value in said.items()
        }
    if isinstance(said, list):
        return [_with_nan(each) for each in said]
    return math.nan if said is None else said
