"""The result of `kvrelay bench`: a file of JSON, and the rows of its table."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kvrelay.load.measures import Measures, Record, Targets, e2e_ms, meets_targets, tpot_ms, ttft_ms
from kvrelay.load.search import SearchResult
from kvrelay.load.workloads import Work
from kvrelay.wire.errors import ConfigError

__all__ = [
    "COLUMNS",
    "Provenance",
    "Result",
    "Row",
    "Run",
    "row_of",
    "sessions_line",
    "table_row",
    "warnings_of",
    "write_result",
]

VERSION = 2
_MAX_SHORT = 0.1
_MAX_CACHED = 0.05
"""Prompts that share nothing but a template have no more cached."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request, in milliseconds but for `due_s`; 0 where there is nothing."""

    due_s: float
    late_ms: float
    ttft_ms: float
    tpot_ms: float
    gap_ms: float
    e2e_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    met: bool
    failure: str = ""


class Run(msgspec.Struct, frozen=True):
    """One rate, or one number of clients."""

    rate: float
    """Requests a second that were wanted; 0: a trace at its own pace, or a closed loop."""
    concurrency: int
    warm_up_s: float
    window_s: float
    measures: Measures
    rows: list[Row]

    @property
    def short(self) -> bool:
        wanted = self.rate * self.window_s
        return wanted - self.measures.requests > max(_MAX_SHORT * wanted, 3 * math.sqrt(wanted))

    @property
    def offered(self) -> float:
        """Requests a second that were wanted, or that came if those were fewer."""
        came = self.measures.offered_per_s
        return came if self.short else self.rate or came

    @property
    def name(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} client{'' if self.concurrency == 1 else 's'}"
        return f"{self.offered:.4g} requests/s"


class Provenance(msgspec.Struct, frozen=True):
    """How, when and with what a result was made."""

    command: str
    at: str
    """ISO 8601, UTC."""
    client: str
    versions: dict[str, str]
    seed: int = 0


class Result(msgspec.Struct, frozen=True):
    """The result for one server; rates are of all its GPUs."""

    model: str
    url: str
    gpus: int
    work: Work
    targets: Targets
    attainment: float
    made: Provenance
    runs: list[Run]
    found: SearchResult | None = None
    version: int = VERSION
    endpoint: str = ""


def row_of(record: Record, targets: Targets) -> Row:
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
        meets_targets(record, targets),
        record.failure,
    )


def write_result(result: Result, path: Path) -> None:
    """Write the file. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(result) + b"\n")
    except OSError as why:
        raise ConfigError(f"cannot write {path}: {why.strerror}") from why


# --- the table

COLUMNS = (
    "rate",
    "per GPU",
    "answered/s",
    "met",
    "goodput/GPU",
    "TTFT p50 p99",
    "TPOT p50 p99",
    "ITL p50 p99",
    "E2E p50 p99",
    "tokens/s",
    "cached",
    "failed",
)
"""Milliseconds, and requests a second."""


def table_row(result: Result, run: Run) -> list[str]:
    measures = run.measures
    times = (measures.ttft_ms, measures.tpot_ms, measures.itl_ms, measures.e2e_ms)
    return [
        run.name.removesuffix(" requests/s"),
        f"{run.offered / result.gpus:.4g}",
        f"{measures.achieved_per_s:.4g}",
        _share(measures.attainment),
        f"{measures.goodput_per_s / result.gpus:.3g}",
        *(f"{_ms(each.p50)} {_ms(each.p99)}" for each in times),
        f"{measures.output_tokens_per_s:,.0f}",
        _share(measures.cached),
        f"{sum(measures.failures.values()):,}",
    ]


def sessions_line(result: Result, run: Run) -> str:
    """Return how the sessions of a run fared, in the figures that matter to agents."""
    measures, later, at_once = run.measures, run.measures.later_ttft_ms, ""
    assert later is not None
    if run.concurrency:
        each = run.concurrency / result.gpus
        at_once = f"{run.concurrency} sessions at once, {each:.3g} per GPU: "
    return (
        f"{at_once}{_share(measures.attainment)} of the turns in time, {_share(measures.cached)} of "
        f"prompts cached, TTFT of later turns {_ms(later.p50)} ms p50, {_ms(later.p99)} ms p99"
    )


def _ms(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def warnings_of(result: Result) -> list[str]:
    """Return what a reader must know before the figures of a result."""
    warnings = []
    work = result.work
    shares = bool(work.trace or work.agents)
    for run in result.runs:
        name, client = run.name, run.measures.client
        if client.bottleneck:
            warnings.append(
                f"{name}: the client was too slow, so these figures are not the server's: "
                f"{client.bottleneck}"
            )
        if run.short:
            warnings.append(f"{name}: {run.rate:.4g} were wanted, and fewer came")
        if not shares and run.measures.cached > _MAX_CACHED:
            warnings.append(
                f"{name}: the server had {run.measures.cached:.0%} of the prompts cached, which "
                "share nothing; take another --seed"
            )
    if not all(run.measures.usage for run in result.runs):
        warnings.append("answers without usage; their tokens are counted by chunks")
    return warnings
