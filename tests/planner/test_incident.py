"""A router's log becomes an incident, and is replayed."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.roles import H200
from kvrelay.planner.incident import Requested, events_of, read_incident, streams_of_incident
from kvrelay.planner.rate_card import write_card
from kvrelay.planner.setting import NodeEvent, Setting, Stream
from kvrelay.planner.world import simulate
from kvrelay.replay import run, size_of
from kvrelay.wire.config import Role
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
    more = Fields(model="", prompt_tokens=tokens, error="'later'")
    return line(at_s, "id=%s path=%s status=%d key=%s %s", "r2", "/v1/completions", 429, "-", more)


LOG = [
    line(0.0, "%s node %s is up", "prefill", P),
    line(0.0, "%s node %s is up", "decode", D),
    line(0.0, "%s node %s is up", "decode", E),
    b"no JSON at all",
    request(2.0, 1_000, 20, 1_000.0),
    request(2.5, "-", 0, 3.0),
    refused(2.6, 700),
    line(3.0, "%s node %s is kept out: %s", "decode", E, "it does not answer"),
    line(3.1, "%s node %s is kept out: %s", "decode", E, "it still does not"),
    request(4.0, 500, 40, 2_500.0),
    line(5.0, "%s node %s is up", "decode", E),
    line(6.0, "%s node %s is kept out: %s", "decode", E, "it is draining"),
    line(7.0, "%s node %s is up", "prefill", E),
]


def test_a_log_tells_of_requests_and_nodes() -> None:
    incident = read_incident(LOG)
    assert list(incident.nodes.items()) == [
        (P, Role.PREFILL), (D, Role.DECODE), (E, Role.DECODE),
    ]  # fmt: skip
    first, second = incident.requests
    assert first == Requested(0.0, 1_000, 20, 50.0, 1_000.0)
    assert (second.at_ms, second.prompt) == (500.0, 500)
    assert incident.happened == [
        (2_000.0, E, "down", None),
        (4_000.0, E, "up", None),
        (5_000.0, E, "away", None),
        (6_000.0, E, "up", None),
        (6_000.0, E, "role", Role.PREFILL),
    ]
    left_out = incident.refused, incident.refused_tokens, incident.unanswered
    assert left_out == (1, 700, 1)
    assert events_of(incident, 1, 2)[0] == NodeEvent(2_000.0, 2, "down")
    assert events_of(incident, 1, 1) == []
    assert [stream.at for stream in streams_of_incident(incident)] == [0.0, 500.0]


WHY = "it changes its role from decode to prefill"


@pytest.mark.parametrize(
    ("lines", "happened"),
    [
        (
            [line(3.0, "%s node %s is up", "decode", E)],
            [(0.0, E, "down", None), (2_000.0, E, "up", None)],
        ),
        (
            [line(3.0, "%s node %s is kept out: %s", "decode", D, WHY),
             line(4.0, "%s node %s is up", "prefill", D)],
            [(2_000.0, D, "role", Role.PREFILL)],
        ),
    ],
    ids=["a node comes later", "a node changes its role"],
)  # fmt: skip
def test_what_happens_to_a_node(lines: list[bytes], happened: list[tuple[object, ...]]) -> None:
    incident = read_incident([*LOG[:2], request(2.0, 100, 5, 1_000.0), *lines])
    assert {P: Role.PREFILL, D: Role.DECODE}.items() <= incident.nodes.items()
    assert incident.happened == happened


def test_a_drained_node_takes_nothing_new_until_it_is_back() -> None:
    events = [
        NodeEvent(0.0, 2, "away"),
        NodeEvent(0.0, 0, "away"),
        NodeEvent(9_000.0, 0, "up"),
    ]
    streams = [Stream(1.0 + at, 500, 400) for at in range(0, 20_000, 500)]
    for policy in ("round_robin", "price"):
        result = simulate(
            copy.deepcopy(streams),
            Setting(policy, 1, 2, card=H200, strict_roles=True, events=events),
        )
        assert all(stream.answered and not stream.moved for stream in result.streams)
        assert all(
            stream.local == (stream.at < 9_500) or 9_000 < stream.at < 10_000
            for stream in result.streams
        )
    events.append(NodeEvent(0.0, 1, "away"))
    gone = simulate(copy.deepcopy(streams), Setting(prefill=1, decode=2, card=H200, events=events))
    assert all(stream.refused for stream in gone.streams)


def test_models_on_other_nodes_are_left_out_and_adapters_stay() -> None:
    other = "http://o:1"
    incident = read_incident([
        request(1.0, 100, 5, 900.0, model="m"),
        request(1.1, 100, 5, 900.0, model="m-adapter"),
        request(1.2, 100, 5, 900.0, model="n", decode=other),
        line(2.0, "%s node %s is kept out: %s", "decode", other, "it does not answer"),
    ])  # fmt: skip
    mine = incident.of_model("m")
    assert list(mine.nodes) == [P, D]
    assert [each.model for each in mine.requests] == ["m", "m-adapter"]
    assert not mine.happened
    assert incident.of_model("unheard of") is incident


def test_the_command_replays_with_other_nodes_and_another_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, card = tmp_path / "router.log", tmp_path / "card.json"
    log.write_bytes(b"\n".join(LOG))
    write_card(H200, card)
    console = Console(width=120, soft_wrap=True)
    assert run(log, H200, "", "price", console) == 0
    assert run(log, H200, "2:3", "round_robin", console) == 0
    out = capsys.readouterr().out
    assert "TTFT then" in out
    assert "TTFT 2P3D, round_robin" in out
    assert "5 of 5 events" in out
    assert (
        "1 requests that were refused then, with about 700 tokens of prompts, and 1 that began"
        in out
    )
    with pytest.raises(ConfigError, match="P:D"):
        size_of(read_incident(LOG), "2:0")
    with pytest.raises(ConfigError, match="none of least_queue"):
        run(log, H200, "", "best", console)
    log.write_text("{}")
    with pytest.raises(ConfigError, match="no request"):
        run(log, H200, "", "price", console)
