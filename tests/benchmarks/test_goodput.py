"""`python -m benchmarks.goodput` without a server: works, flips, what is kept of probes, tables and
plot.
"""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.goodput import measuring, nodes
from benchmarks.goodput.__main__ import _arguments, _Course, main
from benchmarks.goodput.drawing import Measured, drawn, read_folders, tables
from benchmarks.goodput.measuring import OutOfTime, Place, held, judged, met_share
from benchmarks.goodput.nodes import Nodes, gpus_taken
from benchmarks.goodput.works import WORKS, Arm, flips_to, parse_work
from benchmarks.local_cluster import free_ports
from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import Server
from kvrelay.load.measures import Slo, Window, client_of, measured
from kvrelay.load.records import Record
from kvrelay.load.results import Made, Result, Run, cdfs_of, read_result, row_of, write_result
from kvrelay.load.sessions import Spelling
from kvrelay.wire.errors import ConfigError

SLO = Slo(200.0, 15.0)
TINY = "tiny=64:8:200:15:3:1:10:8:2"


def run_at(
    rate: float, met: float, smooth: float, slo: Slo = SLO, *, slow_client: bool = False
) -> Run:
    """100 requests of which so many met their targets, and so many of all had no long gap."""
    records = []
    for at in range(100):
        first = 0.1 if at < met * 100 else 0.5
        gap = 0.01 if at < smooth * 100 else 0.06
        gaps = [gap, *[0.005] * 6]
        records.append(
            Record(
                at,
                0,
                0.1,
                0.1,
                0.1 + first,
                0.1 + first + sum(gaps),
                64,
                0,
                8,
                8,
                8,
                True,
                gaps_s=gaps,
                counts=[1] * 8,
            )
        )
    window = Window(0.0, 10.0)
    client = client_of(records, [0.99 if slow_client else 0.1], [0.0], open_loop=True)
    rows = [row_of(record, slo) for record in records]
    return Run(
        rate, 0, 0.0, 10.0, measured(records, window, slo, 4, client), cdfs_of(records), rows
    )


def result_of(label: str, runs: list[Run], command: str = "kvrelay") -> Result:
    made = Made(command, "2026-11-22T09:00:00+00:00", "Linux", {})
    work = BenchConfig(lengths="512:256", rate="1").work
    return Result(label, "m", "http://a", 4, "", "512:256", "poisson", work, SLO, 0.9, made, runs)


@given(prefill=st.integers(0, 6), decode=st.integers(1, 6), wanted=st.integers(0, 11))
def test_as_few_nodes_flip_as_can_be(prefill: int, decode: int, wanted: int) -> None:
    wanted = min(wanted, prefill + decode - 1)
    roles = {f"http://p{at}": "prefill" for at in range(prefill)} | {
        f"http://d{at}": "decode" for at in range(decode)
    }
    flips = flips_to(roles, wanted)
    after = roles | dict(flips)
    assert list(after.values()).count("prefill") == wanted
    assert len(flips) == abs(wanted - prefill) == len(dict(flips))
    assert all(roles[url] != role for url, role in flips)


def test_works_are_named_or_given() -> None:
    assert parse_work("code") is WORKS["code"]
    work = parse_work(TINY)
    assert (work.name, work.prefill, work.decode, work.relay_rate, work.window_s) == (
        "tiny",
        3,
        1,
        10.0,
        2.0,
    )
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


def test_a_rate_is_told_as_far_as_it_is_known() -> None:
    runs = [run_at(82, 1.0, 0.5), run_at(120, 0.7, 0.0)]
    assert str(held(runs)) == "82 to 120"
    assert str(held([*runs, run_at(86, 0.5, 0.0)])) == "82"
    assert str(held(runs[:1])) == "at least 82"
    assert str(held(runs, smooth=True, gpus=4)) == "below 20.5"


def test_who_missed_because_the_client_was_slow_is_no_judge() -> None:
    runs = [
        run_at(8, 1.0, 0.5, slow_client=True),
        run_at(10, 0.7, 0.7, slow_client=True),
        run_at(12, 0.6, 0.6),
    ]
    assert [run.rate for run in judged(runs, smooth=False)] == [8, 12]
    assert [run.rate for run in judged(runs, smooth=True)] == [12]
    assert str(held(runs)) == "8 to 12"


def test_gpus_are_those_that_nodes_compute_on() -> None:
    assert gpus_taken([1, 1, 1, 1], ["0", "1", "2", "3", "4"]) == 4
    assert gpus_taken([1, 1, 1, 1], ["0", "1"]) == 2
    assert gpus_taken([2, 2], ["4", "5", "6", "7"]) == 4
    assert gpus_taken([2, 1], []) == 3


