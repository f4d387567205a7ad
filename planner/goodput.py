"""How much a simulated cluster serves in time: shares of requests, the highest rate, its bound."""

from __future__ import annotations

import gc
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from kvrelay.load.measures import Targets, percentile
from kvrelay.load.search import RateSearch
from kvrelay.load.workloads import Agents, Arrival, Work, sessions
from kvrelay.planner.rate_card import RateCard
from kvrelay.planner.sessions import streams_of_sessions
from kvrelay.planner.setting import NETWORK_MS, Result, Setting, Stream, Streams, streams_at
from kvrelay.planner.world import simulate

__all__ = [
    "AGENT_BLOCK_TOKENS",
    "ATTAINMENT",
    "Served",
    "at_rate",
    "at_sessions",
    "attained",
    "bound_of",
    "highest",
    "is_good",
    "requests_needed",
    "served",
    "turns_of",
]

ATTAINMENT = 0.9
"""Share of requests that should keep both targets."""
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


def is_good(stream: Stream, targets: Targets) -> bool:
    in_time = stream.ttft + NETWORK_MS <= targets.ttft_ms and stream.tpot <= targets.tpot_ms
    return stream.answered and in_time


def attained(streams: Streams, targets: Targets) -> float:
    return sum(is_good(stream, targets) for stream in streams) / max(1, len(streams))


@dataclass(frozen=True, slots=True)
class Served:
    """A result of one rate in requests a second; milliseconds, nan if nothing was answered."""

    rate: float
    attained: float
    ttft_p90: float
    tpot_p90: float
    itl_p99: float
    found: float = math.nan
    """Share of the prompts' tokens that a cache could have had, and did have."""


def requests_needed(asks: Streams, targets: Targets, rate: float) -> int:
    """Return how many requests a run needs: for 20 seconds, and for several answers."""
    answers = rate * _ANSWERS * _answer_ms([asked.output for asked in asks], targets) / 1e3
    return max(_LEAST_REQUESTS, min(_MOST_REQUESTS, int(rate * _SECONDS)), math.ceil(answers))


def _answer_ms(outputs: Sequence[int], targets: Targets) -> float:
    return targets.ttft_ms + targets.tpot_ms * percentile(sorted(outputs), 0.9)


def _counted(streams: Streams, targets: Targets) -> Streams:
    first, last = streams[0].at, streams[-1].at
    answer_ms = min(_answer_ms([stream.output for stream in streams], targets), (last - first) / 4)
    begin = first + max(_BEFORE * (last - first), answer_ms)
    end = last - max(_BEHIND * (last - first), answer_ms)
    return [stream for stream in streams if begin <= stream.at <= end] or streams


def served(result: Result, rate: float) -> Served:
    """Return the figures of a run with targets, without its beginning and its end."""
    targets = result.setting.targets
    assert targets is not None
    counted = _counted(result.streams, targets)
    whole = [stream for stream in counted if stream.answered]
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


def at_rate(asks: Streams, setting: Setting, rate: float) -> Served:
    # Looking for cycles among living objects would take a third of the time.
    gc.disable()
    try:
        return served(simulate(streams_at(asks, rate), setting), rate)
    finally:
        gc.enable()


def turns_of(agents: Agents, clients: int) -> list[Stream]:
    """Return the turns of clients, each with some sessions to work off."""
    drawn = islice(sessions(Work(agents=agents), Arrival(), "plan"), _EACH * clients)
    return streams_of_sessions([*drawn], clients, AGENT_BLOCK_TOKENS)


def at_sessions(agents: Agents, setting: Setting, clients: int) -> Served:
    """Return the figures of so many sessions at once; the rate is their number."""
    result = simulate(turns_of(agents, clients), setting)
    result.streams = sorted(result.streams, key=lambda stream: stream.at)
    return served(result, clients)


def highest(serve: Callable[[float], Served], guess: float, bound: float, *, whole: bool) -> Served:
    """Return the figures of the highest rate at which enough are good, within 3 %, or in whole ones.

    No rate above `bound` is tried. The rate is 0 if there is none.
    """
    start = max(1.0, round(guess)) if whole else guess
    search, best = RateSearch(start, ATTAINMENT, _NARROW, whole=whole), None
    found = Served(0.0, 0.0, 0.0, 0.0, 0.0)
    while (rate := search.rate) is not None:
        if rate > bound:
            search.record(0.0)
            continue
        found = serve(rate)
        if found.attained >= ATTAINMENT:
            best = found
        search.record(found.attained)
    return best or replace(found, rate=0.0)


def bound_of(setting: Setting, asks: Streams) -> tuple[float, str]:
    """Return the rate at which nodes have no time left, and the role that is short first.

    For these requests, as if all earlier ones were cached.
    """
    card, targets = setting.card, setting.targets
    assert targets is not None
    prompt_ms = output = context = 0.0
    seen: set[int] = set()
    for each in asks:
        known = sum(1 for _ in takewhile(seen.__contains__, each.blocks))
        seen.update(each.blocks)
        cached = min(known * setting.block_size, each.prompt - 1)
        prompt_ms += card.prompt_ms(each.prompt, cached) / len(asks)
        output += each.output / len(asks)
        context += each.output * (each.prompt + each.output / 2) / len(asks)
    decode_ms = output * _token_ms(card, context / output, targets.tpot_ms)
    by_decode = setting.decode / decode_ms * 1e3
    by_all = (setting.prefill + setting.decode) / (prompt_ms + decode_ms) * 1e3
    short = "prefill" if setting.prefill / prompt_ms < setting.decode / decode_ms else "decode"
    return min(by_decode, by_all), short if setting.prefill else "time"


def _token_ms(card: RateCard, context: float, tpot_ms: float) -> float:
    most = max(1, min(card.max_num_seqs, int(card.kv_tokens / max(1.0, context))))
    # Steps never get shorter as batches get larger.
    in_time = bisect_right(
        range(1, most + 1), tpot_ms, key=lambda size: card.step_ms(size, size * context)
    )
    size = max(1, in_time)
    return card.step_ms(size, size * context) / size
