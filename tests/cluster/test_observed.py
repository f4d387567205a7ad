"""What an operator sees of a running cluster: one trace for each request, log lines as JSON, and
metrics that the dashboards and alerts can ask for.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from queries import Asked, asked
from real_cluster import Cluster, running, tiny_body, tiny_model, wait_until

from kvrelay.openai_api.stages import STAGES
from scripts.reference.metric_families import metrics_reference

pytestmark = pytest.mark.cluster

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BY_PROMETHEUS = {"job", "instance"}
"""Labels that it adds to every series."""
OF_PODS = "kvrelay_router_kubernetes_listed_timestamp_seconds"
"""Of routers that follow pods, which no router here does."""


class Collector:
    """An OTLP collector over HTTP that keeps what it gets: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response_only(200)
                self.end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _take(self, content: bytes) -> None:
        for of in ExportTraceServiceRequest.FromString(content).resource_spans:
            facts = {fact.key: fact.value.string_value for fact in of.resource.attributes}
            self.spans += [
                (facts["service.name"], span) for scope in of.scope_spans for span in scope.spans
            ]

    def of(self, trace: str) -> list[tuple[str, Any]]:
        return [(service, span) for service, span in self.spans if span.trace_id.hex() == trace]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    ours = Collector()
    yield ours
    ours.server.shutdown()
    ours.server.server_close()


@pytest.fixture(scope="module")
def cluster(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("observed")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        environment.setenv("KVRELAY_LOG_FORMAT", "json")
        with running(folder, flags=tiny_model(folder), router_flags=["--workers=2"]) as ours:
            yield ours


@pytest.fixture(scope="module")
def request_id(cluster: Cluster) -> str:
    """Of a streamed request that went through both nodes, as part of the client's trace."""
    body = tiny_body([5] * 200, stream=True)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    answer = httpx2.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("[DONE]")
    return answer.headers["x-request-id"]


def test_one_trace_has_all_stages_of_a_request(
    cluster: Cluster, collector: Collector, request_id: str
) -> None:
    def whole() -> bool:
        roots = {
            service
            for service, span in collector.of(TRACE)
            if "kvrelay.request_id" in attributes(span)
        }
        return roots == {"kvrelay-router", "kvrelay-prefill", "kvrelay-decode"}

    wait_until(whole, "the spans of all three processes")
    spans = collector.of(TRACE)
    ids = {span.span_id: (service, span) for service, span in spans}
    (root,) = [span for _, span in spans if span.parent_span_id.hex() == PARENT]
    assert root.name == "POST /v1/completions"
    assert attributes(root)["kvrelay.request_id"] == request_id
    assert attributes(root)["http.response.status_code"] == 200
    assert attributes(root)["gen_ai.usage.output_tokens"] == 12
    told = {}
    for service, span in spans:
        told[service] = attributes(span)
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span is not root:
            _, parent = ids[span.parent_span_id]
            slack = 10_000_000_000  # a process may stand still between the moment and its clock
            assert parent.start_time_unix_nano - slack <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano + slack
    assert told["kvrelay-router"].keys() >= {f"kvrelay.{name}_ms" for name in STAGES}
    assert told["kvrelay-prefill"]["kvrelay.prefill_ms"] > 0
    for name in ("transfer", "decode_queue", "first_step", "decode"):
        assert told["kvrelay-decode"][f"kvrelay.{name}_ms"] >= 0


def test_log_lines_are_json_with_the_ids_of_request_and_trace(
    cluster: Cluster, request_id: str
) -> None:
    assert cluster.router is not None
    for process in (cluster.router, *cluster.nodes):
        lines = wait_until(lambda process=process: ended(process.log, request_id), "its line")
        (line,) = lines
        assert line["trace_id"] == TRACE
        assert line["process"] == process.role
        assert line["total_ms"] > 0
        assert f"id={request_id}" in line["message"]


def ended(log: Path, request_id: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    assert all({"time", "level", "logger", "process", "message"} <= set(line) for line in lines)
    return [line for line in lines if line.get("request_id") == request_id and "total_ms" in line]


@pytest.fixture(scope="module")
def samples(cluster: Cluster, request_id: str) -> dict[str, set[frozenset[tuple[str, str]]]]:
    """All samples of all processes: name -> the labels of each series."""
    assert cluster.router is not None
    router = f"{cluster.router.url}/metrics"
    # Workers tell once a second what they have counted, both of them.
    wait_until(
        lambda: "kvrelay_router_requests_total{" in httpx2.get(router, timeout=60).text,
        "the request counted",
    )
    found: dict[str, set[frozenset[tuple[str, str]]]] = defaultdict(set)
    for process in (cluster.router, *cluster.nodes):
        for family in text_string_to_metric_families(
            httpx2.get(f"{process.url}/metrics", timeout=60).text
        ):
            for sample in family.samples:
                found[sample.name].add(frozenset(sample.labels.items()))
    return found


@pytest.mark.parametrize("query", asked(), ids=lambda query: query.where)
def test_every_metric_and_label_that_is_asked_for_exists(
    query: Asked, samples: dict[str, set[frozenset[tuple[str, str]]]]
) -> None:
    assert query.metrics
    assert OF_PODS in {fact.name for fact in metrics_reference()}
    for metric in query.metrics - {"up", OF_PODS}:
        series = samples[metric]
        assert series, f"{metric} is not there"
        missing = query.kept - BY_PROMETHEUS - {name for labels in series for name, _ in labels}
        assert not missing, f"{metric} has no label {missing}"
    for metric, label, how, value in query.selected:
        if metric != "up" and label not in BY_PROMETHEUS:
            values = {had for labels in samples[metric] for name, had in labels if name == label}
            assert values, f"{metric} has no label {label}"
            assert how == "=~" or value in values, f"{metric} has no {label}={value}"


def test_the_reference_names_all_that_is_served(
    samples: dict[str, set[frozenset[tuple[str, str]]]],
) -> None:
    facts = {fact.name: fact for fact in metrics_reference()}
    for name, series in samples.items():
        bare = name if name in facts else re.sub(r"_(bucket|sum|count|created)$", "", name)
        if name.endswith("_created") and f"{bare}_total" in facts:
            bare = f"{bare}_total"
        assert bare in facts, name
        assert {label for labels in series for label, _ in labels} - {"le"} <= set(
            facts[bare].labels
        ), name


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }
