"""`kvrelay bench`: from what is typed to the file, and results side by side."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay import bench
from kvrelay.cli import run
from kvrelay.load.config import BenchConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "load"))
from openai_double import Double, Told, event, over, paced, serving


@pytest.fixture
async def server() -> AsyncIterator[Double]:
    async with serving(paced(0.01, 0.002)) as double:
        yield double


async def bench_of(*words: str) -> int:
    """Run the command in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(run, ["bench", *words])


def read_result(path: Path) -> Any:
    return json.loads(path.read_text())


SHORT = ["--lengths=16:4", "--duration-s=1", "--warm-up-s=0.2"]


async def test_rates_become_a_result_and_a_table(
    server: Double,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--rate=10,20", "--gpus=2", "--ttft-ms=3000", "--tpot-ms=500"]
    typed = "--url", server.url, "--api-key", "secret", *SHORT, *flags
    monkeypatch.setattr(sys, "argv", ["kvrelay", "bench", *typed])
    path = tmp_path / "ours.json"
    assert await bench_of(*typed, "--output", str(path)) == 0
    result = read_result(path)
    assert [one["rate"] for one in result["runs"]] == [10.0, 20.0]
    assert (result["model"], result["gpus"], result["targets"]["ttft_ms"]) == ("double", 2, 3_000.0)
    for one in result["runs"]:
        measures = one["measures"]
        assert (measures["failures"], measures["attainment"]) == ({}, 1.0)
        assert measures["requests"] == len(one["rows"]) > 3
        assert (measures["prompt_tokens"], measures["output_tokens"]) == (16, 4)
        assert measures["usage"]
    assert "secret" not in path.read_text()
    assert "--api-key '***'" in result["made"]["command"]
    assert result["made"]["versions"]["kvrelay"]
    shown = capfd.readouterr().out
    assert "goodput/GPU" in shown
    assert str(path) in shown


async def test_what_was_measured_before_a_failure_is_written(
    server: Double, tmp_path: Path
) -> None:
    path = tmp_path / "part.json"
    flags = ("--rate=20,0.1,20", "--arrivals=constant", "--output", str(path))
    assert await bench_of("--url", server.url, *SHORT, *flags) == 1
    result = read_result(path)
    assert [one["rate"] for one in result["runs"]] == [20.0]


async def test_each_command_has_prompts_of_its_own_unless_told(
    server: Double, tmp_path: Path
) -> None:
    path, seeds = tmp_path / "seed.json", []
    flags = ("--concurrency=1", "--requests=2", "--warm-up-s=0", "--output", str(path))
    for more in ([], [], ["--seed=7"], ["--seed=7"]):
        assert await bench_of("--url", server.url, *SHORT, *flags, *more) == 0
        seeds.append(read_result(path)["made"]["seed"])
    assert len(set(seeds)) == 3
    assert seeds[2:] == [7, 7]
    assert len({tuple(told.body["prompt"]) for told in server.told}) == 6


async def test_failed_requests_end_with_1(
    server: Double, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        event(writer, {"error": {"message": "the engine has ended"}})
        over(writer)

    server.say = broken
    path = tmp_path / "broken.json"
    flags = ["--concurrency=1", "--requests=3", "--warm-up-s=0"]
    assert await bench_of("--url", server.url, *SHORT, *flags, "--output", str(path)) == 1
    assert read_result(path)["runs"][0]["measures"]["failures"] == {"error in the stream": 3}
    assert "the engine has ended" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "how fast?"),
        ("--rate 0", "positive number"),
        ("--rate 4,x", "positive number"),
        ("--rate 1 --concurrency 1", "open or closed loop"),
        ("--rate 1 --lengths chatty", "IN:OUT"),
        ("--rate 1 --agents fleet", "--endpoint chat"),
        ("--find-rate --rate 1 --agents fleet --endpoint chat", "sessions"),
        ("--rate 1 --arrivals trace", "--trace FILE"),
        ("--rate 1 --gpus 0", "gpus must be at least 1"),
        ("--rate 1 --url nowhere", "nowhere"),
        ("--rate 1 --url http://a:1,nowhere", "nowhere"),
        ("--rate 1 --output a.txt", "must end with .json"),
        ("--rate 1 --trace none.jsonl", "none.jsonl"),
        ("--find-rate --rate 1,2", "starts from one rate"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_asked(
    flags: str,
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *flags.split()]) == 2
    assert words in capfd.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--url=http://127.0.0.1:9", "--rate=1"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capfd.readouterr().err


def test_targets_are_those_of_the_lengths_unless_given() -> None:
    assert BenchConfig(rate="1").targets.ttft_ms == 200.0
    assert BenchConfig(rate="1", lengths="summarise", tpot_ms=20.0).targets.tpot_ms == 20.0
    assert BenchConfig(rate="1", lengths="10:20").targets.ttft_ms == 1_000.0
    assert BenchConfig(rate="1", trace="t").targets.tpot_ms == 50.0


def test_a_command_is_told_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["kvrelay", "bench", "--api-key=secret", "--url", "http://h:1"]
    )
    assert bench._command() == "kvrelay bench '--api-key=***' --url http://h:1"
