"""The log of requests that end: metrics, console, log line, span of the trace.

Output tokens are counted once a second: to count each would cost as much as all else per token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvrelay.openai_api.stages import STAGES, StageTime
from kvrelay.openai_api.tracing import Attribute, RequestSpan, Tracing, trace_headers, trace_id_of
from kvrelay.router.console.snapshot import ConsoleState
from kvrelay.router.ended_request import EndedRequest
from kvrelay.router.metrics import Metrics
from kvrelay.router.relay import CLIENT_GONE
from kvrelay.router.request.job import Job
from kvrelay.router.request.run import Run
from kvrelay.router.request.timeline import Timeline
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.log_lines import Fields

__all__ = ["COUNT_S", "RequestLog", "RequestTrace", "TokenCounter", "shown_error"]

COUNT_S = 1.0
_SHOWN_CHARS = 200
_OWN_WORDS = (401, 403, 404, 429)  # their messages have names and numbers, never a prompt

_log = logging.getLogger("kvrelay.router")


class RequestTrace:
    """A request's trace: the client's, else a new one if there is tracing."""

    def __init__(
        self,
        tracing: Tracing | None,
        path: str,
        header: Callable[[str], str | None],
        arrived: float,
    ) -> None:
        """`arrived` is in monotonic seconds."""
        self.headers = trace_headers(header)
        self.span: RequestSpan | None = None
        if tracing is not None:
            self.span = tracing.begin(f"POST {path}", self.headers, arrived)
            self.headers = self.span.headers


class _Counted(Protocol):
    @property
    def output_tokens(self) -> int: ...


@dataclass(slots=True)
class _Known:
    key: str
    model: str
    tokens: int = 0


class TokenCounter:
    """A count of the output tokens of all running requests of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: dict[_Counted, _Known] = {}
        metrics.running.read = lambda: Counter(known.model for known in self._known.values())

    def add(self, run: _Counted, key: str, model: str) -> None:
        """Begin to count a request of this API key and model; `remove` must follow."""
        self._known[run] = _Known(key, model)

    def remove(self, run: _Counted) -> str:
        """Count the rest of a request that ended, and return its model."""
        known = self._known.pop(run)
        self._count(run, known)
        return known.model

    def count(self) -> None:
        """Count the tokens that are new since the last time."""
        for run, known in self._known.items():
            self._count(run, known)

    def _count(self, run: _Counted, known: _Known) -> None:
        more = run.output_tokens - known.tokens
        if more <= 0:  # also while another node repeats tokens that were counted
            return
        known.tokens += more
        self._metrics.output_tokens.labels(known.model).inc(more)
        self._metrics.admission.tokens.labels(known.key, "output").inc(more)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            self.count()


class RequestLog:
    """A record of requests that are refused or end."""

    def __init__(self, metrics: Metrics, console: ConsoleState) -> None:
        self._metrics, self._console = metrics, console
        self.tokens = TokenCounter(metrics)

    def refused(
        self,
        job_id: str,
        path: str,
        key: str,
        why: KvrelayError,
        trace: RequestTrace | None,
        job: Job | None,
    ) -> None:
        """Record a request that was refused before it ran; `job` is None if it was not parsed."""
        self._metrics.refused(path, why.status, "" if job is None else job.model)
        more = Fields() if job is None else Fields(model=job.model, prompt_tokens=job.prompt_tokens)
        error = more["error"] = shown_error(why)
        _log.info("id=%s path=%s status=%d key=%s %s", job_id, path, why.status, key, more)
        if trace is not None and trace.span is not None:
            about = _attributes(job_id, path, why.status)
            trace.span.end((), about, time.monotonic(), error)

    def finished(
        self,
        run: Run,
        key: str,
        path: str,
        status: int,
        why: KvrelayError | None,
        trace: RequestTrace,
    ) -> None:
        timeline, now = run.timeline, time.monotonic()
        stages_s = timeline.stages_s(now)
        error = "" if why is None else shown_error(why)
        model = self.tokens.remove(run)
        request = self._console.add(run, path, status, key, error, stages_s)
        self._metrics.finished(model, request)
        more = Fields({f"{name}_ms": stages_s[name] * 1e3 for name in STAGES if name in stages_s})
        more |= {"model": request.model, "client_gone": "yes" if status == CLIENT_GONE else "no"}
        if trace.headers:
            more["trace"] = trace_id_of(trace.headers["traceparent"])
        if error:
            more["error"] = error
        more["placed"] = repr(request.placed)
        _log.info(
            "id=%s path=%s status=%d key=%s prompt_tokens=%s output_tokens=%d prefill=%s "
            "decode=%s %s",
            request.id,
            path,
            status,
            key,
            "-" if request.prompt_tokens is None else request.prompt_tokens,
            request.output_tokens,
            request.prefill,
            request.decode,
            more,
        )
        if trace.span is not None:
            about = _attributes(request.id, path, status) | _about(request, run.job.max_tokens)
            trace.span.end(_stage_times(timeline, stages_s, now), about, now, error)


def shown_error(why: KvrelayError) -> str:
    """Return an error for a log line; a client's mistake may quote its prompt, so only its kind."""
    if 400 <= why.status < 500 and why.status not in _OWN_WORDS:
        body = why.body()
        return (
            f"{body.type} param={(body.param or '-')[:_SHOWN_CHARS]!r} "
            f"code={str(body.code or '-')[:_SHOWN_CHARS]!r}"
        )
    return repr(why.message[:_SHOWN_CHARS])


def _stage_times(
    timeline: Timeline, stages_s: Mapping[str, float], ended: float
) -> list[StageTime]:
    # Stages that the router sees; the nodes' spans have the others.
    sent, prefilled = timeline.sent, timeline.prefilled
    times = [StageTime("queue", timeline.arrived, ended if sent is None else sent)]
    if prefilled is not None and "announce" in stages_s:
        times.append(StageTime("announce", prefilled, prefilled + stages_s["announce"]))
    if (first := timeline.first_token) is not None:
        times.append(StageTime("answer", first, timeline.last_token or first))
    return times


def _attributes(job_id: str, path: str, status: int) -> dict[str, Attribute]:
    return {
        "kvrelay.request_id": job_id,
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": status,
    }


def _about(request: EndedRequest, max_tokens: int | None) -> dict[str, Attribute]:
    # OpenTelemetry's names for generative AI where it has any.
    values: dict[str, Attribute | None] = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": max_tokens or None,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "gen_ai.latency.time_to_first_token": request.ttft_s,
        "kvrelay.key": request.key,
        "kvrelay.prefill_node": request.prefill,
        "kvrelay.decode_node": request.decode,
    }
    stages = {
        f"kvrelay.stage.{name}_ms": round(took * 1e3, 3) for name, took in request.stages_s.items()
    }
    return stages | {name: value for name, value in values.items() if value is not None}
