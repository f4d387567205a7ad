"""The log of requests that end: metrics, console, log line, span of the trace.

Output tokens are counted once a second: counting each would double the cost per token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.openai_api.headers import trace_id_of
from kvrelay.openai_api.stages import MOVED, STAGES, StageTime
from kvrelay.openai_api.tracing import Attribute, RequestSpan
from kvrelay.router.metrics import Metrics
from kvrelay.router.relay import CLIENT_GONE
from kvrelay.router.request.job import Job
from kvrelay.router.request.multi_prompt import last_timeline, prompt_tokens_of
from kvrelay.router.request.run import Run
from kvrelay.router.timeline import EndedRequest, Timeline
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.log_lines import Fields

__all__ = ["COUNT_S", "RequestLog", "shown_error"]

COUNT_S = 1.0
_SHOWN_CHARS = 200
_OWN_WORDS = (401, 403, 404, 429)  # their messages have names and numbers, never a prompt

_log = logging.getLogger("kvrelay.router")


@dataclass(slots=True)
class Running:
    runs: Sequence[Run]
    key: str
    model: str
    counted: int = 0


class RequestLog:
    def __init__(self, metrics: Metrics, ended: deque[EndedRequest]) -> None:
        self._metrics, self._ended = metrics, ended
        self.running: dict[str, Running] = {}
        metrics.running = lambda: Counter(each.model for each in self.running.values())

    def begin(self, job: Job, runs: Sequence[Run], key: str) -> None:
        """Note a request that begins, a run per prompt; `finished` must follow."""
        self.running[job.node_id] = Running(runs, key, self._metrics.model_of(job.model))

    def count(self) -> None:
        for each in self.running.values():
            self._count(each)

    def _count(self, request: Running) -> None:
        more = sum(run.output_tokens for run in request.runs) - request.counted
        if more <= 0:  # also while another node repeats tokens that were counted
            return
        request.counted += more
        self._metrics.output_tokens.labels(request.model).inc(more)
        self._metrics.admission.tokens.labels(request.key, "output").inc(more)

    async def count_for_ever(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            self.count()

    def refused(
        self,
        job_id: str,
        path: str,
        key: str,
        why: KvrelayError,
        span: RequestSpan | None,
        job: Job | None,
    ) -> None:
        """Record a request refused before it ran; `job` is None if unparsed."""
        self._metrics.refused(path, why.status, "" if job is None else job.model)
        more = Fields() if job is None else Fields(model=job.model, prompt_tokens=job.prompt_tokens)
        error = more["error"] = shown_error(why)
        _log.info("id=%s path=%s status=%d key=%s %s", job_id, path, why.status, key, more)
        if span is not None:
            span.end((), _attributes(job_id, path, why.status), time.monotonic(), error)

    def finished(
        self,
        job: Job,
        path: str,
        status: int,
        why: KvrelayError | None,
        trace: Mapping[str, str],
        span: RequestSpan | None,
    ) -> None:
        running, now = self.running.pop(job.node_id), time.monotonic()
        self._count(running)
        error = "" if why is None else shown_error(why)
        timeline = last_timeline(running.runs)
        request = _ended(job, running, timeline, path, status, error, now)
        self._ended.append(request)
        self._metrics.finished(running.model, request)
        stages_s = request.stages_s
        more = Fields({f"{name}_ms": stages_s[name] * 1e3 for name in STAGES if name in stages_s})
        more |= {"model": request.model, "client_gone": "yes" if status == CLIENT_GONE else "no"}
        if trace:
            more["trace"] = trace_id_of(trace["traceparent"])
        if error:
            more["error"] = error
        more["placed"] = repr(request.placed)
        _log.info(
            "id=%s path=%s status=%d key=%s prompt_tokens=%s output_tokens=%d prefill=%s "
            "decode=%s %s",
            request.id,
            path,
            status,
            request.key,
            "-" if request.prompt_tokens is None else request.prompt_tokens,
            request.output_tokens,
            request.prefill,
            request.decode,
            more,
        )
        if span is not None:
            about = _attributes(request.id, path, status) | _about(request, job.max_tokens)
            span.end(_stage_times(timeline, stages_s, now), about, now, error)


def _ended(
    job: Job,
    running: Running,
    timeline: Timeline,
    path: str,
    status: int,
    error: str,
    now: float,
) -> EndedRequest:
    runs, first, tokens = running.runs, timeline.first_token, running.counted
    prefill, decode = (
        ",".join(sorted({run.nodes[role] for run in runs})) for role in (Role.PREFILL, Role.DECODE)
    )
    return EndedRequest(
        id=job.id,
        path=path,
        model=job.model,
        key=running.key,
        status=status,
        error=error,
        stream=job.stream,
        local=timeline.local,
        ended=time.time(),
        ttft_s=None if first is None else first - timeline.arrived,
        inter_token_s=timeline.inter_token_s(tokens, job.choices * len(runs)),
        prompt_tokens=prompt_tokens_of(runs),
        cached_tokens=sum(run.cached_tokens for run in runs),
        output_tokens=tokens,
        prefill=prefill,
        decode=decode,
        kv_bytes=sum(int(run.timeline.decode_ms.get(MOVED, 0)) for run in runs),
        stages_s=timeline.stages_s(now),
        placed="; ".join(str(run.placed.placement) if run.placed else "-" for run in runs),
    )


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
    # The nodes' spans have the other stages.
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
