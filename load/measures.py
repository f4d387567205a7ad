"""The record of a request, and the figures of a run. Pure. Seconds from the begin of the run.

A request counts if it was due within the window; a failed one has met nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvrelay.wire.errors import ConfigError

__all__ = [
    "ClientHealth",
    "Failure",
    "Measures",
    "Percentiles",
    "Record",
    "Targets",
    "Window",
    "client_health",
    "e2e_ms",
    "measures_of",
    "meets_targets",
    "percentile",
    "server_failures",
    "tpot_ms",
    "ttft_ms",
]

_LATE_MS = 10.0
"""A client is too slow if it is this late (p99)."""


class Failure(StrEnum):
    """Why a request has no good answer; CUT: the run was over, CLIENT: the client's own fault."""

    CONNECT = "no connection"
    STATUS = "HTTP status"
    IN_BAND = "error in the stream"
    EARLY_END = "early end"
    EMPTY = "empty answer"
    SHORT = "fewer tokens than asked"
    MALFORMED = "malformed"
    DEADLINE = "deadline"
    UNSENT = "a turn before it failed"
    CUT = "cut at the end"
    CLIENT = "the client's own"


class Record(msgspec.Struct):
    """One request: when it was due and sent, and the gaps between the chunks of its answer."""

    session: int
    turn: int
    due_s: float
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    chunks: int = 0
    usage: bool = False
    failure: str = ""
    why: str = ""
    gaps_s: list[float] = []


class Targets(msgspec.Struct, frozen=True):
    """A pair of latencies that a good request keeps, as its client sees them."""

    ttft_ms: float
    tpot_ms: float

    def __post_init__(self) -> None:
        if not (0 < self.ttft_ms < math.inf and 0 < self.tpot_ms < math.inf):
            raise ConfigError(
                f"targets must be above 0 milliseconds, got {self.ttft_ms:g} and {self.tpot_ms:g}"
            )


class Window(NamedTuple):
    """The seconds of a run that count."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, at_s: float) -> bool:
        return self.start_s <= at_s < self.end_s


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in milliseconds; nan without values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        ordered = sorted(values)
        if not ordered:
            return cls(*[math.nan] * 6)
        shares = [_at(ordered, share) for share in (0.5, 0.9, 0.95, 0.99, 1.0)]
        return cls(sum(ordered) / len(ordered), *shares)


class ClientHealth(msgspec.Struct, frozen=True):
    late: Percentiles
    lag: Percentiles
    """How late timers were, and so how late answers are read."""
    bottleneck: str = ""
    """Why the figures say more of the client than of the server, if they do."""


class Measures(msgspec.Struct, frozen=True):
    """The figures of one run, within its window."""

    requests: int
    answered: int
    failures: dict[str, int]
    examples: list[str]
    offered_per_s: float
    achieved_per_s: float
    attainment: float
    """Share of requests that met all targets."""
    goodput_per_s: float
    output_tokens_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    prompt_tokens: float
    """Mean per request, like `output_tokens`."""
    output_tokens: float
    cached: float
    """Share of all prompt tokens that the server had cached."""
    usage: bool
    client: ClientHealth
    later_ttft_ms: Percentiles | None = None
    """The TTFT of later turns than the first, those of sub-agents too."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all are at most; nan without values."""
    return _at(sorted(values), share) if values else math.nan


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def ttft_ms(record: Record) -> float:
    return (record.first_s - _began_s(record)) * 1e3


def e2e_ms(record: Record) -> float:
    return (record.last_s - _began_s(record)) * 1e3


def _began_s(record: Record) -> float:
    return record.sent_s if record.turn else record.due_s


def tpot_ms(record: Record) -> float | None:
    """Return the mean time per token after the first chunk; None without such tokens."""
    behind = record.output_tokens - 1
    return (record.last_s - record.first_s) / behind * 1e3 if behind > 0 else None


def meets_targets(record: Record, targets: Targets) -> bool:
    in_time = ttft_ms(record) <= targets.ttft_ms and (tpot_ms(record) or 0.0) <= targets.tpot_ms
    return in_time and not record.failure


def measures_of(
    records: Sequence[Record], window: Window, targets: Targets, client: ClientHealth
) -> Measures:
    judged = [record for record in records if window.holds(record.due_s)]
    good = [record for record in judged if not record.failure]
    met = sum(meets_targets(record, targets) for record in judged)
    failed = [record for record in judged if record.failure]
    examples: dict[str, str] = {}
    for record in failed:
        examples.setdefault(record.failure, f"{record.failure}: {record.why}")
    later = [ttft_ms(record) for record in good if record.turn]
    length = max(1e-9, window.length_s)
    tokens = sum(_tokens_within(record, window) for record in records if record.chunks) / length
    in_time = sum(not record.failure and window.holds(record.last_s) for record in records)
    prompt_tokens, output_tokens, cached = (
        sum(getattr(record, name) for record in good)
        for name in ("prompt_tokens", "output_tokens", "cached_tokens")
    )
    return Measures(
        requests=len(judged),
        answered=len(good),
        failures=dict(Counter(record.failure for record in failed)),
        examples=list(examples.values()),
        offered_per_s=len(judged) / length,
        achieved_per_s=in_time / length,
        attainment=_ratio(met, len(judged)),
        goodput_per_s=met / length,
        output_tokens_per_s=tokens,
        ttft_ms=Percentiles.of(map(ttft_ms, good)),
        tpot_ms=Percentiles.of(each for each in map(tpot_ms, good) if each is not None),
        itl_ms=Percentiles.of(gap * 1e3 for record in good for gap in record.gaps_s),
        e2e_ms=Percentiles.of(map(e2e_ms, good)),
        prompt_tokens=_ratio(prompt_tokens, len(good)),
        output_tokens=_ratio(output_tokens, len(good)),
        cached=_ratio(cached, prompt_tokens),
        usage=all(record.usage for record in good),
        client=client,
        later_ttft_ms=Percentiles.of(later) if later else None,
    )


def _tokens_within(record: Record, window: Window) -> float:
    times = itertools.accumulate(record.gaps_s, initial=record.first_s)
    return record.output_tokens / record.chunks * sum(map(window.holds, times))


def client_health(
    records: Sequence[Record], lags_s: Iterable[float], *, open_loop: bool
) -> ClientHealth:
    """Return how well the client did; `lags_s` is how late its timers were."""
    late = Percentiles.of((record.sent_s - record.due_s) * 1e3 for record in records if open_loop)
    lag = Percentiles.of(each * 1e3 for each in lags_s)
    unsent = [record for record in records if record.failure == Failure.CLIENT]
    why = ""
    if unsent:
        why = f"{len(unsent)} of its requests could not be sent ({unsent[0].why})"
    elif late.p99 > _LATE_MS:
        why = f"a hundredth of the requests was sent more than {late.p99:.0f} ms late"
    elif lag.p99 > _LATE_MS:
        why = f"answers were read up to {lag.p99:.0f} ms late (p99)"
    if why:
        why += "; share the load among several machines, or take one that is less busy"
    return ClientHealth(late, lag, why)


def server_failures(measures: Measures) -> int:
    """Count failed requests, except for those cut because the run was over."""
    return sum(count for kind, count in measures.failures.items() if kind != Failure.CUT)
