"""Log lines as text and as JSON: one template for both."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from kvrelay.wire.errors import RequestError
from kvrelay.wire.log_lines import Fields, JsonLines, Seldom, formatter


def record(template: str, *values: object, **more: Any) -> logging.LogRecord:
    return logging.LogRecord(
        "kvrelay.node", logging.INFO, "", 1, template, values, more.get("exc_info")
    )


def told(template: str, *values: object) -> dict[str, Any]:
    line = JsonLines("decode").format(record(template, *values))
    assert "\n" not in line
    return dict(json.loads(line))


def test_named_values_are_members_with_their_types() -> None:
    line = told("id=%s status=%d took %.1f s share=%.2f of %s 100%%", "a-1", 200, 1.5, 0.25, "x")
    assert line["message"] == "id=a-1 status=200 took 1.5 s share=0.25 of x 100%"
    assert (line["request_id"], line["status"], line["share"]) == ("a-1", 200, 0.25)
    assert (line["level"], line["logger"], line["process"]) == ("INFO", "kvrelay.node", "decode")
    assert line["time"].endswith("+00:00")
    assert set(line) == {
        "time",
        "level",
        "logger",
        "process",
        "message",
        "request_id",
        "status",
        "share",
    }


def test_several_values_at_once() -> None:
    fields = Fields({"queue_ms": 1.23456, "trace": "ab", "placed": "d1 alone"})
    assert str(fields) == "queue_ms=1.23 trace=ab placed='d1 alone'"
    line = told("id=%s %s", "a", fields)
    assert line["message"] == f"id=a {fields}"
    assert (line["queue_ms"], line["trace_id"], line["placed"]) == (1.235, "ab", "d1 alone")
    assert told("%s", fields)["queue_ms"] == 1.235


def test_a_value_takes_nobody_elses_place() -> None:
    line = told("level=%s message=%s id=%s id=%s", "1", "2", "a", "b")
    assert (line["level"], line["request_id"]) == ("INFO", "a")
    assert "level=1 message=2" in line["message"]


def test_what_a_value_says_makes_no_member() -> None:
    assert "status" not in told("error=%s", "x status=200\nnext")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nobody_fills_a_disk_with_one_line(log_format: str) -> None:
    said = record(
        "refused, path=%s: %s", "/" + "a" * 65_000, RequestError("it is b" + "b" * 10_000_000)
    )
    line = formatter(log_format, "router").format(said)
    assert len(line) < 40_000
    assert "refused, path=/aaa" in line
    assert " characters... bbb" in line


def test_an_exception_is_a_member() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        line = json.loads(
            JsonLines("router", worker=3).format(record("broke", exc_info=sys.exc_info()))
        )
    assert "ValueError: no" in line["exception"]
    assert line["worker"] == 3


def test_text_is_as_ever() -> None:
    line = formatter("text", "router", 2).format(record("id=%s", "a"))
    assert line.endswith("INFO kvrelay.node[2] id=a")


def test_what_strangers_cause_is_logged_once_a_minute_with_how_often_it_was() -> None:
    seldom = Seldom()
    assert seldom.times(10.0) == 1
    assert [seldom.times(10.0 + at) for at in range(60)] == [0] * 60
    assert [seldom.times(70.0), seldom.times(71.0), seldom.times(500.0)] == [61, 0, 2]
