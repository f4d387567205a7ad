"""Where a request leaves what was measured of it when it has ended: metrics, console, log line,
span of its trace.

Measures nothing itself: a timeline and a walk have it all. Tokens are counted before that, by
router/flow.py. Without tracing a request costs nothing for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from kvrelay.openai_api.stages import STAGES, StageTime
from kvrelay.openai_api.tracing import Attribute, RequestSpan, Tracing, trace_headers, trace_id_of
from kvrelay.router.console.lookout import Lookout
from kvrelay.router.console.recent import Ended
from kvrelay.router.flow import Flow
from kvrelay.router.metrics import Metrics
from kvrelay.router.relay import CLIENT_GONE, AnyRun
from kvrelay.router.request.job import Job
from kvrelay.router.request.timeline import Timeline
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.log_lines import Fields

__all__ = ["RequestLog", "RequestTrace", "shown_error"]

_SHOWN_CHARS = 200
_OWN_WORDS = (401, 403, 404, 429)  # said of names and numbers, never of a prompt

_log = logging.getLogger("kvrelay.router")


class RequestTrace:
    """The trace that a request is part of: the client's, or a new one if there is tracing here, or
    none.
    """

    def __init__(
        self,
        tracing: Tracing | None,
        path: str,
        header: Callable[[str], str | None],
        arrived: float,
    ) -> None:
        """`arrived`: monotonic seconds."""
        self.headers = trace_headers(header)
        """What nodes are told of it."""
        self.span: RequestSpan | None = None
        if tracing is not None:
            self.span = tracing.begin(f"POST {path}", self.headers, arrived)
            self.headers = self.span.headers


class RequestLog:
    """A router's record of the requests that end."""

    def __init__(self, metrics: Metrics, lookout: Lookout) -> None:
        self._metrics, self._lookout = metrics, lookout
        self.flow = Flow(metrics, lookout.recent.flowed)

    def refused(
        self,
        job_id: str,
        path: str,
        key: str,
        why: KvrelayError,
        traced: RequestTrace | None,
        job: Job | None,
    ) -> None:
        """Note a request that was refused before it began; `job`: what was understood of it."""
        self._metrics.refused(path, why.status, "" if job is None else job.model)
        more = Fields() if job is None else Fields(model=job.model, prompt_tokens=job.prompt_tokens)
        more["error"] = shown_error(why)
        _log.info("id=%s path=%s status=%d key=%s %s", job_id, path, why.status, key, more)
        if traced is not None and traced.span is not None:
            traced.span.end(
                (), _attributes(job_id, path, why.status), time.monotonic(), shown_error(why)
            )

    def finished(
        self,
        walk: AnyRun,
        key: str,
        path: str,
        status: int,
        why: KvrelayError | None,
        traced: RequestTrace,
    ) -> None:
        """Note a request that began and has ended."""
        timeline, now = walk.timeline, time.monotonic()
        stages_s = timeline.stages_s(now)
        failed = "" if why is None else shown_error(why)
        model = self.flow.ends(walk, now)
        request = self._lookout.ended(walk, path, status, key, failed, stages_s, now)
        self._metrics.finished(model, request)
        more = Fields({f"{name}_ms": stages_s[name] * 1e3 for name in STAGES if name in stages_s})
        more |= {"model": request.model, "client_gone": "yes" if status == CLIENT_GONE else "no"}
        if traced.headers:
            more["trace"] = trace_id_of(traced.headers["traceparent"])
        if why is not None:
            more["error"] = failed
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
        if traced.span is not None:
            told = _attributes(request.id, path, status) | _about(request, walk.job.max_tokens)
            traced.span.end(_stage_times(timeline, stages_s, now), told, now, failed)


def shown_error(why: KvrelayError) -> str:
    """Return an error for a log line. Of a client's mistake, whose words it may repeat, its kind
    alone is told.
    """
    if 400 <= why.status < 500 and why.status not in _OWN_WORDS:
        told = why.body()
        return (
            f"{told.type} param={(told.param or '-')[:_SHOWN_CHARS]!r} "
            f"code={str(told.code or '-')[:_SHOWN_CHARS]!r}"
        )
    return repr(why.message[:_SHOWN_CHARS])


def _stage_times(
    timeline: Timeline, stages_s: Mapping[str, float], ended: float
) -> list[StageTime]:
    """Return what is seen from here; the nodes' spans have the rest."""
    times = [
        StageTime("queue", timeline.arrived, ended if timeline.sent is None else timeline.sent)
    ]
    if timeline.prefilled is not None and "announce" in stages_s:
        times.append(
            StageTime("announce", timeline.prefilled, timeline.prefilled + stages_s["announce"])
        )
    if timeline.first_token is not None:
        times.append(
            StageTime("answer", timeline.first_token, timeline.last_token or timeline.first_token)
        )
    return times


def _attributes(job_id: str, path: str, status: int) -> dict[str, Attribute]:
    return {
        "kvrelay.request_id": job_id,
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": status,
    }


def _about(request: Ended, max_tokens: int | None) -> dict[str, Attribute]:
    """Return what a request was, by OpenTelemetry's names for generative AI where it has any."""
    told: dict[str, Attribute | None] = {
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
    return stages | {name: value for name, value in told.items() if value is not None}
