"""A router's log becomes an incident, and is replayed."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.roles import H200
from kvrelay.planner.incident import read_incident
from kvrelay.replay import run
from kvrelay.wire.config import CacheConfig, Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.log_lines import Fields, JsonLines

P, D, E = "http://p:1", "http://d:1", "http://e:1"


def line(at_s: float, template: str, *values: object) -> bytes:
    record = logging.LogRecord("kvrelay.router", logging.INFO, "", 0, template, values, None)
    record.created = 1_700_000_000 + at_s
    return JsonLines("router").format(record).encode()


def request(
    at_s: float, prompt: object, output: int, total_ms: float, model: str = "", decode: str = D
) -> bytes:
    stages = Fields(queue_ms=5.0, prefill_ms=45.0, total_ms=total_ms)
    template = "prompt_tokens=%s output_tokens=%d prefill=%s decode=%s %s %s"
    prefill = P if decode == D else "-"
    return line(at_s, template, prompt, output, prefill, decode, stages, Fields(model=model))


def refused(at_s: float, tokens: int) -> bytes:
    more = Fields(model="", prompt_tokens=tokens, error="later")
    return line(at_s, "id=%s path=%s status=%d key=%s %s", "r2", "/v1/completions", 429, "-", more)


LOG = [
    line(0.0, "%s node %s is up", "prefill", P),
    line(0.0, "%s node %s is up", "decode", D),
    line(0.0, "%s node %s is up", "decode", E),
    b"no JSON at all",
    request(2.0, 1_000, 20, 1_000.0),
    request(2.5, "-", 0, 3.0),
    refused(2.6, 700),
    request(4.0, 500, 40, 2_500.0),
    line(7.0, "%s node %s is up", "prefill", E),
]


def test_a_log_tells_of_requests_and_nodes() -> None:
    incident = read_incident(LOG)
    assert incident.nodes == {P: Role.PREFILL, D: Role.DECODE, E: Role.DECODE}
    first, second = incident.streams
    assert (first.at, first.prompt, first.output) == (0.0, 1_000, 20)
    assert (first.ttft, first.last) == (50.0, 1_000.0)
    assert (second.at, second.prompt) == (500.0, 500)
    assert ([each.tokens for each in incident.refused], incident.unanswered) == ([700], 1)


def test_models_on_other_nodes_are_left_out_and_adapters_stay() -> None:
    other = "http://o:1"
    incident = read_incident([
        request(1.0, 100, 5, 900.0, model="m"),
        request(1.1, 100, 5, 900.0, model="m-adapter"),
        request(1.2, 100, 5, 900.0, model="n", decode=other),
    ])  # fmt: skip
    mine = incident.of_model("m")
    assert list(mine.nodes) == [P, D]
    assert [each.model for each in mine.requests] == ["m", "m-adapter"]
    assert incident.of_model("unheard of") is incident


def test_the_command_replays_with_other_nodes_and_another_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "router.log"
    log.write_bytes(b"\n".join(LOG))
    console = Console(width=120, soft_wrap=True)

    def replayed(nodes: str, *policies: str) -> str:
        assert run(log, H200, nodes, policies, [CacheConfig()], console, pull="auto") == 0
        return capsys.readouterr().out

    out = replayed("", "price")
    assert "1P2D, 2 requests" in out
    then, now = re.findall(r"TTFT p50, ms .* ([\d.]+) .* ([\d.]+)", out)[0]
    assert float(then) == 50.0 > float(now) > 0
    assert re.search(r"refused +│ +1 │ +0 │", out)
    assert (
        "1 requests that were refused then, with about 700 tokens of prompts, and 1 that began"
        in out
    )
    out = replayed("2:3", "round_robin", "price")
    assert "2P3D" in out
    assert re.search(r"then ┃ +round_robin ┃ +price ┃", out)
    with pytest.raises(ConfigError, match="P:D"):
        replayed("2:0", "price")
    log.write_bytes(
        request(1.0, 9, 0, 5.0, model=H200.model)
        + b"\n"
        + request(1.0, 9, 5, 5.0, model="n", decode=E)
    )
    with pytest.raises(ConfigError, match=r"no answered request .* take the card of n$"):
        replayed("", "price")
    log.write_text("{}")
    with pytest.raises(ConfigError, match="no request"):
        replayed("", "price")
