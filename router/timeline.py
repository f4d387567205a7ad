"""The times of one request, while it runs and when it has ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from kvrelay.openai_api.stages import STAGES, TOLD, with_stages

__all__ = ["EndedRequest", "Timeline"]


@dataclass(slots=True)
class Timeline:
    """A request's times in monotonic seconds; None is a point that was not reached.

    Nodes report their own stages (openai_api/stages.py), each by its own clock.
    """

    arrived: float
    sent: float | None = None
    prefilled: float | None = None
    """When the KV was complete for the router, and the hand-over began."""
    stepped: float | None = None
    """When the newest decode request sent a token that is not the answer's first."""
    first_token: float | None = None
    last_token: float | None = None
    local: bool = False
    """A decode node computed the prompt, and no other node had."""
    prefill_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Stages reported for all prefill requests."""
    decode_ms: dict[str, float] = field(default_factory=dict)
    """Stages of the last decode request."""

    def note_report(self, timing_ms: dict[str, float], *, decoding: bool) -> None:
        if decoding:
            self.decode_ms = timing_ms
            return
        for name, took in timing_ms.items():
            self.prefill_ms[name] += took

    def stages_s(self, now: float) -> dict[str, float]:
        """Return seconds in each stage that a node reported, if the request ended now."""
        decode, prefill = self.decode_ms, self.prefill_ms
        stages = defaultdict(
            float, {name: took / 1e3 for name, took in decode.items() if name in STAGES}
        )
        waited = stages.pop("queue", 0.0)
        stages["queue"] = (now if self.sent is None else self.sent) - self.arrived
        if self.local:
            stages["queue"] += waited
        elif decode:
            # A decode request without a ticket waited to compute the prompt.
            stages["decode_queue"] += waited
        if prefill:
            stages["queue"] += prefill["queue"] / 1e3
            stages["prefill"] += prefill["prefill"] / 1e3
        if self.prefilled is not None and self.stepped is not None and TOLD in self.decode_ms:
            # Both ways lead through one connection: they cancel out.
            announce_s = self.stepped - self.prefilled - self.decode_ms[TOLD] / 1e3
            stages["announce"] = max(0.0, announce_s)
        stages["total"] = now - self.arrived
        return stages

    def with_stages(self, end: bytes, now: float, rungs: Mapping[str, int]) -> bytes:
        stages_ms = {name: took * 1e3 for name, took in self.stages_s(now).items()}
        return with_stages(end, stages_ms, rungs)

    def inter_token_s(self, tokens: int, answers: int) -> float | None:
        """Return the mean time between tokens; None without two in an answer.

        The `answers` have `tokens` in all.
        """
        each, first, last = tokens / answers, self.first_token, self.last_token
        if each < 2 or first is None or last is None or first == last:  # all came at once
            return None
        return (last - first) / (each - 1)


class EndedRequest(msgspec.Struct, frozen=True):
    """A request that has ended. `ended` is a Unix time; unknown figures are None."""

    id: str
    path: str
    model: str
    key: str
    status: int
    """499: the client left. A broken stream has the status it would have had."""
    error: str
    stream: bool
    local: bool
    """A decode node has computed the prompt."""
    ended: float
    ttft_s: float | None
    inter_token_s: float | None
    """The mean time between tokens."""
    prompt_tokens: int | None
    cached_tokens: int
    output_tokens: int
    prefill: str
    decode: str
    """The addresses of the last nodes; `-` is none."""
    kv_bytes: int
    """Bytes that the decode node fetched; 0 if none or unknown."""
    stages_s: dict[str, float]
    """Stages as openai_api/stages.py names them."""
    rungs: dict[str, int] = {}
    """Tokens of the prompts by rung, as wire/ladder.py names them; without zeros."""
    placed: str = "-"
    """Where the request was placed, at what price, and the best other way."""
