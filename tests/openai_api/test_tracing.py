"""Traces are off unless somebody says where to, and then nothing of its SDK is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvrelay.openai_api.headers import trace_id_of
from kvrelay.openai_api.tracing import Tracing, otlp_endpoint, start_tracing
from kvrelay.wire.errors import ConfigError
from tests.commands import output_of

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def test_where_traces_go() -> None:
    assert otlp_endpoint("", {}) == ""
    assert otlp_endpoint("", {ENDPOINT: "http://a:4318/"}) == "http://a:4318/v1/traces"
    theirs = {ENDPOINT: "http://a:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/traces"}
    assert otlp_endpoint("", theirs) == "http://b/traces"
    assert otlp_endpoint("http://c/v1/traces", theirs) == "http://c/v1/traces"
    assert otlp_endpoint("http://c/v1/traces", {"OTEL_SDK_DISABLED": "true"}) == ""
    assert otlp_endpoint("", {ENDPOINT: "http://a:4318", "OTEL_TRACES_EXPORTER": "none"}) == ""


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="localhost:4317"):
        start_tracing("localhost:4317", "kvrelay")


def test_switched_off_no_sdk_is_imported(repository: Path) -> None:
    code = (
        "import sys, router.serve, openai_api.tracing as t\n"
        "assert t.start_tracing('', 'kvrelay') is None\n"
        "assert not {'opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto'} & "
        "set(sys.modules)\n"
        "sys.modules['opentelemetry.sdk.trace'] = None\n"
        "try: t.start_tracing('http://a/v1/traces', 'kvrelay')\n"
        "except Exception as why: print(why)\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    env["PYTHONPATH"] = str(repository)
    assert "kvrelay[tracing]" in output_of(sys.executable, "-P", "-c", code, env=env)


def test_what_is_asked_of_others_carries_on_the_trace() -> None:
    tracing = Tracing(
        "http://127.0.0.1:9/v1/traces", "kvrelay"
    )  # nobody is there, and nobody minds
    try:
        told = tracing.begin("request", {"traceparent": PARENT, "tracestate": "a=1"}, 1.0).headers
        assert trace_id_of(told["traceparent"]) == trace_id_of(PARENT)
        assert told["traceparent"] != PARENT
        assert told["traceparent"].endswith("-01")
        assert told["tracestate"] == "a=1"
        fresh = tracing.begin("request", {}, 1.0).headers
        assert len(trace_id_of(fresh["traceparent"])) == 32
        unkept = tracing.begin("request", {"traceparent": PARENT[:-2] + "00"}, 1.0)
        assert unkept.headers["traceparent"].endswith("-00")
        unkept.end({}, 2.0)
    finally:
        tracing.close(within_s=0.1)
