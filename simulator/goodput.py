"""How much a cluster serves in time, by simulation: the share of requests that keep their targets, and the highest rate
at which enough of them do."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from load.measures import percentile
from load.workloads import Asked
from planning.planner import NETWORK_MS
from simulator.setting import Result, Setting, Targets
from simulator.stream import Stream, streams_at
from simulator.world import simulate

__all__ = ["Served", "attained", "is_good", "most_rate", "served"]

# The first requests find empty nodes and unknown rates, the last ones nobody behind them.
_COUNTED = 0.15, 0.9
_NARROW = 0.03
_MOST_TRIES = 9


def is_good(stream: Stream, targets: Targets) -> bool:
    """Whether it has kept both targets, as its client sees them."""
    in_time = stream.ttft + NETWORK_MS <= targets.ttft_ms and stream.tpot <= targets.tpot_ms
    return stream.done == stream.output and stream.last >= 0 and in_time


def attained(streams: Sequence[Stream], targets: Targets) -> float:
    """The share of these that are good."""
    return sum(is_good(stream, targets) for stream in streams) / max(1, len(streams))


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a rate, in requests a second. Milliseconds."""

    rate: float
    attained: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    longest_p90: float
    """Of the longest times between two tokens of each answer."""
    itl_p99: float


def served(result: Result, targets: Targets, rate: float) -> Served:
    """The figures of a run, without its beginning and its end."""
    begin, end = (int(share * len(result.streams)) for share in _COUNTED)
    counted = result.streams[begin : max(end, begin + 1)]
    whole = [stream for stream in counted if not stream.refused] or list(counted)
    ttft = sorted(stream.ttft + NETWORK_MS for stream in whole)
    tpot = sorted(stream.tpot for stream in whole)
    longest = sorted(stream.longest for stream in whole)
    return Served(
        rate,
        attained(counted, targets),
        percentile(ttft, 0.5),
        percentile(ttft, 0.9),
        percentile(tpot, 0.5),
        percentile(tpot, 0.9),
        percentile(longest, 0.9),
        result.gap_ms(0.99),
    )


def at_rate(asks: Sequence[Asked], setting: Setting, targets: Targets, rate: float) -> Served:
    """Ask these at so many a second."""
    # Looking for cycles among living objects would take a third of the time.
    gc.disable()
    try:
        return served(simulate(streams_at(asks, rate), dataclasses.replace(setting, targets=targets)), targets, rate)
    finally:
        gc.enable()


def most_rate(
    asks: Sequence[Asked],
    setting: Setting,
    targets: Targets,
    attainment: float,
    guess: float,
    tried: Callable[[Served], None] = lambda _: None,
) -> Served:
    """The highest rate at which this share is good, within 3 %, beginning at a guess above 0; at 0 if none is."""
    best, low, high = None, 0.0, 0.0
    rate = guess
    for _ in range(_MOST_TRIES):
        found = at_rate(asks, setting, targets, rate)
        tried(found)
        if found.attained >= attainment:
            best, low = found, rate
        else:
            high = rate
        if low and high and high - low <= _NARROW * high:
            break
        rate = (low + high) / 2 if low and high else low * 1.25 if low else high * 0.75
    return best or dataclasses.replace(found, rate=0.0)
