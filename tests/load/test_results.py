"""The file of a result, and what makes it doubtful."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from simulated_server import SLOW_AFTER, TARGETS, WORK, run_of

from kvrelay.load.results import Provenance, Result, warnings_of, write_result
from kvrelay.load.search import SearchResult
from kvrelay.wire.errors import ConfigError

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def ours() -> Result:
    made = Provenance("kvrelay bench", "2026-11-22T09:00:00+00:00", "Linux", {"server": "0.1.0"})
    asked = WORK, TARGETS, 0.9
    found = SearchResult(8.0, SLOW_AFTER, 0.9)
    return Result("Llama", "http://h:8000", 2, *asked, made, [run_of(8.0)], found)


def test_a_result_is_written_whole(ours: Result, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "result.json"
    write_result(ours, path)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == ours
    with pytest.raises(ConfigError, match="cannot write"):
        write_result(ours, path / "below a file.json")


def test_what_makes_figures_doubtful_is_told(ours: Result) -> None:
    run = ours.runs[0]
    assert warnings_of(ours) == []
    cached = replace(run, measures=replace(run.measures, cached=0.4))
    few = replace(run, rate=2 * run.rate)
    slow = replace(run.measures.client, bottleneck="it took all of its core")
    slow_run = replace(run, measures=replace(run.measures, client=slow, usage=False))
    warnings = warnings_of(replace(ours, runs=[cached, few, slow_run]))
    assert len(warnings) == 4
    assert "40% of the prompts cached, which share nothing; take another --seed" in warnings[0]
    assert f"{few.rate:g} were wanted, and fewer came" in warnings[1]
    assert "the client was too slow" in warnings[2]
    assert "tokens are counted by chunks" in warnings[3]
    assert warnings_of(replace(ours, runs=[cached], work=replace(ours.work, trace="t"))) == []
