"""A server that is arithmetic: places and a queue, without a clock, so its figures are exact."""

from __future__ import annotations

import heapq
import itertools
import random

from kvrelay.load.measures import Record, Targets, Window, client_health, measures_of
from kvrelay.load.results import Run, row_of
from kvrelay.load.workloads import Arrival, Work, sessions

TARGETS = Targets(200.0, 15.0)
WORK = Work(512, 64)
STEP_S, PREFILL_S = 0.01, 0.03
SLOW_AFTER = 36.0
"""Requests a second that 24 places serve at most."""


def records_of(rate: float, places: int, seconds: float, seed: str) -> list[Record]:
    """Serve in each place one request at a time: 30 ms, and 10 ms for each further token."""
    free = [0.0] * places
    rng = random.Random(seed)
    found = []
    every = sessions(WORK, Arrival("poisson", rate), seed)
    for session in itertools.takewhile(lambda each: each.at < seconds, every):
        begun = max(session.at, heapq.heappop(free))
        gaps = [STEP_S * rng.uniform(0.8, 1.2) for _ in range(WORK.output - 1)]
        first = begun + PREFILL_S
        last = first + sum(gaps)
        heapq.heappush(free, last)
        found.append(
            Record(
                session.number,
                turn=0,
                due_s=session.at,
                sent_s=session.at + 0.0004,
                first_s=first,
                last_s=last,
                prompt_tokens=WORK.prompt,
                output_tokens=WORK.output,
                asked_tokens=WORK.output,
                chunks=WORK.output,
                usage=True,
                gaps_s=gaps,
            )
        )
    return found


def run_of(rate: float) -> Run:
    """Return 40 s of a server with 24 places."""
    records, window = records_of(rate, 24, 45.0, "run"), Window(5.0, 45.0)
    judged = [record for record in records if window.holds(record.due_s)]
    client = client_health(judged, 0.12, [0.0005] * 100, open_loop=True)
    rows = [row_of(record, TARGETS) for record in judged]
    return Run(rate, 0, 5.0, window.length_s, measures_of(records, window, TARGETS, client), rows)
