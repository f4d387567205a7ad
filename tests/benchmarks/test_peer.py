"""`python -m benchmarks.peer` without a GPU and without vLLM: loads, command lines, counts, order,
resuming, tables.
"""

from __future__ import annotations

import itertools
import json
import shlex
import stat
import sys
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from benchmarks.peer.__main__ import _arguments, main
from benchmarks.peer.arms import ARMS, Kind, Setting, router_command, server_command
from benchmarks.peer.cells import (
    Cell,
    Row,
    batches,
    close_rows,
    needed_s,
    read_cells,
    stage_of,
    write_cell,
)
from benchmarks.peer.client import Figures, client_command, dealt, figures_of, seen_by
from benchmarks.peer.model import write_model
from benchmarks.peer.servers import Stage
from benchmarks.peer.table import lines_of, tables
from benchmarks.peer.works import WORKS, Load, Request, Targets, closed, work_named
from kvrelay.router.serve import slo_of_headers
from kvrelay.wire.errors import ConfigError
from scripts.reference.command_line import commands, general_flags

FLAGS = {each.name: {flag for one in each.parameters for flag in one.flags} for each in commands()}
SETTING = Setting(Path("/m"))
LONGEST = 16_384


def figures(
    in_time: float | None, tokens_per_s: float = 1000.0, late_ms: float | None = None
) -> Figures:
    return Figures(400, 0, in_time, 512.0, 10.0, tokens_per_s, 20.0, 200.5, 5.0, 30.0, late_ms)


def cell(
    arm: str, in_time: float | None, factor: float = 1.0, seed: int = 1, run: str = "a"
) -> Cell:
    return Cell(Row("chat", factor, seed), arm, run, figures(in_time))


# --- what is asked
# ---------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_requests_at_the_asked_rate() -> None:
    load = WORKS["chat"].load(0.5, 1, 40.0, None, LONGEST)
    assert load == WORKS["chat"].load(0.5, 1, 40.0, None, LONGEST)
    assert load != WORKS["chat"].load(0.5, 2, 40.0, None, LONGEST)
    assert len(load.requests) == 1420
    assert {(each.prompt, each.output) for each in load.requests} == {(512, 256)}
    assert len(load.requests) / load.window_s == pytest.approx(35.5, rel=0.1)
    assert len(WORKS["code"].load(0.5, 1, 1.0, None, LONGEST).requests) == 400
    assert len(WORKS["summarise"].load(0.5, 1, 40.0, None, LONGEST).requests) == 150


def test_mixtures_have_their_shares_and_bursts_come_in_bursts() -> None:
    for name, variation in (("mix-20-1-0", 1.0), ("burst-20-1-0", 1.75)):
        load = work_named(name).load(1.0, 1, 40.0, None, LONGEST)
        assert len(load.requests) == pytest.approx(40 * 42, rel=0.15)
        assert all(each.prompt + each.output <= LONGEST for each in load.requests)
        assert fmean(each.prompt for each in load.requests) == pytest.approx(
            (20 * 512 + 8192) / 21, rel=0.15
        )
        gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(load.requests)]
        assert min(gaps) >= 0
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.15)
        assert load.targets is not None
        assert load.targets.headers == []


def test_a_trace_keeps_its_prefixes_and_is_pressed_to_the_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * at,
            "input_length": 700 if at % 2 else 20_000,
            "output_length": 9,
            "hash_ids": [7, 100 + at],
        }
        for at in range(100)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = work_named("trace", {"trace": 4.0}).load(1.0, 3, 5.0, 10, LONGEST, path)
    assert len(load.requests) == 20
    assert load.window_s == pytest.approx(5.0)
    assert {(each.prompt, each.output, each.blocks[0]) for each in load.requests} == {(700, 9, 7)}
    assert len({each.blocks[1] for each in load.requests}) == 20
    with pytest.raises(ConfigError, match="has 50 requests"):
        WORKS["trace"].load(1.0, 1, 40.0, None, LONGEST, path)
    with pytest.raises(ConfigError, match="needs --trace"):
        WORKS["trace"].load(1.0, 1, 40.0, None, LONGEST)


