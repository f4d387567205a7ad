"""`python -m benchmarks.peer` without a GPU and without vLLM: loads, command lines, counts, order,
resuming, tables.
"""

from __future__ import annotations

import json
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer.__main__ import _arguments, main
from benchmarks.peer.arms import ARMS, Kind, Setting, router_command, server_command
from benchmarks.peer.cells import (
    Cell,
    Row,
    read_cells,
)
from benchmarks.peer.client import Figures, figures_of, seen_by
from benchmarks.peer.table import lines_of, tables
from benchmarks.peer.works import WORKS, Load, Request, Targets, work_named
from kvrelay.wire.errors import ConfigError
from scripts.reference.command_line import commands, general_flags

FLAGS = {each.name: {flag for one in each.parameters for flag in one.flags} for each in commands()}
SETTING = Setting(Path("/m"))
LONGEST = 16_384
CARD = Path(__file__).parents[2] / "benchmarks" / "rate_cards" / "h200-llama-3.1-8b.json"


def figures(
    in_time: float | None, tokens_per_s: float = 1000.0, late_ms: float | None = None
) -> Figures:
    return Figures(400, 0, in_time, 512.0, 10.0, tokens_per_s, 20.0, 200.5, 5.0, 30.0, late_ms)


def cell(
    arm: str, in_time: float | None, factor: float = 1.0, seed: int = 1, run: str = "a"
) -> Cell:
    return Cell(Row("chat", factor, seed), arm, run, figures(in_time))


def test_a_seed_draws_the_same_requests_at_the_asked_rate() -> None:
    load, again, other = (WORKS["chat"].load(0.5, seed, 40.0, None, LONGEST) for seed in (1, 1, 2))
    assert load == again != other
    assert {(each.prompt, each.output) for each in load.requests} == {(512, 256)}
    assert len(load.requests) == 1420
    assert len(load.requests) / load.window_s == pytest.approx(35.5, rel=0.1)
    assert len(WORKS["summarise"].load(0.5, 1, 1.0, None, LONGEST).requests) == 150


def test_a_trace_keeps_its_prefixes_and_is_pressed_to_the_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d000, "input_length": %d, "output_length": 9, "hash_ids": [7, %d]}\n'
    path.write_text(
        "".join(line % (at, 700 if at % 2 else 20_000, 100 + at) for at in range(1, 101))
    )
    load = work_named("trace", {"trace": 4.0}).load(1.0, 3, 5.0, 10, LONGEST, path)
    assert len(load.requests) == 20
    assert load.window_s == pytest.approx(5.0)
    assert {(each.prompt, each.output, each.blocks[0]) for each in load.requests} == {(700, 9, 7)}
    assert len({each.blocks[1] for each in load.requests}) == 20
    with pytest.raises(ConfigError, match="has 50 requests"):
        WORKS["trace"].load(1.0, 1, 40.0, None, LONGEST, path)
    with pytest.raises(ConfigError, match="needs --trace"):
        WORKS["trace"].load(1.0, 1, 40.0, None, LONGEST)


def unknown(argv: list[str]) -> set[str]:
    """Find flags of a command line of ours that the command does not have."""
    at = argv.index("kvrelay.cli") + 1
    return {word.split("=")[0] for word in argv[at + 1 :]} - FLAGS[argv[at]] - general_flags()


def test_nodes_and_routers_are_started_with_flags_that_they_have() -> None:
    for kind in (Kind.SERVE, Kind.PREFILL, Kind.DECODE):
        for caching in (True, False):
            assert not unknown(server_command(kind, 1, SETTING, caching=caching))
    for arm in ARMS.values():
        argv = router_command(arm, ["http://a:1", "http://b:2"], 3)
        assert {"--prefill=http://a:1", "--decode=http://b:2"} <= set(argv)
        assert not unknown(argv)


# With targets of 200 and 15 ms: in time, late to begin, slow, and refused.
RESULT: dict[str, Any] = {
    "start_times": [100.0, 101.0, 102.0, 103.05],
    "input_lens": [8, 8, 8, 8],
    "output_lens": [3, 3, 3, 0],
    "ttfts": [0.1, 0.3, 0.1, 0.0],
    "itls": [[0.01, 0.01], [0.01, 0.01], [0.01, 0.03], []],
    "errors": ["", "", "", "Too Many Requests"],
}
ASKED = tuple(Request(float(at), 8, 3) for at in range(4))


def test_in_time_are_those_that_meet_both_targets_of_all() -> None:
    found = figures_of(seen_by(RESULT, ASKED), Load(ASKED, Targets(200.0, 15.0)))
    assert (found.requests, found.failed, found.in_time, found.prompt_tokens) == (4, 1, 0.25, 8.0)
    assert found.ttft_p50_ms == pytest.approx(100)
    assert found.ttft_p99_ms == pytest.approx(300)
    assert found.tpot_p50_ms == pytest.approx(10)
    assert found.itl_p99_ms == pytest.approx(30)
    assert found.late_p99_ms == pytest.approx(50)
    assert found.tokens_per_s == pytest.approx(9 / 3.05)
    more = figures_of(
        seen_by(RESULT, ASKED), Load(ASKED, Targets(200.0, 15.0, ttft_ms_per_token=20.0))
    )
    assert more.in_time == 0.5


def test_tables_have_means_over_seeds_and_what_is_best() -> None:
    shares = {
        (1.0, 1): {"colocated": 0.5, "strict": 0.9, "cluster": 0.85, "told": 0.93},
        (1.0, 2): {"colocated": 0.96, "told": 0.93},
        (1.2, 1): {"colocated": 0.5, "strict": 0.4, "told": 0.4},
    }
    cells = [
        cell(arm, share, factor, seed, run=arm if factor > 1 else "a")
        for (factor, seed), of in shares.items()
        for arm, share in of.items()
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


def test_without_gpus_real_processes_take_the_times_of_a_card(tmp_path: Path) -> None:
    words = ["--work=code", "--factors=0.3", "--seconds=1", "--requests=8", "--again-within=-1"]
    paced = [f"--paced={CARD}", "--scale=2", "--arms=told"]
    assert main(["goodput", f"--out={tmp_path / 'out'}", *words, *paced]) == 0
    cells = read_cells([tmp_path / "out"])
    (seen,) = (cell.figures for cell in cells.values())
    assert (seen.requests, seen.failed, seen.prompt_tokens) == (8, 0, 2048)
    assert seen.ttft_p50_ms is not None
    assert seen.ttft_p50_ms > 47
    assert seen.tpot_p50_ms is not None
    assert seen.tpot_p50_ms > 4


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
        (["--paced=none.json"], "none.json"),
        (["--scale=0"], "--scale must be above 0"),
        ([f"--paced={CARD}", "--arms=vllm,cluster"], "arms of kvrelay; leave out vllm"),
    ],
)
def test_wrong_words_are_told(
    more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["goodput", "--out=x", *more])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
