"""A router's log becomes an incident, and is replayed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from rich.console import Console

from kvrelay.replay import run, size_of
from planning.rate_card import write_card
from simulator.incident import NodeNamed, events_of, of_log, read_incident, streams_of_incident
from simulator.setting import NodeEvent, What
from simulator.speeds import H200
from wire.config import Role
from wire.errors import ConfigError
from wire.log_lines import Fields, JsonLines

P, D, E = "http://p:1", "http://d:1", "http://e:1"


def line(at_s: float, template: str, *values: object) -> bytes:
    record = logging.LogRecord("kvrelay.router", logging.INFO, "", 0, template, values, None)
    record.created = 1_700_000_000 + at_s
    return JsonLines("router").format(record).encode()


def request(at_s: float, prompt: object, output: int, total_ms: float, status: int = 200) -> bytes:
    """As router/endings.py writes it."""
    stages = Fields(queue_ms=5.0, prefill_ms=45.0, total_ms=total_ms)
    template = "id=%s path=%s status=%d key=%s prompt_tokens=%s output_tokens=%d prefill=%s decode=%s %s %s"
    more = Fields(client_gone="no")
    return line(at_s, template, "r1", "/v1/completions", status, "-", prompt, output, P, D, stages, more)


LOG = [
    line(0.0, "%s node %s is up", "prefill", P),
    line(0.0, "%s node %s is up", "decode", D),
    line(0.0, "%s node %s is up", "decode", E),
    b"no JSON at all",
    request(2.0, 1_000, 20, 1_000.0),
    request(2.5, "-", 0, 3.0, status=503),
    line(3.0, "%s node %s is kept out: %s", "decode", E, "it does not answer"),
    line(3.1, "%s node %s is kept out: %s", "decode", E, "it still does not"),
    request(4.0, 500, 40, 2_500.0),
    line(5.0, "%s node %s is up", "decode", E),
    line(6.0, "%s node %s is kept out: %s", "decode", E, "it is draining"),
    line(7.0, "%s node %s is up", "prefill", E),
]


def test_a_log_tells_of_requests_and_nodes() -> None:
    incident = of_log(LOG)
    assert incident.nodes == [NodeNamed(P, Role.PREFILL), NodeNamed(D, Role.DECODE), NodeNamed(E, Role.DECODE)]
    first, second = incident.requests
    assert (first.at_ms, first.prompt, first.output, first.ttft_ms, first.total_ms) == (0.0, 1_000, 20, 50.0, 1_000.0)
    assert (second.at_ms, second.prompt) == (500.0, 500)
    told = [(each.at_ms, each.name, each.what, each.role) for each in incident.happened]
    assert told == [
        (2_000.0, E, What.DOWN, None),
        (4_000.0, E, What.UP, None),
        (6_000.0, E, What.ROLE, Role.PREFILL),
    ]


def test_an_incident_is_what_it_was_when_it_is_read_again() -> None:
    incident = of_log(LOG)
    again = read_incident(incident.lines())
    assert (again.nodes, again.requests, again.happened) == (incident.nodes, incident.requests, incident.happened)
    assert read_incident(LOG) == incident
    assert events_of(again, 1, 2)[0] == NodeEvent(2_000.0, 2, What.DOWN)
    assert events_of(again, 1, 1) == []
    assert [stream.at for stream in streams_of_incident(again)] == [0.0, 500.0]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([b'{"kind":"nodes","nodes":[]}', b'{"kind":"request"}'], "line 2"),
        ([b'{"kind":"nodes","nodes":[],"version":9}'], "version 9"),
        ([b'{"kind":"nodes","nodes":[{"name":"a","role":"decode"}]}'], "needs a request"),
        ([b'{"kind":"nodes","nodes":[]}', b'{"kind":"node","at_ms":1,"name":"x","what":"down"}'], "happened to x"),
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
    console = Console(width=120)
    assert run(log, H200, "", "cost", record, console) == 0
    assert run(record, H200, "2:3", "round_robin", None, console) == 0
    out = capsys.readouterr().out
    assert "TTFT then" in out
    assert "TTFT 2P3D, round_robin" in out
    assert "3 of 3 events" in out
    with pytest.raises(ConfigError, match="P:D"):
        size_of(of_log(LOG), "2:0")
    with pytest.raises(ConfigError, match="none of cost"):
        run(record, H200, "", "best", None, console)
