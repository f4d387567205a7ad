"""A server that is arithmetic: places and a queue, without a clock, so its figures are exact."""

from __future__ import annotations

import heapq
import itertools
import random

from kvrelay.load.measures import Record, Targets, Window, client_health, measures_of
from kvrelay.load.results import Provenance, Result, Run, row_of
from kvrelay.load.search import RateSearch
from kvrelay.load.workloads import Arrival, Work, sessions

TARGETS = Targets(200.0, 15.0)
WORK = Work(512, 64)
STEP_S, PREFILL_S = 0.01, 0.03


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


def run_of(rate: float, places: int, seconds: float) -> Run:
    records = records_of(rate, places, seconds + 5, f"{rate}")
    window = Window(5.0, 5.0 + seconds)
    judged = [record for record in records if window.start_s <= record.due_s < window.end_s]
    client = client_health(judged, 0.12, [0.0005] * 100, open_loop=True)
    measures = measures_of(records, window, TARGETS, client)
    return Run(rate, 0, 5.0, seconds, measures, [row_of(record, TARGETS) for record in judged])


def result_of(places: int, gpus: int, seconds: float) -> Result:
    search, runs = RateSearch(4.0), list[Run]()
    while (rate := search.rate) is not None:
        runs.append(run_of(rate, places, seconds))
        search.record(runs[-1].measures.attainment)
    made = Provenance("kvrelay bench", "2026-11-22T09:00:00+00:00", "Linux", {"server": "0.1.0"})
    asked = ("512:64", "poisson arrivals, open loop", WORK, TARGETS, 0.9)
    return Result("Llama-3.1-8B", "http://h:8000", gpus, *asked, made, runs, search.result())
