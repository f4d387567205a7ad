"""A search on a server that is arithmetic, and the page that is made of it."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated_server import PREFILL_S, STEP_S, WORK, result_of, run_of

from kvrelay.load.measures import Slo
from kvrelay.load.report import _cumulated, page, warnings_of, write_report
from kvrelay.load.results import Result
from kvrelay.load.sessions import Work
from kvrelay.load.svg import Line, Mark, chart
from kvrelay.wire.errors import ConfigError


@pytest.fixture(scope="module")
def ours() -> Result:
    return result_of("1P1D", places=24, gpus=2, seconds=40)


@pytest.fixture(scope="module")
def theirs() -> Result:
    return result_of("<colocated>", places=20, gpus=2, seconds=40)


def test_the_search_finds_what_the_server_can(ours: Result) -> None:
    """24 places are free again after 0.66 s: 36 requests a second, of which a queue leaves most for
    200 ms.
    """
    most = 24 / (PREFILL_S + STEP_S * (WORK.output - 1))
    assert ours.found is not None
    assert ours.found.breaks is not None
    assert 0.8 * most < ours.found.holds < most
    assert ours.found.breaks / ours.found.holds <= 1.05
    # In runs that are long enough to say how it is.
    assert run_of(ours.found.holds * 0.95, 24, seconds=600).measures.attainment > 0.9
    assert run_of(ours.found.breaks * 1.1, 24, seconds=600).measures.attainment < 0.9


class Reader(html.parser.HTMLParser):
    """Tags that are open, and where anything is loaded from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Counts it."""
        self.count[tag] = self.count.get(tag, 0) + 1
        self.outside += [
            f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "action")
        ]
        if tag not in ("meta", "path", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Of SVG."""
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        """Must be the newest."""
        if tag != "circle":
            assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_a_page_needs_nothing_else_and_follows_the_reader(ours: Result) -> None:
    text = page([ours])
    reader = read(text)
    assert reader.outside == []
    assert "script" not in reader.count
    assert not re.search(r"@import|url\(", text)
    assert "color-scheme: light dark" in text
    assert reader.count["svg"] == 7
    for words in (
        "highest rate per GPU",
        "TTFT over time",
        "Requests that met their targets",
        "kvrelay bench --url",
    ):
        assert words in text


def test_several_results_are_compared(ours: Result, theirs: Result) -> None:
    text = page([ours, theirs])
    reader = read(text)
    assert "1P1D against &lt;colocated&gt;" in text
    assert "<colocated>" not in text
    assert reader.count["svg"] == 5
    assert reader.count["table"] == 3
    assert "not of the same" not in text


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"attainment": 0.95}, "targets"),
        ({"slo": Slo(100.0, 15.0)}, "targets"),
        ({"arrivals": "constant arrivals, open loop", "work": Work(512, 63)}, "work and arrivals"),
        ({"endpoint": "chat"}, "endpoint"),
    ],
)
def test_what_is_not_alike_is_told(
    ours: Result, theirs: Result, other: dict[str, Any], words: str
) -> None:
    one = msgspec.structs.replace(ours, endpoint="completions")
    assert f"not of the same {words}." in page([one, msgspec.structs.replace(theirs, **other)])
    shorter = [msgspec.structs.replace(run, window_s=20.0) for run in theirs.runs]
    assert "counted time (20 to 40 s)" in page(
        [ours, msgspec.structs.replace(theirs, runs=shorter)]
    )


def test_requests_that_failed_are_left_out_of_no_plot(ours: Result) -> None:
    run = ours.runs[0]
    of = msgspec.structs.replace(run.measures, answered=run.measures.requests // 2)
    failing = msgspec.structs.replace(run, measures=of)
    assert _cumulated(failing, "ttft")[-1][1] == pytest.approx(0.5, abs=0.01)
    assert _cumulated(failing, "itl")[-1][1] == 1.0
    assert "keep the load up" not in page([ours])
    behind = msgspec.structs.replace(ours, runs=[msgspec.structs.replace(failing, after_s=4.0)])
    assert "keep the load up" in page([behind])


def test_a_client_that_was_too_slow_is_told_first(ours: Result) -> None:
    run = ours.runs[0]
    slow = msgspec.structs.replace(run.measures.client, bottleneck="it took all of its core")
    runs = [
        msgspec.structs.replace(run, measures=msgspec.structs.replace(run.measures, client=slow))
    ]
    text = page([msgspec.structs.replace(ours, runs=runs)])
    assert text.index("the client was too slow") < text.index("highest rate per GPU")


def test_what_makes_figures_doubtful_is_told_first(ours: Result) -> None:
    run = ours.runs[0]
    assert warnings_of(ours) == []
    cached = msgspec.structs.replace(
        run, measures=msgspec.structs.replace(run.measures, cached=0.4)
    )
    few = msgspec.structs.replace(run, rate=2 * run.rate)
    first, second = warnings_of(msgspec.structs.replace(ours, runs=[cached, few]))
    assert "40% of the prompts cached, which share nothing; take another --seed" in first
    assert f"{few.rate:g} were wanted, and fewer came" in second
    traced = msgspec.structs.replace(
        ours, runs=[cached], work=msgspec.structs.replace(ours.work, trace="t")
    )
    assert warnings_of(traced) == []


def test_a_run_without_any_answer_is_a_page_too(ours: Result) -> None:
    run = ours.runs[0]
    nothing = msgspec.structs.replace(
        run, rows=[], cdfs={"ttft": [], "tpot": [], "itl": [], "e2e": []}
    )
    assert "nothing to show" in page([msgspec.structs.replace(ours, runs=[nothing])])


def test_a_page_that_cannot_be_written_says_so(ours: Result, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_report([ours], tmp_path / "no folder" / "page.html")


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [1e-9, 1e9], [3.0], [0.001, 0.0011]])
def test_every_range_has_axes(values: list[float], log_x: bool) -> None:
    drawn = chart(
        "t",
        "x",
        "y",
        [Line("a", [(each, each) for each in values], dots=True)],
        [Mark("m", y=1.0)],
        log_x=log_x,
    )
    assert "nan" not in drawn
    assert drawn.count("<circle") == len(values)
    assert drawn.count('class="grid"') < 60
