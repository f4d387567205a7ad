"""How much a simulated cluster serves in time: shares of requests, and the highest rate."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvrelay.load.measures import percentile
from kvrelay.load.search import RateSearch
from kvrelay.load.workloads import Agents, Arrival, Asked, Work, sessions
from kvrelay.planner.sessions import streams_of_sessions
from kvrelay.planner.setting import NETWORK_MS, Result, Setting, Stream, Targets, streams_at
from kvrelay.planner.world import simulate

__all__ = [
    "AGENT_BLOCK_TOKENS",
    "Served",
    "at_rate",
    "at_sessions",
    "attained",
    "highest_rate",
    "is_good",
    "most_sessions",
    "requests_needed",
    "served",
    "turns_of",
]

_SECONDS = 20
_LEAST_REQUESTS, _MOST_REQUESTS = 400, 4_000
# The first requests find empty nodes, the last ones nobody behind them: these shares of a run do
# not count, and at least an answer's time, until which a node has less to do.
_BEFORE, _BEHIND = 0.15, 0.1
# A run takes so many times an answer, of which two do not count; one is for rates above the guess.
_ANSWERS = 5
_NARROW = 0.03
_EACH = 3
"""Sessions that each client works off."""
AGENT_BLOCK_TOKENS = 128
_MOST_TRIES = 9


def is_good(stream: Stream, targets: Targets) -> bool:
    in_time = stream.ttft + NETWORK_MS <= targets.ttft_ms and stream.tpot <= targets.tpot_ms
    return stream.answered and in_time


def attained(streams: Sequence[Stream], targets: Targets) -> float:
    return sum(is_good(stream, targets) for stream in streams) / max(1, len(streams))


@dataclass(frozen=True, slots=True)
class Served:
    """A result of one rate in requests a second; milliseconds."""

    rate: float
    attained: float
    ttft_p90: float
    tpot_p90: float
    itl_p99: float
    found: float = math.nan
    """Share of the prompts' tokens that a cache could have had, and did have."""


def requests_needed(asks: Sequence[Asked], targets: Targets, rate: float) -> int:
    """Return how many requests a run needs: for 20 seconds, and for several answers."""
    answers = rate * _ANSWERS * _answer_ms([asked.output for asked in asks], targets) / 1e3
    return max(_LEAST_REQUESTS, min(_MOST_REQUESTS, int(rate * _SECONDS)), math.ceil(answers))


def _answer_ms(outputs: Sequence[int], targets: Targets) -> float:
    return targets.ttft_ms + targets.tpot_ms * percentile(sorted(outputs), 0.9)


def _counted(streams: Sequence[Stream], targets: Targets) -> Sequence[Stream]:
    first, last = streams[0].at, streams[-1].at
    answer_ms = min(_answer_ms([stream.output for stream in streams], targets), (last - first) / 4)
    begin = first + max(_BEFORE * (last - first), answer_ms)
    end = last - max(_BEHIND * (last - first), answer_ms)
    return [stream for stream in streams if begin <= stream.at <= end] or streams


def served(result: Result, targets: Targets, rate: float) -> Served:
    """Return the figures of a run, without its beginning and its end."""
    counted = _counted(result.streams, targets)
    whole = [stream for stream in counted if stream.answered] or list(counted)
    ttft = sorted(stream.ttft + NETWORK_MS for stream in whole)
    tpot = sorted(stream.tpot for stream in whole)
    return Served(
        rate,
        attained(counted, targets),
        percentile(ttft, 0.9),
        percentile(tpot, 0.9),
        result.gap_ms(0.99),
        result.found,
    )


def at_rate(asks: Sequence[Asked], setting: Setting, targets: Targets, rate: float) -> Served:
    # Looking for cycles among living objects would take a third of the time.
    gc.disable()
    try:
        return served(
            simulate(streams_at(asks, rate), dataclasses.replace(setting, targets=targets)),
            targets,
            rate,
        )
    finally:
        gc.enable()


def turns_of(agents: Agents, clients: int) -> list[Stream]:
    """Return the turns of clients, each with some sessions to work off."""
    drawn = islice(sessions(Work(agents=agents), Arrival(), "plan"), _EACH * clients)
    return streams_of_sessions([*drawn], clients, AGENT_BLOCK_TOKENS)


def at_sessions(agents: Agents, setting: Setting, targets: Targets, clients: int) -> Served:
    """Return the figures of so many sessions at once; the rate is their number."""
    streams = turns_of(agents, clients)
    result = simulate(streams, dataclasses.replace(setting, targets=targets))
    result.streams = sorted(streams, key=lambda stream: stream.at)
    return served(result, targets, clients)


def most_sessions(
    agents: Agents,
    setting: Setting,
    targets: Targets,
    attainment: float,
    guess: float,
    bound: float,
) -> Served:
    """Return the most sessions at once at which this share of the turns is good; 0 if there are none.

    More than `bound` are not tried.
    """
    search, best = RateSearch(max(1.0, round(guess)), attainment, _NARROW, whole=True), None
    found = Served(0.0, 0.0, 0.0, 0.0, 0.0)
    while (clients := search.rate) is not None:
        if clients > bound:
            search.record(0.0)
            continue
        found = at_sessions(agents, setting, targets, int(clients))
        if found.attained >= attainment and (best is None or found.rate > best.rate):
            best = found
        search.record(found.attained)
    return best or dataclasses.replace(found, rate=0.0)


def highest_rate(
    asks: Sequence[Asked],
    setting: Setting,
    targets: Targets,
    attainment: float,
    guess: float,
    tried: Callable[[Served], None] = lambda _: None,
) -> Served:
    """Return the highest rate at which this share is good, within 3 %, from a guess above 0.

    The rate is 0 if there is none.
    """
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