def test_wrong_names_are_refused() -> None:
    for name in ("chats", "mix-0-0-0", "mix-1-2", "burst"):
        with pytest.raises(ConfigError):
            work_named(name)
    for row in ("1024:128", "1024:128:0", "a:1:1"):
        with pytest.raises(ConfigError):
            closed(row)


def test_requests_are_dealt_in_turn_and_clients_with_them() -> None:
    load = Load(tuple(Request(float(at), 8, 2) for at in range(5)))
    assert [([each.at_s for each in share], clients) for share, clients in dealt(load, 2)] == [
        ([0.0, 2.0, 4.0], 0),
        ([1.0, 3.0], 0),
    ]
    assert [clients for _, clients in dealt(closed("8:2:33"), 2)] == [17, 16]
    assert [len(share) for share, _ in dealt(closed("8:2:1"), 4)] == [12]


def test_a_token_is_a_word_and_the_last_ones_are_special(tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({"vocab_size": 500}))
    write_model(shape, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    ids = [0, 496, 17, 16, 255, 256, 0]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert tokenizer.id_to_token(config["eos_token_id"]) == "</s>"
    assert tokenizer.get_vocab_size() == 500


# --- command lines
# ---------------------------------------------------------------------------------------------------


def unknown(argv: list[str]) -> set[str]:
    """Find flags of a command line of ours that the command does not have."""
    at = argv.index("kvrelay.cli") + 1
    return {word.split("=")[0] for word in argv[at + 1 :]} - FLAGS[argv[at]] - general_flags()


@pytest.mark.parametrize("kind", [Kind.SERVE, Kind.PREFILL, Kind.DECODE])
@pytest.mark.parametrize("caching", [True, False])
def test_nodes_are_started_with_flags_that_they_have(kind: Kind, caching: bool) -> None:
    assert not unknown(server_command(kind, 1, SETTING, caching=caching))


ROUTED = [arm for arm in ARMS.values() if arm.router is not None]


@pytest.mark.parametrize("name", [arm.name for arm in ROUTED])
def test_routers_are_started_with_flags_that_they_have(name: str) -> None:
    argv = router_command(ARMS[name], ["http://a:1", "http://b:2"], 3)
    assert argv[-3 - len(ARMS[name].router or ()) :][:2] == [
        "--prefill=http://a:1",
        "--decode=http://b:2",
    ]
    assert not unknown(argv)


def test_vllm_is_served_and_asked_by_the_command_of_its_environment() -> None:
    setting = Setting(Path("/m"), "/v/bin/vllm", vllm_flags=("--x",))
    argv = server_command(Kind.VLLM_KV, 5, setting, caching=False)
    assert argv[:3] == ["/v/bin/vllm", "serve", "/m"]
    assert {"--x", "--port=5", "--no-enable-prefix-caching"} < set(argv)
    assert any("NixlConnector" in word for word in argv)
    opened = client_command(
        setting, "http://a:1", Path("/t/a.jsonl"), 7, Path("/t/a.json"), 0, ["x-slo-ttft-ms=200"]
    )
    assert opened[:3] == ["/v/bin/vllm", "bench", "serve"]
    assert {"--self-timed", "--num-prompts=7", "--save-detailed", "--base-url=http://a:1"} < set(
        opened
    )
    assert opened[-2:] == ["--header", "x-slo-ttft-ms=200"]
    assert "--max-concurrency=3" in client_command(
        setting, "http://a:1", Path("/a"), 7, Path("/b"), 3, []
    )


def test_targets_are_told_as_our_router_reads_them() -> None:
    told = dict(word.split("=") for word in Targets(200.0, 15.0).headers)
    assert slo_of_headers(told.get) == (0.2, 0.015)


# --- what the client saw
# ---------------------------------------------------------------------------------------------


def result(**changes: list[Any]) -> dict[str, Any]:
    """Make up four requests with targets of 200 and 15 ms: in time, late to begin, slow, and
    refused.
    """
    told = {
        "start_times": [100.0, 101.0, 102.0, 103.05],
        "input_lens": [8, 8, 8, 8],
        "output_lens": [3, 3, 3, 0],
        "ttfts": [0.1, 0.3, 0.1, 0.0],
        "itls": [[0.01, 0.01], [0.01, 0.01], [0.01, 0.03], []],
        "errors": ["", "", "", "Too Many Requests"],
    }
    return told | changes


ASKED = tuple(Request(float(at), 8, 3) for at in range(4))


def test_in_time_are_those_that_meet_both_targets_of_all() -> None:
    found = figures_of(seen_by(result(), ASKED), Load(ASKED, Targets(200.0, 15.0)))
    assert (found.requests, found.failed, found.in_time, found.prompt_tokens) == (4, 1, 0.25, 8.0)
    assert found.ttft_p50_ms == pytest.approx(100)
    assert found.ttft_p99_ms == pytest.approx(300)
    assert found.tpot_p50_ms == pytest.approx(10)
    assert found.itl_p99_ms == pytest.approx(30)
    assert found.late_p99_ms == pytest.approx(50)
    assert found.tokens_per_s == pytest.approx(9 / 3.05)
    more = figures_of(
        seen_by(result(), ASKED), Load(ASKED, Targets(200.0, 15.0, ttft_ms_per_token=20.0))
    )
    assert more.in_time == 0.5


def test_an_answer_that_breaks_off_has_failed() -> None:
    found = figures_of(
        seen_by(result(output_lens=[2, 3, 3, 0]), ASKED), Load(ASKED, Targets(200.0, 15.0))
    )
    assert (found.failed, found.in_time) == (2, 0.0)


def test_without_answers_and_without_further_tokens_there_is_no_time() -> None:
    none = figures_of(
        seen_by(result(output_lens=[0] * 4), ASKED), Load(ASKED, Targets(200.0, 15.0))
    )
    assert (none.failed, none.in_time, none.ttft_p50_ms, none.itl_p99_ms) == (4, 0.0, None, None)
    short = tuple(Request(0.0, 8, 1) for _ in range(4))
    one = figures_of(
        seen_by(result(output_lens=[1] * 4, itls=[[0.0]] * 4), short), Load(short, None, 2)
    )
    assert (one.in_time, one.tpot_p50_ms, one.itl_p99_ms, one.late_p99_ms) == (
        None,
        None,
        None,
        None,
    )


# --- order and resuming
# ----------------------------------------------------------------------------------------------


def test_arms_whose_servers_are_up_come_first() -> None:
    row = Row("chat", 1.0)
    arms = [ARMS[name] for name in ("colocated", "strict", "cluster", "told")]
    first = batches(row, arms, None, at_once=False)
    assert [batch.arms[0].name for batch in first] == ["colocated", "strict", "cluster", "told"]
    then = batches(row, arms, first[-1].stage, at_once=False)
    assert [batch.arms[0].name for batch in then] == ["strict", "cluster", "told", "colocated"]
    assert needed_s(first, None, 40.0) - needed_s(then, first[-1].stage, 40.0) == pytest.approx(
        50.0
    )
    mixed = batches(row, [arms[1], arms[0], arms[2]], None, at_once=False)
    assert [batch.arms[0].name for batch in mixed] == ["strict", "cluster", "colocated"]


def test_side_by_side_all_servers_are_one_stage() -> None:
    (batch,) = batches(Row("8:2:1"), [ARMS["vllm"], ARMS["node"]], None, at_once=True)
    assert batch.stage == Stage((Kind.VLLM, Kind.SERVE), False)
    assert batches(Row("8:2:1"), [], None, at_once=True) == []
    assert stage_of(Row("trace", 1.0), [ARMS["node"]]).caching


def test_rows_that_are_close_are_measured_with_further_seeds() -> None:
    rows = [Row("chat", factor) for factor in (0.5, 1.0, 1.2)]
    cells = [
        *(
            cell(arm, share, 0.5)
            for arm, share in (("colocated", 1.0), ("strict", 0.9), ("told", 0.97))
        ),
        *(
            cell(arm, share, 1.0)
            for arm, share in (("colocated", 0.6), ("strict", 0.9), ("told", 0.99))
        ),
        *(cell(arm, share, 1.2) for arm, share in (("colocated", 0.5), ("told", 0.5))),
    ]
    done = {(each.row, each.arm): each for each in cells}
    assert close_rows(rows, done, 4.0) == [Row("chat", 0.5, 2), Row("chat", 0.5, 3)]


def test_cells_are_read_as_they_were_written(tmp_path: Path) -> None:
    cells = [
        cell("told", 0.5),
        cell("told", 0.5, seed=2),
        cell("told", 0.5, 0.8),
        cell("strict", 0.5),
    ]
    cells.append(Cell(Row("1024:128:1"), "node", "a", figures(None)))
    cells.append(Cell(Row("chat", 1.0, after="code"), "told", "a", figures(0.1)))
    for each in cells:
        write_cell(each, tmp_path)
    assert list(read_cells([tmp_path]).values()) == sorted(
        cells, key=lambda each: f"{each.row.name}_{each.arm}"
    )
    (tmp_path / "a_b.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"a_b\.json is no cell"):
        read_cells([tmp_path])


# --- tables
# ----------------------------------------------------------------------------------------------------------


def test_tables_have_means_over_seeds_and_what_is_best() -> None:
    cells = [
        *(
            cell(arm, share)
            for arm, share in (
                ("colocated", 0.5),
                ("strict", 0.9),
                ("cluster", 0.85),
                ("told", 0.93),
            )
        ),
        *(
            cell(arm, share, seed=2)
            for arm, share in (("colocated", 0.96), ("strict", 0.9), ("told", 0.93))
        ),
        *(
            cell(arm, share, 1.2, run=arm)
            for arm, share in (("colocated", 0.5), ("strict", 0.4), ("told", 0.4))
        ),
    ]
    said = tables(lines_of(cells))
    assert (
        "| requests in time, % | x | colocated | strict | cluster | told | told - best | cluster "
        "- best | seeds |" in said
    )
    assert "| chat | 1 | 73.0 | 90.0 | 85.0 | 93.0 | +0.0 | -5.0 | 2 |" in said
    assert "| chat * | 1.2 | 50.0 | 40.0 |  | 40.0 | -10.0 |  | 1 |" in said
    assert (
        "told against the better of colocated and strict: -5.0 points on average over 2 cells, "
        "-10.0 at worst" in said
    )


def test_tables_of_speeds_and_of_clients_that_were_late() -> None:
    cells = [
        Cell(Row("8:2:4"), "vllm", "a", figures(None, 2345.6)),
        Cell(
            Row("8:2:4"),
            "node",
            "a",
            msgspec.structs.replace(figures(None, 9.87), failed=3, tpot_p50_ms=None),
        ),
        Cell(Row("chat", 1.0), "told", "a", figures(0.5, late_ms=77.0)),
    ]
    said = tables(lines_of(cells))
    assert "| 8:2:4 | 2,346; 20.0, 200; 5.0; 30.0 | 9.87; 20.0, 200; -; 30.0; 3 failed |" in said
    assert "The client sent late: chat_x1_s1 by told, 77 ms." in said
    assert "against" not in said
    assert "several runs" not in said


# --- the whole of it
# -------------------------------------------------------------------------------------------------

VLLM = """
import http.server, json, os, pathlib, signal, sys
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
folder = pathlib.Path(os.environ["OF_TEST"])
if sys.argv[1] == "serve":
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()
        def log_message(self, *_): pass
    (folder / ("server-" + flags["port"])).touch()
    http.server.HTTPServer(("127.0.0.1", int(flags["port"])), Handler).serve_forever()
if "broken" in os.environ:
    sys.exit("no such client")
asked = [json.loads(line) for line in open(flags["dataset-path"])]
assert all(len(each["hash_ids"]) * 512 >= each["input_length"] for each in asked)
with open(folder / "calls", "a") as calls:
    calls.write(json.dumps([flags["base-url"], len(asked), os.environ["PYTHONHASHSEED"]]) + "\\n")
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
print("Starting main benchmark run...", flush=True)
signal.sigwait({signal.SIGCONT})  # the others have come so far, too
print(len(open(folder / "calls").readlines()))
result = {
    "start_times": [5.0 + each["timestamp"] for each in asked],
    "input_lens": [each["input_length"] for each in asked],
    "output_lens": [each["output_length"] for each in asked],
    "ttfts": [0.15] * len(asked),
    "itls": [[0.01] * (each["output_length"] - 1) for each in asked],
}
(pathlib.Path(flags["result-dir"]) / flags["result-filename"]).write_text(json.dumps(result))
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Begin a command that has a double of vLLM."""
    vllm, shape = tmp_path / "vllm", tmp_path / "shape.json"
    vllm.write_text(f"#!{sys.executable}\n{VLLM}")
    vllm.chmod(vllm.stat().st_mode | stat.S_IXUSR)
    shape.write_text(json.dumps({"vocab_size": 500}))
    monkeypatch.setenv("OF_TEST", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest's own stay
    return [f"--out={tmp_path / 'out'}", f"--vllm={vllm}", f"--model={shape}", "--gpus="]


def calls(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def test_what_is_there_is_not_measured_again(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "goodput",
        *words,
        "--work=chat",
        "--limit=chat=4",
        "--seconds=2",
        "--requests=9",
        "--processes=2",
    ]
    assert main([*words, "--arms=vllm-colocated", "--factors=1"]) == 0
    assert "| chat | 1 | 100.0 | 1 |" in capsys.readouterr().out
    first = calls(tmp_path)
    assert [many for _, many, _ in first] == [5, 4] or [many for _, many, _ in first] == [4, 5]
    assert len({url for url, *_ in first}) == 2  # each server is asked by one of them
    assert len({text for *_, text in first}) == 1
    assert main([*words, "--arms=vllm-colocated,vllm", "--factors=1"]) == 0
    assert len(calls(tmp_path)) == len(first) + 2
    assert len({url for url, *_ in calls(tmp_path)[2:]}) == 1
    assert main([*words, "--arms=vllm-colocated", "--factors=1,2", "--for-s=1"]) == 3
    assert len(calls(tmp_path)) == len(first) + 2
    said = capsys.readouterr()
    assert "out of time: chat_x2_s1 by vllm-colocated" in said.err
    assert "| chat * | 1 | 100.0 | 100.0 | 1 |" in said.out
    (line,) = json.loads((tmp_path / "out" / "table.json").read_text())
    assert line["shares"] == {"vllm": 1.0, "vllm-colocated": 1.0}
    assert len(list(tmp_path.glob("server-*"))) == 3


def test_a_work_before_is_asked_but_not_kept(tmp_path: Path, words: list[str]) -> None:
    words = [
        "goodput",
        *words,
        "--work=chat",
        "--limit=chat=4",
        "--limit=code=2",
        "--seconds=1",
        "--requests=3",
    ]
    assert main([*words, "--arms=vllm", "--factors=1", "--after=code", "--processes=1"]) == 0
    assert [many for _, many, _ in calls(tmp_path)] == [24, 4]
    assert [row.after for row, _ in read_cells([tmp_path / "out"])] == ["code"]


def test_servers_side_by_side_are_asked_at_once(tmp_path: Path, words: list[str]) -> None:
    assert (
        main(["side", *words, "--row=16:4:2", "--arms=vllm,vllm-colocated", "--processes=2"]) == 0
    )
    assert len(list(tmp_path.glob("server-*"))) == 3
    assert {
        cell.arm: cell.figures.requests for cell in read_cells([tmp_path / "out"]).values()
    } == {
        "vllm": 12,
        "vllm-colocated": 12,
    }


def test_a_client_that_fails_is_told_with_what_it_said(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("broken", "1")
    assert main(["closed", *words, "--row=16:4:2", "--arms=vllm"]) == 1
    assert "no such client" in capsys.readouterr().err


def test_a_server_that_ends_is_told_with_its_log(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["closed", *words, "--row=16:4:2", "--arms=node", "--kvrelay-flag=--no-such-flag"])
        == 1
    )
    assert "unknown flag --no-such-flag" in capsys.readouterr().err


def test_the_commands_of_the_readme_are_understood(repository: Path) -> None:
    text = (repository / "benchmarks" / "peer" / "README.md").read_text(encoding="utf-8")
    found = [
        shlex.split(line, comments=True)[3:]
        for line in text.splitlines()
        if line.startswith("python -m")
    ]
    assert {_arguments(words).command for words in found} == {"side", "goodput", "closed", "table"}
    assert all(f"`{name}`" in text for name in ARMS)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--arms=vllm,none"], "there is no arm 'none'"),
        (["--gpus=0"], "too few for 2 servers"),
        (["--processes=3"], "must be a multiple"),
        (["--work=chats"], "'chats' is none of"),
        (["--limit=chat"], "could not convert"),
    ],
)
def test_wrong_words_are_told(
    more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["goodput", "--out=x", *more])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
