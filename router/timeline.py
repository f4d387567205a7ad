"""When each stage of a request happened, for its log line, the histograms and the answer. Times are monotonic seconds.

The stages are those of openai_api/stages.py. The nodes tell of what happened inside them, each by its own clock; what
lies between is seen from here, by one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from openai_api.stages import STAGES, TOLD, with_stages

__all__ = ["Timeline"]


@dataclass(slots=True)
class Timeline:
    """One request. A point that was not reached stays None; `first_token` and `last_token` are for any leg."""

    arrived: float
    sent: float | None = None
    """The prefill leg was sent."""
    prefilled: float | None = None
    """The prefill leg told of the first token."""
    handed_over: float | None = None
    """The prefill leg ended with a hand-over."""
    stepped: float | None = None
    """A decode leg told of a token that is not the first of the answer."""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    local: bool = False
    """A decode node has computed the prompt, and nothing was there before."""
    prefill_ms: dict[str, float] = field(default_factory=dict)
    decode_ms: dict[str, float] = field(default_factory=dict)
    """What the nodes of the last legs say of the stages inside their engines."""

    def tokens(self, now: float) -> None:
        """Tokens came from a leg."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    def told(self, place: int, now: float, decoding: bool) -> None:
        """A leg is `place` tokens into the answer, whoever was the first to tell of them."""
        if not decoding and self.prefilled is None:
            self.prefilled = now
        elif decoding and place > 1 and self.stepped is None:
            self.stepped = now

    def inside(self, timing_ms: dict[str, float], decoding: bool) -> None:
        """A node told how its leg was spent."""
        if decoding:
            self.decode_ms = timing_ms
        else:
            self.prefill_ms = timing_ms

    def stages_s(self, now: float) -> dict[str, float]:
        """Seconds in each stage that was entered, if the request ended now. Of a broken leg the time seen from here."""
        stages = {name: took / 1e3 for name, took in self.decode_ms.items() if name in STAGES}
        waited = stages.pop("queue", 0.0)
        stages["queue"] = (now if self.sent is None else self.sent) - self.arrived
        if self.local:
            stages["queue"] += waited
        elif self.decode_ms:
            # A decode leg without a ticket has computed the prompt itself, and waited for that.
            stages["decode_queue"] = stages.get("decode_queue", 0.0) + waited
        if self.prefill_ms:
            stages["queue"] += self.prefill_ms.get("queue", 0.0) / 1e3
            stages["prefill"] = stages.get("prefill", 0.0) + self.prefill_ms.get("prefill", 0.0) / 1e3
        elif self.sent is not None and not self.decode_ms:
            stages.setdefault("prefill", (now if self.handed_over is None else self.handed_over) - self.sent)
        if self.prefilled is not None and self.stepped is not None and TOLD in self.decode_ms:
            # Both ways lead through a node's HTTP process and one connection: they cancel out.
            stages["announce"] = max(0.0, self.stepped - self.prefilled - self.decode_ms[TOLD] / 1e3)
        if self.handed_over is not None:
            stages.setdefault("decode", now - self.handed_over)
        stages["total"] = now - self.arrived
        return stages

    def stamped(self, end: bytes, now: float) -> bytes:
        """The end of an answer, with the stages until now."""
        return with_stages(end, {name: took * 1e3 for name, took in self.stages_s(now).items()})

    def inter_token_s(self, tokens: int, answers: int = 1) -> float | None:
        """Mean time between tokens of one answer, of so many that came beside each other with so many tokens in all; or
        None if each has fewer than two."""
        each = tokens / answers
        if each < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (each - 1)
