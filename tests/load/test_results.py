"""A search on a server that is arithmetic, its file, its table, and what makes it doubtful."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated_server import result_of, run_of

from kvrelay.load.measures import Slo
from kvrelay.load.results import (
    VERSION,
    Result,
    differences,
    read_result,
    warnings_of,
    write_result,
)
from kvrelay.load.search import SearchResult
from kvrelay.load.workloads import Work
from kvrelay.wire.errors import ConfigError

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def ours() -> Result:
    return result_of("1P1D", places=24, gpus=2, seconds=40.0)


def test_a_result_is_read_as_it_was_written(ours: Result, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "result.json"
    nothing = replace(ours.runs[0], measures=replace(ours.runs[0].measures, attainment=math.nan))
    found = SearchResult(2.0, None, 0.9)
    result = replace(ours, runs=[*ours.runs, nothing], found=found)
    write_result(result, path)
    back = read_result(path)
    assert msgspec.json.encode(back) == msgspec.json.encode(result)
    assert math.isnan(back.runs[-1].measures.attainment)
    assert back.found == result.found
    with pytest.raises(ConfigError, match="cannot write"):
        write_result(result, path / "below a file.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2}', f'{{"version": {VERSION}, "label": 3}}']
)
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"result\.json"):
        read_result(path)


@pytest.mark.parametrize(
    ("other", "unlike"),
    [
        ({"label": "colocated"}, []),
        ({"attainment": 0.95}, ["targets"]),
        ({"slo": Slo(100.0, 15.0)}, ["targets"]),
        ({"arrivals": "constant", "work": Work(512, 63)}, ["work", "arrivals"]),
        ({"endpoint": "chat"}, ["endpoint"]),
        ({"runs": [run_of(4.0, 24, 20.0)]}, ["counted time (20 to 40 s)"]),
    ],
)
def test_results_that_cannot_be_compared_say_why(
    ours: Result, other: dict[str, Any], unlike: list[str]
) -> None:
    one = replace(ours, endpoint="completions")
    assert differences([one, replace(one, **other)]) == unlike


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
