"""What becomes known of one leg while it runs, and where it goes at its end: metrics, a log line, a
span of its trace.

Reads updates as they pass; changes none of them, and costs a token well under a microsecond and a
clock.
"""

from __future__ import annotations

import logging
import time

import msgspec

from kvrelay.node.metrics import NodeMetrics
from kvrelay.node.serving import Call
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.stages import STAGES, stage_times, stages_ms
from kvrelay.openai_api.tracing import Attribute, RequestSpan, Tracing, trace_id_of
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import RequestUpdate, Timing
from kvrelay.wire.log_lines import Fields
from kvrelay.wire.outputs import Finish

__all__ = ["Account"]

log = logging.getLogger("kvrelay.node")

_SPANS = {Role.PREFILL: "prefill leg", Role.DECODE: "decode leg", Role.AGGREGATED: "request"}


class Account:
    """Of one leg: `submitted` once it is submitted, `heard` for each update, `close` once."""

    def __init__(
        self,
        leg: NodeRequest,
        call: Call,
        role: Role,
        metrics: NodeMetrics | None,
        tracing: Tracing | None,
    ) -> None:
        self._leg, self._call, self._role, self._metrics = leg, call, role, metrics
        self._began = self._told = time.monotonic()
        self._first_token_s: float | None = None
        self._tokens = 0
        self.last: RequestUpdate | None = None
        """The newest update."""
        self._span: RequestSpan | None = None
        if tracing is not None:
            self._span = tracing.begin(_SPANS[role], call.trace, self._began)

    def submitted(self) -> None:
        """The engine has been asked."""
        submits = self._leg.submits
        if self._metrics is not None and submits:
            self._metrics.began(
                len(submits[0].prompt_token_ids),
                submits[0].params.max_tokens,
                len(self._leg.writer.choices),
                fetches=submits[0].fetch is not None,
            )

    def heard(self, update: RequestUpdate) -> None:
        """The engine has said something of the leg."""
        self.last = update
        if not update.token_ids:
            return
        now = time.monotonic()
        self._tokens += len(update.token_ids)
        if self._metrics is not None and self._first_token_s is not None:
            self._metrics.next_tokens(now - self._told)
        elif self._first_token_s is None:
            self._first_token_s = now - self._began
        self._told = now

    def close(self, error: str | None) -> None:
        """It has ended; `error`: why it broke."""
        ended = time.monotonic()
        total_s, last, finish = ended - self._began, self.last, self._leg.finish or Finish.ABORT
        timing = self._timing(total_s)
        if self._metrics is not None:
            if self._first_token_s is not None:
                self._metrics.first_token(self._first_token_s)
            not_fetched = last is not None and last.fetch_error is not None
            self._metrics.ended(finish, total_s, self._tokens, timing, not_fetched=not_fetched)
        stages = {} if timing is None else stages_ms(timing)
        self._log(finish, total_s, timing, stages, error)
        if self._span is not None:
            times = [] if timing is None else stage_times(timing, self._began, ended)
            self._span.end(times, self._attributes(finish, timing, stages), ended, error or "")

    def _timing(self, total_s: float) -> Timing | None:
        timing, last = self._leg.timing, self.last
        if timing is not None and (
            last is None or last.timing is not timing or last.finish is None
        ):
            # It ended here and not in the engine, which has told of its beginning only; or another
            # choice was the last.
            decode_s = max(0.0, total_s - timing.queue_s - timing.prefill_s - timing.transfer_s)
            timing = msgspec.structs.replace(timing, decode_s=decode_s)
        return timing

    def _log(
        self,
        finish: Finish,
        total_s: float,
        timing: Timing | None,
        stages: dict[str, float],
        error: str | None,
    ) -> None:
        more = Fields()
        if timing is not None and timing.draft_tokens:
            more |= {"drafted": timing.draft_tokens, "accepted": timing.accepted_tokens}
        more |= {f"{name}_ms": stages[name] for name in STAGES if name in stages}
        more["total_ms"] = total_s * 1e3
        if trace := trace_id_of(self._call.trace.get("traceparent", "")):
            more["trace"] = trace
        if error:
            more["error"] = error
        log.info(
            "id=%s finish=%s prompt=%d cached=%d out=%d %s",
            self._call.id,
            finish,
            self._leg.writer.prompt_tokens,
            self.last.cached_tokens if self.last is not None else 0,
            self._tokens,
            more,
        )

    def _attributes(
        self, finish: Finish, timing: Timing | None, stages: dict[str, float]
    ) -> dict[str, Attribute]:
        """By OpenTelemetry's names for generative AI where it has any."""
        writer = self._leg.writer
        told: dict[str, Attribute] = {
            "kvrelay.request_id": self._call.id,
            "kvrelay.role": str(self._role),
            "kvrelay.prompt_cached_tokens": self.last.cached_tokens if self.last is not None else 0,
            "gen_ai.request.model": writer.model,
            "gen_ai.usage.input_tokens": writer.prompt_tokens,
            "gen_ai.usage.output_tokens": self._tokens,
            "gen_ai.response.finish_reasons": str(finish),
        }
        if timing is not None and timing.transfer_bytes:
            told["kvrelay.transfer_bytes"] = timing.transfer_bytes
        if self._first_token_s is not None:
            told["gen_ai.latency.time_to_first_token"] = self._first_token_s
        return told | {
            f"kvrelay.stage.{name}_ms": took for name, took in stages.items() if name in STAGES
        }
