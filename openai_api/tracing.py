"""OpenTelemetry traces: a span for each request, by OTLP over HTTP.

The SDK is imported only for a configured endpoint; its variables (OTEL_*) apply. Spans are made
when a request has ended.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = [
    "RequestSpan",
    "Tracing",
    "otlp_endpoint",
    "start_tracing",
]

_OURS, _ALL = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_FLUSH_S = 3.0


def otlp_endpoint(configured: str, environ: Mapping[str, str]) -> str:
    if (
        environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "") == "none"
    ):
        return ""
    base = environ.get(_ALL, "").rstrip("/")
    return configured or environ.get(_OURS, "") or (f"{base}/v1/traces" if base else "")


def start_tracing(configured: str, service: str) -> Tracing | None:
    """Return this process's tracing, None without an endpoint. Raises ConfigError."""
    endpoint = otlp_endpoint(configured, os.environ)
    return Tracing(endpoint, service) if endpoint else None


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A request in this process; `headers` go with its own requests."""

    _span: Span
    headers: dict[str, str]

    def end(self, attributes: Mapping[str, Any], ended: float, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_wall_ns(ended))


def _wall_ns(at: float) -> int:
    return int(at * 1e9) + time.time_ns() - time.monotonic_ns()


class Tracing:
    """A process's spans, sent in the background or dropped."""

    def __init__(self, endpoint: str, service: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as why:
            raise ConfigError(
                f"traces are to go to {endpoint}, and OpenTelemetry is not installed ({why}); pip "
                "install 'kvrelay[tracing]', or leave the endpoint out"
            ) from why
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                "traces are sent by OTLP over HTTP, to an http:// or https:// URL, got "
                f"{endpoint!r}"
            )
        named = os.environ.get("OTEL_SERVICE_NAME") or service
        # Pods share an address, and the workers of a router a port.
        instance = f"{socket.gethostname()}:{os.getpid()}"
        resource = Resource.create({"service.name": named, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("kvrelay")
        self._carrier = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, str], began: float) -> RequestSpan:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent, passed_on = self._carrier.extract(dict(headers), Context()), dict[str, str]()
        kind, start = SpanKind.SERVER, _wall_ns(began)
        span = self._tracer.start_span(name, parent, kind, start_time=start)
        self._carrier.inject(passed_on, set_span_in_context(span, Context()))
        return RequestSpan(span, passed_on)

    def close(self, within_s: float = _FLUSH_S) -> None:
        """Send what is left, blocking at most `within_s`."""
        # On a thread, because it would wait too long for a collector that hangs.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(within_s)