def test_works_of_one_run_want_equal_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(_arguments([]).work) == len(WORKS)
    for words in (["a=64:8:200:15:1:1:10:8:2", "chat"], ["chat", "chat"]):
        with pytest.raises(SystemExit):
            _arguments([f"--work={word}" for word in words])
    assert "different numbers of nodes" in capsys.readouterr().err


async def test_a_node_that_is_down_is_no_smaller_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nodes_of(session: object, router: str) -> list[dict[str, Any]]:
        up = {"http://n:1": True, "http://n:2": False}
        return [
            {"url": url, "role": "prefill", "up": is_up, "flips_to": None}
            for url, is_up in up.items()
        ]

    monkeypatch.setattr(nodes, "nodes_of", nodes_of)
    monkeypatch.setattr(nodes, "_FLIP_S", 0.0)
    with pytest.raises(RuntimeError, match="these are up"):
        await Nodes("http://r:1", ["http://n:1", "http://n:2"], "k", 1.0, 2).have(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, label, runs in (
        ("chat-relay", "2P2D", [run_at(160, 0.95, 0.94), run_at(164, 0.6, 0.6)]),
        (
            "chat-direct",
            "4 colocated, asked in turn",
            [run_at(120, 0.91, 0.02), run_at(124, 0.8, 0.0)],
        ),
        ("chat-routed", "4 colocated, behind the router", [run_at(124, 0.6, 0.0)]),
        ("code-relay", "3P1D", [run_at(48, 0.95, 0.94), run_at(64, 0.6, 0.6)]),
        (
            "code-direct",
            "4 colocated, asked in turn",
            [run_at(40, 0.95, 0.94), run_at(41, 0.6, 0.6)],
        ),
        ("code-routed", "4 colocated, behind the router", [run_at(41, 0.95, 0.94)]),
        ("summarise-relay", "3P1D", [run_at(10, 0.95, 0.93)]),
    ):
        write_result(result_of(label, runs), tmp_path / f"{name}.json")
    return tmp_path


def test_tables_have_rates_per_gpu_and_plots_are_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = folder / "plot.svg"
    assert main(["--draw", str(folder), "--svg", str(plot)]) == 0
    said = capsys.readouterr().out
    turn, router = "4 colocated, asked in turn", "4 colocated, behind the router"
    assert f"above 26 | 30 ({turn}); below 31: 60% ({router}) | 40 (2P2D) | +33% | 40, 30 |" in said
    assert f"below 30: 2% ({turn})" in said
    assert (
        f"| at least 10.2 ({router}); 10 ({turn}) | 12 to 16 (3P1D) |  |" in said
    )  # neither is known: no "more"
    assert "at least 2.5 (3P1D)" in said
    assert "not measured" in said
    ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    assert plot.read_text().count("<svg") == 1 + 4  # chat, code, summarise, summarise without gaps


def test_results_of_several_folders_are_one(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    write_result(result_of("2P2D", [run_at(170, 0.92, 0.9)]), other / "chat-relay.json")
    found = {(each.work, each.arm): each for each in read_folders([folder, other])}
    assert len(found) == 7
    assert held(found["chat", "relay"].result.runs).rate == 160
    assert len(found["chat", "relay"].result.runs) == 3
    assert "170" not in tables([Measured("chat", "direct", found["chat", "direct"].result)])
    assert drawn(list(found.values()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slo", Slo(250.0, 15.0)),
        ("gpus", 8),
        ("model", "n"),
        ("made", Made("b --flag=-x", "", "", {})),
    ],
)
def test_results_of_something_else_are_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str, value: object
) -> None:
    other = tmp_path_factory.mktemp("other")
    result = msgspec.structs.replace(result_of("2P2D", [run_at(170, 0.92, 0.9)]), **{name: value})
    write_result(result, other / "chat-relay.json")
    with pytest.raises(ConfigError, match=f"{'flags' if name == 'made' else name} "):
        read_folders([folder, other])
    assert main(["--draw", str(folder), str(other)]) == 2


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Arms and rates that were probed, of servers that keep 10 requests a second, 7 of them without
    gaps; asked in turn they keep 8 and 1.
    """
    put: list[tuple[str, float]] = []

    class Double:
        def __init__(self, config: BenchConfig) -> None:
            arms = {"3P1D": "relay", "4 colocated, behind the router": "routed"}
            self.arm = arms.get(config.label, "direct")
            self.practice = config.warm_up_s == 0
            self.runs: list[Run] = []
            self.server, self.found = Server("m", "", Spelling()), None

        async def meet(self) -> None:
            """Is there."""

        async def probe(self, rate: float) -> Run:
            most, smooth = (8, 1) if self.arm == "direct" else (10, 7)
            self.runs.append(
                run_at(rate, 1.0 if rate <= most else 0.5, 1.0 if rate <= smooth else 0.0)
            )
            if not self.practice:
                put.append((self.arm, rate))
            return self.runs[-1]

    async def have(self: Nodes, prefill: int) -> bool:
        return False

    monkeypatch.setattr(measuring, "Experiment", Double)
    monkeypatch.setattr(measuring, "router_cpu_s", lambda router: 0.0)
    monkeypatch.setattr(Nodes, "have", have)
    return put


NODES = Nodes("http://r:1", ["http://n:1"], "k", 1.0, 4)


def course(out: Path, *words: str, until: float = 1e18) -> _Course:
    asked = _arguments(["--out", str(out), "--work", TINY, *words])
    asked.work = [dataclasses.replace(work, smooth=True) for work in asked.work]
    return _Course(asked, NODES, until)


def place(out: Path) -> Place:
    return Place(parse_work(TINY), Arm.RELAY, NODES, out, 1e18, 32_000)


async def test_arms_are_searched_by_a_probe_of_each_in_turn(
    tmp_path: Path, probes: list[tuple[str, float]]
) -> None:
    of = course(tmp_path)
    await of.run()
    assert [arm for arm, _ in probes[:6]] == ["direct", "relay"] * 3
    told = {line.partition(": ")[0]: line.partition(": ")[2] for line in of.told()}
    assert float(told["== tiny, 3P1D"].split()[0]) == pytest.approx(10, rel=0.05)
    assert float(told["== tiny, 4 colocated, asked in turn"].split()[0]) == pytest.approx(
        8, rel=0.05
    )
    assert float(told["== tiny, 3P1D"].split()[-1]) == pytest.approx(7, rel=0.05)
    assert (
        "without gaps: 1 to 1.19" in told["== tiny, 4 colocated, asked in turn"]
    )  # in five probes more
    # Behind the router more is held than in turn, which the first probe shows.
    routed = [rate for arm, rate in probes if arm == "routed"]
    assert 8 < routed[0] < 8.5
    assert max(routed) > 10
    first = len(probes)
    await course(tmp_path).run()
    assert len(probes) - first <= 5  # all of that is known, but for what five probes did not tell
    found = {each.arm: each.result for each in read_folders([tmp_path])}
    assert sum(len(result.runs) for result in found.values()) == len(probes)
    assert found["relay"].label == "3P1D"
    assert found["direct"].gpus == 4


@pytest.mark.parametrize("most", range(1, 12))
async def test_when_time_runs_out_no_arm_was_asked_much_less(
    tmp_path: Path, probes: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    def in_time(place: Place, rate: float) -> None:
        if len(probes) >= most:
            raise OutOfTime

    monkeypatch.setattr(Place, "in_time", in_time)
    with pytest.raises(OutOfTime):
        await course(tmp_path, "--arms=relay,direct").run()
    counts = Counter(arm for arm, _ in probes)
    assert sum(counts.values()) == most
    assert abs(counts["direct"] - counts["relay"]) <= 1


async def test_a_router_that_is_no_better_than_turns_takes_one_probe(
    tmp_path: Path, probes: list[tuple[str, float]]
) -> None:
    await course(tmp_path, "--arms=direct,relay").run()
    direct = tmp_path / "tiny-direct.json"
    kept = read_result(direct)
    write_result(
        msgspec.structs.replace(kept, runs=[run_at(10, 1.0, 1.0), run_at(10.3, 0.5, 0.5)]), direct
    )
    probes.clear()
    await course(tmp_path, "--arms=routed").run()
    assert probes == [("routed", 10.3)]


async def test_what_is_there_is_gone_on_with_if_it_is_of_the_same(
    tmp_path: Path, probes: list[tuple[str, float]]
) -> None:
    await course(tmp_path, "--rates=5,6").run()
    assert [rate for arm, rate in probes if arm == "relay"] == [5, 6]
    relay = place(tmp_path)
    assert relay.beside((0.6, 1.0, 1.25)) == [3.6, 7.5]  # of 6, which was probed
    assert relay.wanted(smooth=False) == 6.9
    path = tmp_path / "tiny-relay.json"
    write_result(msgspec.structs.replace(read_result(path), model="another"), path)
    with pytest.raises(ConfigError, match="model is another in one"):
        await course(tmp_path).run()


async def test_no_probe_begins_that_could_not_end(
    tmp_path: Path, probes: list[tuple[str, float]]
) -> None:
    with pytest.raises(OutOfTime, match="tiny by 4 colocated, asked in turn at 8"):
        await course(tmp_path, until=0.0).run()
    assert probes == []


def test_free_ports_are_none_of_outgoing_connections() -> None:
    ports = free_ports(21)
    assert len(set(ports)) == 21
    assert all(1_024 < port < 32_768 for port in ports)  # Linux's begin there
    assert all(port + 1 in ports for port in ports[:20:2])
