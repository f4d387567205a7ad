"""A server that is arithmetic: places and a queue, without a clock, so its figures are exact."""

from __future__ import annotations

import heapq
import itertools

from kvrelay.load.measures import Record, Targets, Window, client_health, measures_of
from kvrelay.load.results import Run, row_of
from kvrelay.load.workloads import Arrival, Work, sessions

TARGETS = Targets(200.0, 15.0)
WORK = Work(512, 64)
STEP_S, PREFILL_S = 0.01, 0.03
SLOW_AFTER = 36.0
"""Requests a second that 24 places serve at most."""


def records_of(rate: float, seconds: float, seed: str) -> list[Record]:
    """Serve as fast as 24 places do, one request each: 30 ms, and 10 ms for each further token."""
    free = [0.0] * 24
    found = []
    every = sessions(WORK, Arrival("poisson", rate), seed)
    for session in itertools.takewhile(lambda each: each.at < seconds, every):
        first = max(session.at, heapq.heappop(free)) + PREFILL_S
        gaps = [STEP_S] * (WORK.output - 1)
        last = first + sum(gaps)
        heapq.heappush(free, last)
        times, counts = (session.at, session.at, first, last), (WORK.prompt, 0, *[WORK.output] * 3)
        found.append(Record(session.number, 0, *times, *counts, usage=True, gaps_s=gaps))
    return found


def run_of(rate: float) -> Run:
    """Return 40 s of that server."""
    records, window = records_of(rate, 45.0, "run"), Window(5.0, 45.0)
    judged = [record for record in records if window.holds(record.due_s)]
    measures = measures_of(records, window, TARGETS, client_health(judged, [0.0], open_loop=True))
    rows = [row_of(record, TARGETS) for record in judged]
    return Run(rate, 0, 5.0, window.length_s, measures, rows)
