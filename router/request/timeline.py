"""When each stage of a request (openai_api/stages.py) happened. Monotonic seconds.

Nodes report the stages inside them, each by its own clock; the router sees what lies between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.openai_api.stages import STAGES, TOLD, with_stages

__all__ = ["AttemptTimes", "Timeline"]


@dataclass(slots=True)
class AttemptTimes:
    began: float
    decoding: bool
    fetches: bool
    """A decode request that is given KV; any other one computes the prompt."""
    tokens: float | None = None
    """When the first token came; where KV is fetched, the first after the prefill node's."""
    counted: bool = False
    """The node has reported its stages, or the time was counted as seen from here."""


@dataclass(slots=True)
class Timeline:
    """A request's times; None is a point that was not reached."""

    arrived: float
    sent: float | None = None
    prefilled: float | None = None
    """When the KV was complete, as far as the router sees, and the hand-over began."""
    stepped: float | None = None
    """When the newest decode request sent a token that is not the answer's first."""
    first_token: float | None = None
    last_token: float | None = None
    local: bool = False
    """A decode node computed the prompt, and no other node had."""
    prefill_ms: dict[str, float] = field(default_factory=dict)
    """Stages that the nodes of all prefill requests reported."""
    decode_ms: dict[str, float] = field(default_factory=dict)
    """Stages that the node of the last decode request reported."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Stages as seen from here: of attempts without a report, and between attempts."""
    idle: float | None = None
    """Since when no attempt runs, although another one must follow."""
    _lost: bool = False  # the attempt before `idle` reported nothing
    _running: int = 0
    _computed: float | None = None  # when a prefill request without a report had computed

    def note_tokens(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    def begin_attempt(self, now: float, *, decoding: bool, fetches: bool = False) -> AttemptTimes:
        if self.sent is None:
            self.sent = now
        if self.idle is not None and self._lost:
            self._spend("queue", now - self.idle)
            self.prefilled = None if self.prefilled is None else now
        self.idle = None
        self._running += 1
        if decoding:
            self.stepped = None
        return AttemptTimes(now, decoding, fetches)

    def note_first_token(self, attempt: AttemptTimes, position: int, now: float) -> None:
        """Note an attempt's first token, the answer's `position`th, whoever sent that first."""
        if not attempt.decoding:
            attempt.tokens = self.prefilled = now
        elif position > 1 or not attempt.fetches:
            attempt.tokens = self.stepped = now

    def note_report(self, timing_ms: dict[str, float], attempt: AttemptTimes) -> None:
        """Note the stages that a node reported."""
        attempt.counted = True
        if attempt.decoding:
            self.decode_ms = timing_ms
        else:
            known = self.prefill_ms
            self.prefill_ms = timing_ms | {
                name: took + timing_ms.get(name, 0.0) for name, took in known.items()
            }

    def count_unreported(self, attempt: AttemptTimes, now: float) -> None:
        """Count an attempt's time as seen from here, unless its node reported."""
        if attempt.counted:
            return
        attempt.counted = True
        came = now if attempt.tokens is None else attempt.tokens
        if not attempt.decoding:
            computed = came
            if self.first_token is not None:  # perhaps through the decode request
                computed = min(came, max(attempt.began, self.first_token))
            self._spend("prefill", computed - attempt.began)
            self._computed = computed
            return
        if not attempt.fetches:
            self._spend("prefill", came - attempt.began)
        elif (since := self._computed if self.prefilled is None else self.prefilled) is not None:
            self._spend("announce", came - max(attempt.began, since))
        if attempt.tokens is not None:
            self._spend("decode", now - came)

    def end_attempt(self, attempt: AttemptTimes, now: float, *, more: bool) -> None:
        self._running -= 1
        if more and not self._running:
            self.idle, self._lost = now, not attempt.counted
        self.count_unreported(attempt, now)

    def _spend(self, stage: str, seconds: float) -> None:
        self.spent_s[stage] = self.spent_s.get(stage, 0.0) + max(0.0, seconds)

    def stages_s(self, now: float) -> dict[str, float]:
        """Return seconds in each stage that was entered, if the request ended now."""
        stages = {name: took / 1e3 for name, took in self.decode_ms.items() if name in STAGES}
        waited = stages.pop("queue", 0.0)
        stages["queue"] = (now if self.sent is None else self.sent) - self.arrived
        if self.local:
            stages["queue"] += waited
        elif self.decode_ms:
            # A decode request without a ticket waited to compute the prompt itself.
            stages["decode_queue"] = stages.get("decode_queue", 0.0) + waited
        if self.prefill_ms:
            stages["queue"] += self.prefill_ms.get("queue", 0.0) / 1e3
            prefill_s = self.prefill_ms.get("prefill", 0.0) / 1e3
            stages["prefill"] = stages.get("prefill", 0.0) + prefill_s
        if self.prefilled is not None and self.stepped is not None and TOLD in self.decode_ms:
            # Both ways lead through a node's HTTP process and one connection: they cancel out.
            announce_s = self.stepped - self.prefilled - self.decode_ms[TOLD] / 1e3
            stages["announce"] = max(0.0, announce_s)
        for name, took in self.spent_s.items():
            stages[name] = stages.get(name, 0.0) + took
        if self.idle is not None:
            stages["queue"] += now - self.idle
        stages["total"] = now - self.arrived
        return stages

    def with_stages(self, end: bytes, now: float) -> bytes:
        return with_stages(end, {name: took * 1e3 for name, took in self.stages_s(now).items()})

    def inter_token_s(self, tokens: int, answers: int) -> float | None:
        """Return the mean time between an answer's tokens, where `answers` have `tokens` in all.

        None if each has fewer than two.
        """
        each = tokens / answers
        if each < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (each - 1)
