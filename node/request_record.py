"""A record of one request on a node: its metrics, its log line, and a span of its trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from msgspec.structs import replace

from kvrelay.node.metrics import NodeMetrics
from kvrelay.node.serving import Call
from kvrelay.openai_api.headers import trace_id_of
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.stages import STAGES, stages_ms
from kvrelay.openai_api.tracing import RequestSpan, Tracing
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import RequestUpdate, Timing
from kvrelay.wire.log_lines import Fields
from kvrelay.wire.outputs import Finish

__all__ = ["RequestRecord"]

log = logging.getLogger("kvrelay.node")

_OTEL = {
    "id": "kvrelay.request_id",
    "finish": "gen_ai.response.finish_reasons",
    "prompt": "gen_ai.usage.input_tokens",
    "out": "gen_ai.usage.output_tokens",
}
"""OpenTelemetry's names of fields of the log line."""
_SPANS = {Role.PREFILL: "prefill leg", Role.DECODE: "decode leg", Role.AGGREGATED: "request"}


class RequestRecord:
    """A record of one request: call `submit` once, `update` for each update, `close` once."""

    def __init__(
        self,
        request: NodeRequest,
        call: Call,
        role: Role,
        metrics: NodeMetrics | None,
        tracing: Tracing | None,
    ) -> None:
        self._request, self._call, self._role, self._metrics = request, call, role, metrics
        self.began = self._last_token_at = time.monotonic()
        self._ttft_s: float | None = None
        self._tokens = 0
        self.last: RequestUpdate | None = None
        self._span: RequestSpan | None = None
        if tracing is not None:
            self._span = tracing.begin(_SPANS[role], call.trace, self.began)

    def submit(self) -> None:
        submits = self._request.submits
        if self._metrics is not None and submits:
            prompt, params = submits[0].prompt_token_ids, submits[0].params
            self._metrics.observe("vllm:request_prompt_tokens", len(prompt))
            self._metrics.observe("vllm:request_max_num_generation_tokens", params.max_tokens)

    def update(self, update: RequestUpdate) -> None:
        self.last = update
        if not update.token_ids:
            return
        now = time.monotonic()
        self._tokens += len(update.token_ids)
        if self._ttft_s is None:
            self._ttft_s = now - self.began
        elif self._metrics is not None:
            gap_s = now - self._last_token_at
            self._metrics.observe("vllm:inter_token_latency_seconds", gap_s)
        self._last_token_at = now

    def close(self, error: str | None, rungs: Mapping[str, int]) -> None:
        ended = time.monotonic()
        total_s, finish = ended - self.began, self._request.finish or Finish.ABORT
        timing = self._timing(total_s)
        if self._metrics is not None:
            not_fetched = self.last is not None and self.last.fetch_error is not None
            of = finish, total_s, self._tokens, timing, self._ttft_s, rungs
            self._metrics.count_end(*of, not_fetched=not_fetched)
        line = self._line(finish, total_s, timing, error)
        log.info("%s", line)
        if self._span is not None:
            told = {_OTEL.get(name, f"kvrelay.{name}"): value for name, value in line.items()}
            told |= {
                "kvrelay.role": str(self._role),
                "gen_ai.request.model": self._request.writer.model,
            }
            if self._ttft_s is not None:
                told["gen_ai.latency.time_to_first_token"] = self._ttft_s
            self._span.end(told, ended, error or "")

    def _timing(self, total_s: float) -> Timing | None:
        timing, last = self._request.timing, self.last
        if timing is not None and (
            last is None or last.timing is not timing or last.finish is None
        ):
            # The engine has only timed its beginning, or another choice was the last.
            decode_s = max(0.0, total_s - timing.queue_s - timing.prefill_s - timing.transfer_s)
            timing = replace(timing, decode_s=decode_s)
        return timing

    def _line(
        self, finish: Finish, total_s: float, timing: Timing | None, error: str | None
    ) -> Fields:
        line = Fields(
            id=self._call.id,
            finish=str(finish),
            prompt=self._request.writer.prompt_tokens,
            cached=0 if self.last is None else self.last.cached_tokens,
            out=self._tokens,
        )
        if timing is not None and timing.draft_tokens:
            line |= {"drafted": timing.draft_tokens, "accepted": timing.accepted_tokens}
        stages = {} if timing is None else stages_ms(timing)
        line |= {f"{name}_ms": stages[name] for name in STAGES if name in stages}
        line["total_ms"] = total_s * 1e3
        if trace := trace_id_of(self._call.trace.get("traceparent", "")):
            line["trace"] = trace
        if error:
            line["error"] = error
        return line
