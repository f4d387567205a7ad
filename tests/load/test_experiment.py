"""From settings to runs, against a server that is arithmetic: windows, seeds, the search."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated_server import records_of

from kvrelay.load import experiment
from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import Experiment
from kvrelay.load.sender import Load, Outcome, Progress, Server
from kvrelay.load.workloads import Spelling
from kvrelay.wire.errors import KvrelayError


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Load]:
    """Loads that were sent to a server of 24 places, which serves at most 36 requests/s."""
    put: list[Load] = []

    async def send_load(
        config: BenchConfig,
        server: Server,
        load: Load,
        on_progress: Callable[[Progress], None],
    ) -> Outcome:
        put.append(load)
        on_progress(Progress(3, 2, 0))
        seconds = min(load.sending_s, 20.0)
        return Outcome(records_of(load.arrival.rate or 1.0, seconds, load.seed), [0.0])

    async def inspect_server(url: str, key: str, model: str, *, chat: bool) -> Server:
        return Server("m", "1", Spelling())

    monkeypatch.setattr(experiment, "send_load", send_load)
    monkeypatch.setattr(experiment, "inspect_server", inspect_server)
    return put


async def test_a_search_probes_each_rate_in_a_window_of_its_own(loads: list[Load]) -> None:
    told: list[str] = []
    config = BenchConfig(
        lengths="512:64", find_rate=True, ttft_ms=200, tpot_ms=15, duration_s=60, gpus=2
    )
    bench = Experiment(config, on_progress=lambda name, *_: told.append(name))
    await bench.run()
    assert bench.found is not None
    assert bench.found.breaks is not None
    assert 28 < bench.found.holds < 36.4
    assert bench.found.breaks / bench.found.holds <= 1.05
    assert loads[0].arrival.rate == 2.0
    assert len({load.seed for load in loads}) == len(loads) == len(bench.runs)
    # Requests go on to come for as long as an answer may take (200 ms and 64 tokens of 15 ms), and
    # are cut soon after.
    for load in loads:
        assert load.judged_s == 65
        assert load.sending_s == pytest.approx(65 + 1.16)
        assert (load.first_s, load.token_s, load.drain_s) == (0.2, 0.015, 2)
    assert all(5 <= row.due_s < 65 for run in bench.runs for row in run.rows)
    assert told[0] == "2 requests/s for 66 s"


async def test_a_number_of_requests_ends_with_its_last_answer(loads: list[Load]) -> None:
    bench = Experiment(BenchConfig(lengths="512:64", concurrency=2, requests=5))
    await bench.run()
    assert (loads[0].clients, loads[0].requests, loads[0].warm_up_s) == (2, 5, 0)
    (run,) = bench.runs
    last = max(row.due_s + row.e2e_ms / 1e3 for row in run.rows)
    assert run.window_s == pytest.approx(last, abs=0.01)
    assert run.measures.achieved_per_s == pytest.approx(len(run.rows) / run.window_s)


async def test_a_measurement_ends_with_its_trace(loads: list[Load], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": []}')
    bench = Experiment(BenchConfig(trace=f"{trace}", rate="4", warm_up_s=5))
    await bench.run()
    (run,) = bench.runs
    assert 5 + run.window_s == pytest.approx(max(row.due_s for row in run.rows), abs=0.01)
    assert run.window_s < 15 < loads[0].judged_s


async def test_a_search_believes_no_few_requests_that_are_left_of_a_trace(
    loads: list[Load], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": []}')
    bench = Experiment(BenchConfig(trace=f"{trace}", rate="9", warm_up_s=19, find_rate=True))
    await bench.run()
    assert bench.found is not None
    assert "requests of the trace come after the warm-up, too few" in bench.found.why
    assert len(loads) == 1


async def test_a_warm_up_that_takes_all_is_told(loads: list[Load]) -> None:
    with pytest.raises(KvrelayError, match="no request came after the warm-up"):
        await Experiment(BenchConfig(concurrency=2, requests=5, warm_up_s=100)).run()
    assert loads[0].warm_up_s == 100


TURNS = "fleet,turns=3,branch=0,output=64,gap_s=1e-9"


@pytest.mark.parametrize(
    ("asked", "warm_up_s", "after_s"),
    [
        ({"lengths": "reasoning", "rate": "4"}, 82.42, 82.42),
        ({"lengths": "512:64", "rate": "4"}, 5.0, 4.2),  # 1 s, and 50 ms each
        ({"lengths": "reasoning", "concurrency": 4}, 82.42, 0.0),
        ({"agents": TURNS, "rate": "4", "endpoint": "chat"}, 12.6, 4.2),
    ],
)
async def test_the_load_is_all_there_before_it_counts_and_as_long_as_it_counts(
    loads: list[Load], asked: dict[str, object], warm_up_s: float, after_s: float
) -> None:
    bench = Experiment(BenchConfig(**asked))  # type: ignore[arg-type]
    try:
        await bench.run()
    except KvrelayError:
        assert warm_up_s > 20  # beyond what this server has
    assert loads[0].judged_s == pytest.approx(warm_up_s + 60)
    assert loads[0].sending_s == pytest.approx(warm_up_s + 60 + after_s)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (KvrelayError("a process has ended"), "at 16 requests/s a process has ended"),
        (asyncio.CancelledError(), "the search was interrupted"),
    ],
    ids=str,
)
async def test_a_search_that_ends_early_tells_what_it_knows(
    loads: list[Load], monkeypatch: pytest.MonkeyPatch, why: BaseException, said: str
) -> None:
    whole = experiment.send_load

    async def broken(*asked: object) -> Outcome:
        if len(loads) == 2:
            raise why
        return await whole(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(experiment, "send_load", broken)
    bench = Experiment(BenchConfig(lengths="512:64", find_rate=True, rate="4"))
    with contextlib.suppress(asyncio.CancelledError):
        await bench.run()
    assert bench.found is not None
    assert [run.rate for run in bench.runs] == [4, 8]
    assert (bench.found.holds, bench.found.breaks, bench.found.why) == (8, None, said)


async def test_agents_are_searched_by_sessions_at_once(loads: list[Load]) -> None:
    config = BenchConfig(
        agents="fleet", endpoint="chat", find_rate=True, concurrency=3, duration_s=5, warm_up_s=5
    )
    bench = Experiment(config)
    await bench.run()
    assert bench.found is not None
    assert [load.clients for load in loads] == [3 * 2**at for at in range(14)]
    assert bench.found.holds == loads[-1].clients
    assert all(run.rate == 0.0 for run in bench.runs)


async def test_a_handful_of_requests_does_not_say_what_holds(loads: list[Load]) -> None:
    bench = Experiment(BenchConfig(lengths="512:64", find_rate=True, rate="4", ttft_ms=0.001))
    await bench.run()
    assert bench.found is not None
    assert [run.rate for run in bench.runs] == [4, 2, 1, 0.5]
    assert "at 0.25 requests/s 15 requests come in 60 s, too few" in bench.found.why
    with pytest.raises(KvrelayError, match=r"at 0\.1 requests/s 6 requests come"):
        await Experiment(BenchConfig(find_rate=True, rate="0.1")).run()
