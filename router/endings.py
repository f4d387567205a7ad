"""Where a request leaves what was measured of it when it has ended: metrics, console, one log line, the span of its
trace. Its tokens are counted before, by router/flow.py.

Measures nothing itself: a timeline and a walk have it all. Without tracing a request costs nothing for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from openai_api.stage_times import StageTime
from openai_api.stages import STAGES
from openai_api.tracing import Attribute, RequestSpan, Tracing, sane_trace, trace_id_of
from router.console.lookout import Lookout
from router.entry import shown_error
from router.flow import Flow
from router.metrics import Metrics
from router.relay import CLIENT_GONE
from router.timeline import Timeline
from router.vllm.walk import VllmWalk
from router.walk.handoff import Walk
from router.walk.job import Job
from router.walk.joined_walk import JoinedWalk
from wire.errors import KvrelayError
from wire.log_lines import Fields

__all__ = ["Endings", "Traced"]

_log = logging.getLogger("kvrelay.router")


class _Stages(Fields):
    """Seconds in each stage, as milliseconds; for every request, so made with as little as can be."""

    def __str__(self) -> str:
        return " ".join([f"{name}_ms={self[name] * 1e3:.2f}" for name in STAGES if name in self])  # type: ignore[operator]

    def named(self) -> Mapping[str, object]:
        """As JSON has them."""
        return {f"{name}_ms": self[name] * 1e3 for name in STAGES if name in self}  # type: ignore[operator]


class Traced:
    """The trace that a request is part of: the client's, or a new one if there is tracing here, or none."""

    __slots__ = ("headers", "span")

    def __init__(self, tracing: Tracing | None, path: str, header: Callable[[str], str | None], arrived: float) -> None:
        """`arrived`: monotonic seconds."""
        self.headers = sane_trace(header)
        """What nodes are told of it."""
        self.span: RequestSpan | None = None
        if tracing is not None:
            self.span = tracing.begin(f"POST {path}", self.headers, arrived)
            self.headers = self.span.headers


class Endings:
    """Of all requests of a router."""

    def __init__(self, metrics: Metrics, lookout: Lookout) -> None:
        self._metrics, self._lookout = metrics, lookout
        self.flow = Flow(metrics, lookout.recent.flowed)

    def begins(self, walk: Walk | JoinedWalk | VllmWalk, key: str) -> None:
        """A request begins, or waits for its turn; `finished` must follow."""
        self.flow.begins(walk, key, self._metrics.model_of(walk.job.model))

    def refused(
        self, job_id: str, path: str, key: str, why: KvrelayError, traced: Traced | None, job: Job | None = None
    ) -> None:
        """A request was refused before it began; `job`: what was understood of it."""
        self._metrics.refused(path, why.status, "" if job is None else job.model)
        more = Fields() if job is None else Fields(model=job.model, prompt_tokens=job.prompt_tokens)
        more["error"] = shown_error(why)
        _log.info("id=%s path=%s status=%d key=%s %s", job_id, path, why.status, key, more)
        if traced is not None and traced.span is not None:
            told = _attributes(path, why.status) | {"kvrelay.request_id": job_id}
            traced.span.end((), told, time.monotonic(), shown_error(why))

    def finished(
        self,
        walk: Walk | JoinedWalk | VllmWalk,
        key: str,
        path: str,
        status: int,
        why: KvrelayError | None,
        traced: Traced,
    ) -> None:
        """A request that began has ended."""
        job, timeline, (prefill, decode) = walk.job, walk.timeline, walk.nodes
        timeline.ended = ended = time.monotonic()
        stages_s = timeline.stages_s(ended)
        failed = "" if why is None else shown_error(why)
        model = self.flow.ends(walk, ended)
        self._metrics.finished(model, path, status, timeline, stages_s, walk.output_tokens, walk.answers)
        self._lookout.ended(walk, path, status, key, failed, stages_s)
        more = Fields(model=job.model, client_gone="yes" if status == CLIENT_GONE else "no")
        if traced.headers:
            more["trace"] = trace_id_of(traced.headers["traceparent"])
        if why is not None:
            more["error"] = failed
        more["placed"] = repr(walk.placement)
        _log.info(
            "id=%s path=%s status=%d key=%s prompt_tokens=%s output_tokens=%d prefill=%s decode=%s %s %s",
            job.id,
            path,
            status,
            key,
            "-" if walk.prompt_tokens is None else walk.prompt_tokens,
            walk.output_tokens,
            prefill,
            decode,
            _Stages(stages_s),
            more,
        )
        if traced.span is not None:
            told = _attributes(path, status) | _about(job, walk.prompt_tokens, walk.output_tokens, timeline, stages_s)
            told |= {"kvrelay.key": key, "kvrelay.prefill_node": prefill, "kvrelay.decode_node": decode}
            traced.span.end(_stage_times(timeline, stages_s, ended), told, ended, failed)


def _stage_times(timeline: Timeline, stages_s: Mapping[str, float], ended: float) -> list[StageTime]:
    """What is seen from here; the nodes' spans have the rest."""
    times = [StageTime("queue", timeline.arrived, ended if timeline.sent is None else timeline.sent)]
    if timeline.prefilled is not None and "announce" in stages_s:
        times.append(StageTime("announce", timeline.prefilled, timeline.prefilled + stages_s["announce"]))
    if timeline.first_token is not None:
        times.append(StageTime("answer", timeline.first_token, timeline.last_token or timeline.first_token))
    return times


def _attributes(path: str, status: int) -> dict[str, Attribute]:
    return {"http.request.method": "POST", "http.route": path, "http.response.status_code": status}


def _about(
    job: Job, prompt_tokens: int | None, output_tokens: int, timeline: Timeline, stages_s: Mapping[str, float]
) -> dict[str, Attribute]:
    """By OpenTelemetry's names for generative AI where it has any."""
    told: dict[str, Attribute] = {
        "kvrelay.request_id": job.id,
        "gen_ai.request.model": job.model,
        "gen_ai.usage.output_tokens": output_tokens,
    }
    if prompt_tokens is not None:
        told["gen_ai.usage.input_tokens"] = prompt_tokens
    if job.max_tokens:
        told["gen_ai.request.max_tokens"] = job.max_tokens
    if timeline.first_token is not None:
        told["gen_ai.latency.time_to_first_token"] = timeline.first_token - timeline.arrived
    return told | {f"kvrelay.stage.{name}_ms": round(took * 1e3, 3) for name, took in stages_s.items()}
