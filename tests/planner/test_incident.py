"""A router's log becomes an incident, and is replayed."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
from rich.console import Console

from kvrelay.planner.incident import (
    Incident,
    LeftOut,
    NodeNamed,
    Requested,
    events_of,
    of_log,
    read_incident,
    streams_of_incident,
)
from kvrelay.planner.rate_card import write_card
from kvrelay.planner.setting import NodeEvent, Setting, Stream, What
from kvrelay.planner.speeds import H200
from kvrelay.planner.world import simulate
from kvrelay.replay import replayed, run, size_of
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.log_lines import Fields, JsonLines

P, D, E = "http://p:1", "http://d:1", "http://e:1"


def line(at_s: float, template: str, *values: object) -> bytes:
    record = logging.LogRecord("kvrelay.router", logging.INFO, "", 0, template, values, None)
    record.created = 1_700_000_000 + at_s
    return JsonLines("router").format(record).encode()


def request(
    at_s: float,
    prompt: object,
    output: int,
    total_ms: float,
    status: int = 200,
    model: str = "",
    decode: str = D,
) -> bytes:
    stages = Fields(queue_ms=5.0, prefill_ms=45.0, total_ms=total_ms)
    template = (
        "id=%s path=%s status=%d key=%s prompt_tokens=%s output_tokens=%d prefill=%s "
        "decode=%s %s %s"
    )
    more = Fields(model=model, client_gone="no")
    prefill = P if decode == D else "-"
    return line(
        at_s,
        template,
        "r1",
        "/v1/completions",
        status,
        "-",
        prompt,
        output,
        prefill,
        decode,
        stages,
        more,
    )


def refused(at_s: float, tokens: int) -> bytes:
    more = Fields(model="", prompt_tokens=tokens, error="'later'")
    return line(at_s, "id=%s path=%s status=%d key=%s %s", "r2", "/v1/completions", 429, "-", more)


LOG = [
    line(0.0, "%s node %s is up", "prefill", P),
    line(0.0, "%s node %s is up", "decode", D),
    line(0.0, "%s node %s is up", "decode", E),
    b"no JSON at all",
    request(2.0, 1_000, 20, 1_000.0),
    request(2.5, "-", 0, 3.0, status=503),
    refused(2.6, 700),
    line(3.0, "%s node %s is kept out: %s", "decode", E, "it does not answer"),
    line(3.1, "%s node %s is kept out: %s", "decode", E, "it still does not"),
    request(4.0, 500, 40, 2_500.0),
    line(5.0, "%s node %s is up", "decode", E),
    line(6.0, "%s node %s is kept out: %s", "decode", E, "it is draining"),
    line(7.0, "%s node %s is up", "prefill", E),
]


def test_a_log_tells_of_requests_and_nodes() -> None:
    incident = of_log(LOG)
    assert incident.nodes == [
        NodeNamed(P, Role.PREFILL),
        NodeNamed(D, Role.DECODE),
        NodeNamed(E, Role.DECODE),
    ]
    first, second = incident.requests
    assert (first.at_ms, first.prompt, first.output, first.ttft_ms, first.total_ms) == (
        0.0,
        1_000,
        20,
        50.0,
        1_000.0,
    )
    assert (second.at_ms, second.prompt) == (500.0, 500)
    told = [(each.at_ms, each.name, each.what, each.role) for each in incident.happened]
    assert told == [
        (2_000.0, E, What.DOWN, None),
        (4_000.0, E, What.UP, None),
        (5_000.0, E, What.AWAY, None),
        (6_000.0, E, What.UP, None),
        (6_000.0, E, What.ROLE, Role.PREFILL),
    ]
    assert incident.left_out == LeftOut(refused=1, tokens=700, unanswered=1)


def told_of(
    *lines: bytes,
) -> tuple[list[tuple[str, Role]], list[tuple[float, str, What, Role | None]]]:
    """The nodes, and what happened, of a log with these lines about nodes and a request before."""
    incident = of_log([line(-1.0, "%s node %s is up", "prefill", P), line(-1.0, "%s node %s is up", "decode", D),
                       request(1.0, 100, 5, 1_000.0), *lines])  # fmt: skip
    happened = [(each.at_ms, each.name, each.what, each.role) for each in incident.happened]
    return [(node.name, node.role) for node in incident.nodes], happened


def test_a_node_that_is_told_to_change_its_role_is_not_lost() -> None:
    nodes, happened = told_of(
        line(
            2.0,
            "%s node %s is kept out: %s",
            "decode",
            D,
            "it changes its role from decode to prefill",
        ),
        line(3.0, "%s node %s is up", "prefill", D),
    )
    assert nodes == [(P, Role.PREFILL), (D, Role.DECODE)]
    assert happened == [(2_000.0, D, What.ROLE, Role.PREFILL)]


def test_a_drained_node_takes_nothing_new_until_it_is_back() -> None:
    events = [
        NodeEvent(0.0, 2, What.AWAY),
        NodeEvent(0.0, 0, What.AWAY),
        NodeEvent(9_000.0, 0, What.UP),
    ]
    streams = [Stream(1.0 + at, 500, 400) for at in range(0, 20_000, 500)]
    for policy in ("round_robin", "price"):
        result = simulate(
            copy.deepcopy(streams), Setting(policy, 1, 2, strict_roles=True, events=events)
        )
        assert all(stream.answered and not stream.moved for stream in result.streams)
        assert all(
            stream.local == (stream.at < 9_500) or 9_000 < stream.at < 10_000
            for stream in result.streams
        )
    events.append(NodeEvent(0.0, 1, What.AWAY))
    gone = simulate(copy.deepcopy(streams), Setting(prefill=1, decode=2, events=events))
    assert all(stream.refused for stream in gone.streams)


def test_models_on_other_nodes_are_left_out_and_adapters_stay() -> None:
    other = "http://o:1"
    incident = of_log([
        request(1.0, 100, 5, 900.0, model="m"),
        request(1.1, 100, 5, 900.0, model="m-adapter"),
        request(1.2, 100, 5, 900.0, model="n", decode=other),
        line(2.0, "%s node %s is kept out: %s", "decode", other, "it does not answer"),
    ])  # fmt: skip
    mine = incident.of_model("m")
    assert [node.name for node in mine.nodes] == [P, D]
    assert [each.model for each in mine.requests] == ["m", "m-adapter"]
    assert not mine.happened
    assert incident.of_model("unheard of") is incident


def test_blocks_of_an_incident_are_those_of_a_trace() -> None:
    """Of 512 tokens: the second prompt begins with what the first one was."""
    nodes = [NodeNamed(P, Role.PREFILL), NodeNamed(D, Role.DECODE)]
    asked = [Requested(at * 5_000.0, 8_192, 5, blocks=list(range(16))) for at in range(2)]
    ttft = replayed(Incident(nodes, asked, []), H200, (1, 1), "price").ttft
    assert ttft[0] < ttft[1] / 5


def test_an_incident_is_what_it_was_when_it_is_read_again() -> None:
    incident = of_log(LOG)
    again = read_incident(incident.lines())
    assert (again.nodes, again.requests, again.happened) == (
        incident.nodes,
        incident.requests,
        incident.happened,
    )
    assert (again.of_model("any"), read_incident(LOG)) == (again, incident)
    assert events_of(again, 1, 2)[0] == NodeEvent(2_000.0, 2, What.DOWN)
    assert events_of(again, 1, 1) == []
    assert [stream.at for stream in streams_of_incident(again)] == [0.0, 500.0]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([b'{"kind":"nodes","nodes":[]}', b'{"kind":"request"}'], "line 2"),
        ([b'{"kind":"nodes","nodes":[],"version":9}'], "version 9"),
        ([b'{"kind":"nodes","nodes":[{"name":"a","role":"decode"}]}'], "needs a request"),
        (
            [b'{"kind":"nodes","nodes":[]}', b'{"kind":"node","at_ms":1,"name":"x","what":"down"}'],
            "happened to x",
        ),
        ([b"{}"], "no request"),
    ],
)
def test_what_is_no_incident_is_refused_with_a_reason(rows: list[bytes], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_incident(rows)


def test_the_command_replays_with_other_nodes_and_another_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, card, record = tmp_path / "router.log", tmp_path / "card.json", tmp_path / "incident.jsonl"
    log.write_bytes(b"\n".join(LOG))
    write_card(H200, card)
    console = Console(width=120, soft_wrap=True)
    assert run(log, H200, "", "price", record, console) == 0
    assert run(record, H200, "2:3", "round_robin", None, console) == 0
    out = capsys.readouterr().out
    assert "TTFT then" in out
    assert "TTFT 2P3D, round_robin" in out
    assert "5 of 5 events" in out
    assert (
        "1 requests that were refused then, with about 700 tokens of prompts, and 1 that began"
        in out
    )
    with pytest.raises(ConfigError, match="P:D"):
        size_of(of_log(LOG), "2:0")
    with pytest.raises(ConfigError, match="none of least_queue"):
        run(record, H200, "", "best", None, console)
