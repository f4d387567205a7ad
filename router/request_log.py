"""The log of requests that end: metrics, console, log line, span of the trace.

Output tokens are counted when somebody looks: counting each would double the cost per token.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.openai_api.headers import trace_id_of
from kvrelay.openai_api.stages import MOVED, STAGES
from kvrelay.openai_api.tracing import RequestSpan
from kvrelay.router.metrics import Metrics
from kvrelay.router.request.job import Job
from kvrelay.router.request.joined import last_timeline, prompt_tokens_of, rungs_of
from kvrelay.router.request.run import RequestRun
from kvrelay.router.state import KEPT_REQUESTS
from kvrelay.router.timeline import EndedRequest
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.log_lines import Fields, shown_error

__all__ = ["RequestLog"]

_LOGGED = ("id", "path", "status", "key", "prompt_tokens", "output_tokens", "prefill", "decode")
_OTEL = {
    "id": "kvrelay.request_id",
    "path": "http.route",
    "status": "http.response.status_code",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
}
"""OpenTelemetry's names of fields of the log line."""

_log = logging.getLogger("kvrelay.router")


@dataclass(slots=True)
class Running:
    runs: Sequence[RequestRun]
    key: str
    model: str
    counted: int = 0


class RequestLog:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.ended: deque[EndedRequest] = deque(maxlen=KEPT_REQUESTS)
        self.running: dict[str, Running] = {}
        metrics.running = self._levels

    def begin(self, job: Job, runs: Sequence[RequestRun], key: str) -> None:
        """Note a request that begins, a run per prompt; `finished` must follow."""
        self.running[job.node_id] = Running(runs, key, self._metrics.model_of(job.model))

    def _levels(self) -> Counter[str]:
        # At a scrape, and for the console: first the tokens that came since the last time.
        for each in self.running.values():
            self._count(each)
        return Counter(each.model for each in self.running.values())

    def _count(self, request: Running) -> None:
        more = sum(run.output_tokens for run in request.runs) - request.counted
        if more <= 0:  # also while another node repeats tokens that were counted
            return
        request.counted += more
        self._metrics.counts["output_tokens"] += more
        self._metrics.output_tokens.labels(request.model).inc(more)
        self._metrics.key_tokens.labels(request.key, "output").inc(more)

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
        line = Fields(id=job_id, path=path, status=why.status, key=key)
        if job is not None:
            line |= {"model": job.model, "prompt_tokens": job.prompt_tokens}
        line["error"] = shown_error(why)
        _tell(line, span, time.monotonic())

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
        runs, tokens, timeline = running.runs, running.counted, last_timeline(running.runs)
        prefill, decode = (
            ",".join(sorted({run.nodes[role] for run in runs}))
            for role in (Role.PREFILL, Role.DECODE)
        )
        first = timeline.first_token
        request = EndedRequest(
            id=job.id,
            path=path,
            model=job.model,
            key=running.key,
            status=status,
            error="" if why is None else shown_error(why),
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
            rungs=dict(+rungs_of(runs)),
            placed="; ".join(str(run.placed.placement) if run.placed else "-" for run in runs),
        )
        self.ended.append(request)
        self._metrics.finished(running.model, request)
        _tell(_line(request, trace), span, now)


def _line(request: EndedRequest, trace: Mapping[str, str]) -> Fields:
    stages_s = request.stages_s
    known = {name: getattr(request, name) for name in _LOGGED}
    known |= {f"{name}_ms": stages_s[name] * 1e3 for name in STAGES if name in stages_s}
    known |= {
        "model": request.model,
        "trace": trace_id_of(trace.get("traceparent", "")),
        "error": request.error,
        "rungs": " ".join(f"{rung}={count}" for rung, count in request.rungs.items()),
        "placed": request.placed,
    }
    return Fields({name: value for name, value in known.items() if value not in ("", None)})


def _tell(line: Fields, span: RequestSpan | None, ended: float) -> None:
    _log.info("%s", line)
    if span is not None:
        attributes: dict[str, Any] = {
            _OTEL.get(name, f"kvrelay.{name}"): value for name, value in line.items()
        }
        attributes["http.request.method"] = "POST"
        span.end(attributes, ended, attributes.get("kvrelay.error", ""))
