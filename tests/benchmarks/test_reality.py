"""`python -m benchmarks.reality` without a cluster: the same requests for both, and what counts as
far off.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from test_goodput import SLO, result_of, run_at

from benchmarks.reality import (
    Compared,
    compared,
    main,
    of_results,
    streams_about,
    streams_like,
    told,
)
from kvrelay.load.config import BenchConfig
from kvrelay.load.results import Run, write_result
from kvrelay.load.sessions import Work, sessions
from kvrelay.planner.rate_card import write_card
from kvrelay.planner.setting import Setting, Stream
from kvrelay.planner.speeds import H200, Speeds


def test_the_simulator_is_asked_what_the_client_asked() -> None:
    config = BenchConfig(
        lengths="64:8", spread=0.5, rate="5", find_rate=True, duration_s=20, warm_up_s=5, seed=7
    )
    streams = streams_like(config, 5.0, 2)
    asked = list(itertools.islice(sessions(config.work, config.arrival(5.0), "7 2"), len(streams)))
    assert [stream.at for stream in streams] == [pytest.approx(each.at * 1e3) for each in asked]
    assert [(stream.prompt, stream.output) for stream in streams] == [
        (each.turns[0].prompt, each.turns[0].output) for each in asked
    ]
    assert 25_000 < streams[-1].at < 35_000


def test_of_a_file_what_counted_stays_and_the_rest_is_made_up() -> None:
    run = run_at(5.0, 1.0, 1.0)
    streams = streams_about(run, Work(64, 8), 2.0, "seed")
    assert [stream.at for stream in streams] == sorted(stream.at for stream in streams)
    assert sum(stream.at == 100.0 for stream in streams) == len(run.rows)
    assert all(stream.at >= 10_000 for stream in streams if stream.at != 100.0)


def test_a_run_that_is_as_simulated_is_not_off() -> None:
    """A row for each simulated stream."""
    config = BenchConfig(lengths="512:16", rate="5", find_rate=True, duration_s=20, warm_up_s=2)
    setting = Setting(prefill=1, decode=1, prefixes=False, speeds=Speeds(H200))
    streams = streams_like(config, 5.0, 0)
    first = compared(run_at(5.0, 1.0, 1.0), streams, setting, 1.0)
    assert first.furthest > 0.15
    same = Compared(5.0, 9, {name: (seen, seen) for name, (_, seen) in first.rows.items()})
    assert same.furthest == 0.0
    slower = {name: ([ms * 1.1 for ms in seen], seen) for name, (_, seen) in first.rows.items()}
    assert Compared(5.0, 9, slower).furthest == pytest.approx(1 - 1 / 1.1)


def test_failures_of_either_side_are_compared_too() -> None:
    run = run_at(5.0, 0.5, 1.0)
    rows = [
        msgspec.structs.replace(row, failure="lost") if at % 4 == 0 else row
        for at, row in enumerate(run.rows)
    ]
    setting = Setting(
        prefill=1, decode=1, speeds=Speeds(msgspec.structs.replace(H200, kv_tokens=1_000))
    )
    begins = run.warm_up_s * 1e3
    streams = [Stream(begins + at, 64 if at % 2 else 2_000, 4) for at in range(10)]
    found = compared(msgspec.structs.replace(run, rows=rows), streams, setting, 1.0)
    assert (found.answered, found.requests) == ((0.75, 0.5), len(rows))
    assert found.furthest >= 0.25
    assert told("1P1D", [found])[-1].endswith("| answered | 75.0%, 50.0% | | |")


def test_results_of_goodput_are_simulated_with_their_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card, folder = tmp_path / "card.json", tmp_path / "out"
    write_card(H200, card)
    folder.mkdir()
    runs: list[Run] = [run_at(8.0, 1.0, 1.0)]
    write_result(result_of("2P2D", runs), folder / "chat-relay.json")
    write_result(result_of("4 colocated, asked in turn", runs), folder / "chat-direct.json")
    found = of_results([folder], H200)
    assert {name for name, _ in found} == {"chat, 2P2D", "chat, 4 colocated, asked in turn"}
    assert main(["--results", str(folder), "--card", str(card)]) == 1
    said = capsys.readouterr().out
    assert "| chat, 2P2D | 8/s, 100 | TTFT |" in said
    assert "the furthest is off by" in said


def test_what_lies_between_client_and_engine_is_what_the_lowest_rate_lacks(tmp_path: Path) -> None:
    """Files of clients 7 ms away from engines that are as fast as the card."""
    asked = BenchConfig(lengths="512:256", rate="1").work
    setting = Setting("round_robin", 0, 4, prefixes=False, speeds=Speeds(H200))

    def seven_ms_away(run: Run) -> Run:
        rows = [msgspec.structs.replace(row, due_s=at * 0.1) for at, row in enumerate(run.rows)]
        run = msgspec.structs.replace(run, rows=rows)
        after_s = (SLO.ttft_ms + SLO.tpot_ms * asked.output) / 1e3
        streams = streams_about(run, asked, after_s, "chat direct")
        compared(run, streams, setting, 0.0)
        ttfts = {stream.at: stream.ttft + 7 for stream in streams}
        return msgspec.structs.replace(
            run, rows=[msgspec.structs.replace(row, ttft_ms=ttfts[row.due_s * 1e3]) for row in rows]
        )

    runs = [seven_ms_away(run_at(rate, 1.0, 1.0)) for rate in (8.0, 12.0)]
    write_result(result_of("4 colocated, asked in turn", runs), tmp_path / "chat-direct.json")
    for _, found in of_results([tmp_path], H200):
        real, seen = found.rows["TTFT"]
        assert seen == pytest.approx(real)
