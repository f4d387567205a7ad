"""`python -m benchmarks.goodput` without a server: works, flips, what is kept of probes, tables and plot."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.goodput import measuring
from benchmarks.goodput.__main__ import main
from benchmarks.goodput.drawing import Measured, drawn, held, read_folders, tables
from benchmarks.goodput.measuring import OutOfTime, Place, met_share
from benchmarks.goodput.nodes import Nodes
from benchmarks.goodput.works import WORKS, Arm, Work, flips_to, parse_work
from load.config import BenchConfig
from load.endpoint import Server
from load.measures import Slo, Window, client_of, measured
from load.prompts import Spelling
from load.records import Record
from load.results import Made, Result, Run, cdfs_of, row_of, write_result

SLO = Slo(200.0, 15.0)
TINY = "tiny=64:8:200:15:3:1:10:8:2"


def run_at(rate: float, met: float, smooth: float, slo: Slo = SLO) -> Run:
    """100 requests of which so many met their targets, and so many of all had no long gap."""
    records = []
    for at in range(100):
        first = 0.1 if at < met * 100 else 0.5
        gap = 0.01 if at < smooth * 100 else 0.06
        gaps = [gap, *[0.005] * 6]
        records.append(
            Record(
                at, 0, 0.1, 0.1, 0.1 + first, 0.1 + first + sum(gaps), 64, 0, 8, 8, 8, True, gaps_s=gaps, counts=[1] * 8
            )
        )
    window = Window(0.0, 10.0)
    client = client_of(records, [0.1], [0.0], open_loop=True)
    rows = [row_of(record, slo) for record in records]
    return Run(rate, 0, 0.0, 10.0, measured(records, window, slo, 4, client), cdfs_of(records), rows)


def result_of(label: str, runs: list[Run]) -> Result:
    made = Made("", "2026-11-22T09:00:00+00:00", "Linux", {})
    work = BenchConfig(lengths="512:256", rate="1").work
    return Result(label, "m", "http://a", 4, "", "512:256", "poisson", work, SLO, 0.9, made, runs)


@given(prefill=st.integers(0, 6), decode=st.integers(1, 6), wanted=st.integers(0, 11))
def test_as_few_nodes_flip_as_can_be(prefill: int, decode: int, wanted: int) -> None:
    wanted = min(wanted, prefill + decode - 1)
    roles = {f"http://p{at}": "prefill" for at in range(prefill)} | {f"http://d{at}": "decode" for at in range(decode)}
    flips = flips_to(roles, wanted)
    after = roles | dict(flips)
    assert list(after.values()).count("prefill") == wanted
    assert len(flips) == abs(wanted - prefill) == len(dict(flips))
    assert all(roles[url] != role for url, role in flips)


def test_works_are_named_or_given() -> None:
    assert parse_work("code") is WORKS["code"]
    work = parse_work(TINY)
    assert (work.name, work.prefill, work.decode, work.relay_rate, work.window_s) == ("tiny", 3, 1, 10.0, 2.0)
    assert work.arm_name(Arm.RELAY) == "3P1D"
    assert work.answer_s == pytest.approx(0.32)
    for wrong in ("chats", "a=1:2", "a=64:8:200:15:0:1:10:8:2", "a=64:8:200:15:3:1:10:x:2"):
        with pytest.raises(ValueError, match=r"."):
            parse_work(wrong)


def test_what_holds_is_below_what_does_not() -> None:
    runs = [run_at(4, 1.0, 1.0), run_at(8, 0.95, 0.5), run_at(10, 0.7, 0.0), run_at(12, 0.92, 0.0)]
    assert (held(runs).rate, held(runs).breaks) == (8, 10)
    assert (held(runs, smooth=True).rate, held(runs, smooth=True).breaks) == (4, 8)
    assert held([*runs, run_at(8, 0.7, 0.7)]).rate == 4  # the mean of two
    assert held(runs[2:3]).rate == 0
    assert met_share(runs[1], smooth=True) == 0.5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, label, runs in (
        ("chat-relay", "2P2D", [run_at(160, 0.95, 0.94), run_at(184, 0.6, 0.6)]),
        ("chat-direct", "4 colocated, asked in turn", [run_at(120, 0.91, 0.02), run_at(136, 0.8, 0.0)]),
        ("summarise-relay", "3P1D", [run_at(10, 0.95, 0.93)]),
    ):
        write_result(result_of(label, runs), tmp_path / f"{name}.json")
    return tmp_path


def test_tables_have_rates_per_gpu_and_plots_are_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = folder / "plot.svg"
    assert main(["--draw", str(folder), "--svg", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "above 26 | 30 (4 colocated, asked in turn) | 40 (2P2D) | +33% | 40, 30 |" in said
    assert "below 30: 2% (4 colocated, asked in turn)" in said
    assert "at least 2.5 (3P1D)" in said
    assert "not measured" in said
    ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    assert plot.read_text().count("<svg") == 1 + 3  # chat, summarise, summarise without gaps


def test_results_of_several_folders_are_one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_result(result_of("2P2D", [run_at(170, 0.92, 0.9)]), other / "chat-relay.json")
    found = {(each.work, each.arm): each for each in read_folders([folder, other])}
    assert len(found) == 3
    assert held(found["chat", "relay"].result.runs).rate == 170
    assert "170" not in tables([Measured("chat", "direct", found["chat", "direct"].result)])
    assert drawn(list(found.values()))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Rates that were probed, of servers that keep 10 requests a second, 7 of them without gaps."""
    put: list[float] = []

    class Double:
        def __init__(self, config: BenchConfig) -> None:
            self.runs: list[Run] = []
            self.server, self.found = Server("m", "", Spelling()), None

        async def meet(self) -> None:
            """Is there."""

        async def probe(self, rate: float) -> Run:
            put.append(rate)
            self.runs.append(run_at(rate, 1.0 if rate <= 10 else 0.5, 1.0 if rate <= 7 else 0.2))
            return self.runs[-1]

    monkeypatch.setattr(measuring, "Experiment", Double)
    monkeypatch.setattr(measuring, "router_cpu_s", lambda router: 0.0)
    return put


def place(out: Path, until: float = 1e18) -> Place:
    work: Work = parse_work(TINY)
    return Place(work, Arm.RELAY, Nodes("http://r:1", ["http://n:1"], "k", 1.0), out, until, 32_000)


async def test_a_search_is_written_probe_by_probe_and_goes_on(tmp_path: Path, probes: list[float]) -> None:
    first = place(tmp_path)
    found = await first.search()
    assert 9.5 < found <= 10
    assert len(probes) <= 4
    smooth = await first.search(smooth=True)
    assert 6.5 < smooth <= 7 or len(probes) == 7
    told = len(probes)
    again = place(tmp_path)
    assert await again.search() == found
    assert len(probes) == told  # all of that is known
    await again.around(found, (0.6, 1.0, 1.25))
    assert probes[told:] in ([], [12.5], [6.0], [6.0, 12.5])
    (measured,) = read_folders([tmp_path])
    assert len(measured.result.runs) == len(probes)
    assert measured.result.label == "3P1D"


async def test_no_probe_begins_that_could_not_end(tmp_path: Path, probes: list[float]) -> None:
    with pytest.raises(OutOfTime, match="tiny by 3P1D at 10"):
        await place(tmp_path, until=0.0).search()
    assert probes == []
