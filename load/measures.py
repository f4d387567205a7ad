"""The figures of a run: percentiles, rates, goodput, and whether the client was fast enough.

Pure. A request counts if it was due within the window. TTFT counts from when it was due, a later
turn's from when it was sent. A failed request has met nothing and is in no percentile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvrelay.load.records import Failure, Record

__all__ = [
    "Client",
    "Measures",
    "Percentiles",
    "Slo",
    "Window",
    "client_of",
    "e2e_ms",
    "measured",
    "met",
    "percentile",
    "server_failures",
    "tpot_ms",
    "ttft_ms",
]

LATE_MS, BUSY = 10.0, 0.85
"""A client is too slow if it is this late (p99), or takes so much of a core."""


class Slo(msgspec.Struct, frozen=True):
    """Targets of one request in milliseconds; `gap_ms` 0 sets no limit to a single gap."""

    ttft_ms: float
    tpot_ms: float
    gap_ms: float = 0.0


class Window(msgspec.Struct, frozen=True):
    """The seconds of a run that count."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


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


class Client(msgspec.Struct, frozen=True):
    """How well the client itself did."""

    processes: int
    late: Percentiles
    """From due to sent, in an open loop."""
    lag: Percentiles
    """How late timers were, and so how late answers are read."""
    busiest: float
    """The largest share of a core that a process took."""
    bottleneck: str = ""
    """Why the figures say more of the client than of the server, if they do."""


class Measures(msgspec.Struct, frozen=True):
    """The figures of one run, within its window."""

    requests: int
    answered: int
    failures: dict[str, int]
    examples: list[str]
    """An example of each kind of failure."""
    offered_per_s: float
    """Requests that were due."""
    achieved_per_s: float
    """Requests that were answered whole within the window."""
    attainment: float
    """Share of requests that met all targets."""
    goodput_per_s: float
    goodput_per_s_per_gpu: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    prompt_tokens: float
    """Means of prompts and answers, and the cached share of all prompts' tokens."""
    output_tokens: float
    cached: float
    tokens_per_chunk: float
    usage: bool
    """Whether all token counts are the server's own."""
    client: Client


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all are at most; nan without values."""
    return _at(sorted(values), share) if values else math.nan


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def ttft_ms(record: Record) -> float:
    return (record.first_s - _began_s(record)) * 1e3


def e2e_ms(record: Record) -> float:
    return (record.last_s - _began_s(record)) * 1e3


def _began_s(record: Record) -> float:
    return record.sent_s if record.turn else record.due_s


def tpot_ms(record: Record) -> float | None:
    """Return the time per token after the first chunk; None without such tokens."""
    first = record.counts[0] if record.counts else 1
    behind = record.output_tokens - first
    return (record.last_s - record.first_s) / behind * 1e3 if behind > 0 else None


def met(record: Record, slo: Slo) -> bool:
    """Return whether a request met all targets."""
    if record.failure or ttft_ms(record) > slo.ttft_ms or (tpot_ms(record) or 0.0) > slo.tpot_ms:
        return False
    return not slo.gap_ms or max(record.gaps_s, default=0.0) * 1e3 <= slo.gap_ms


def measured(
    records: Sequence[Record], window: Window, slo: Slo, gpus: int, client: Client
) -> Measures:
    """Return the figures of a run."""
    judged = [record for record in records if window.start_s <= record.due_s < window.end_s]
    good = [record for record in judged if not record.failure]
    reached = sum(met(record, slo) for record in judged)
    failed = Counter(record.failure for record in judged if record.failure)
    examples: dict[str, str] = {}
    for record in judged:
        if record.failure:
            examples.setdefault(record.failure, f"{record.failure}: {record.why}")
    length = max(1e-9, window.length_s)
    tokens = sum(_tokens_within(record, window) for record in records if record.chunks) / length
    answered = [record for record in records if not record.failure]
    chunks, prompts = (
        sum(record.chunks for record in good),
        sum(record.prompt_tokens for record in good),
    )
    return Measures(
        requests=len(judged),
        answered=len(good),
        failures=dict(failed),
        examples=list(examples.values()),
        offered_per_s=len(judged) / length,
        achieved_per_s=sum(window.start_s <= record.last_s < window.end_s for record in answered)
        / length,
        attainment=reached / len(judged) if judged else math.nan,
        goodput_per_s=reached / length,
        goodput_per_s_per_gpu=reached / length / gpus,
        output_tokens_per_s=tokens,
        output_tokens_per_s_per_gpu=tokens / gpus,
        ttft_ms=Percentiles.of(map(ttft_ms, good)),
        tpot_ms=Percentiles.of(each for each in map(tpot_ms, good) if each is not None),
        itl_ms=Percentiles.of(gap * 1e3 for record in good for gap in record.gaps_s),
        e2e_ms=Percentiles.of(map(e2e_ms, good)),
        prompt_tokens=prompts / len(good) if good else math.nan,
        output_tokens=sum(record.output_tokens for record in good) / len(good)
        if good
        else math.nan,
        cached=sum(record.cached_tokens for record in good) / prompts if prompts else math.nan,
        tokens_per_chunk=sum(record.output_tokens for record in good) / chunks
        if chunks
        else math.nan,
        usage=all(record.usage for record in good),
        client=client,
    )


def _tokens_within(record: Record, window: Window) -> float:
    each = record.output_tokens / record.chunks
    now, total = record.first_s, 0.0
    for at in range(record.chunks):
        if at:
            now += record.gaps_s[at - 1]
        if window.start_s <= now < window.end_s:
            total += record.counts[at] if record.counts else each
    return total


def client_of(
    records: Iterable[Record],
    cpu_shares: Sequence[float],
    lags_s: Iterable[float],
    *,
    open_loop: bool,
) -> Client:
    """Return how well the client did."""
    records = list(records)
    own = [record for record in records if record.failure == Failure.CLIENT]
    late = (
        Percentiles.of((record.sent_s - record.due_s) * 1e3 for record in records)
        if open_loop
        else Percentiles.of(())
    )
    lag, busiest = Percentiles.of(each * 1e3 for each in lags_s), max(cpu_shares, default=0.0)
    more = "; take more --processes, or another machine"
    why = ""
    if own:
        why = f"{len(own)} of its requests could not be sent ({own[0].why}){more}"
    elif late.p99 > LATE_MS:
        why = f"a hundredth of the requests was sent more than {late.p99:.0f} ms late{more}"
    elif lag.p99 > LATE_MS:
        why = f"answers were read up to {lag.p99:.0f} ms late (p99){more}"
    elif busiest > BUSY:
        why = f"a process took {busiest:.0%} of its core{more}"
    return Client(len(cpu_shares), late, lag, busiest, why)


def server_failures(measures: Measures) -> int:
    """Count failed requests, but those that were cut because the run was over."""
    return sum(count for kind, count in measures.failures.items() if kind != Failure.CUT)
