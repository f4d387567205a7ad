"""When each stage of a request happened, for its log line, the histograms and the answer. Times are
monotonic seconds.

The stages are those of openai_api/stages.py. The nodes tell of what happened inside them, each by
its own clock; what lies between is seen from here, by one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.openai_api.stages import STAGES, TOLD, with_stages

__all__ = ["AttemptTimes", "Timeline"]


@dataclass(slots=True)
class AttemptTimes:
    """One leg, as the router sees it: what is left of one that never tells how it was spent."""

    began: float
    decoding: bool
    fetches: bool
    """A decode leg that is given KV; any other decode leg computes the prompt."""
    tokens: float | None = None
    """Its first token came; of a decode leg that fetches, the first behind the prefill node's."""
    counted: bool = False
    """Its node has told how it was spent, or its time was counted as seen."""


@dataclass(slots=True)
class Timeline:
    """One request. A point that was not reached stays None; `first_token` and `last_token` are for
    any leg.
    """

    arrived: float
    sent: float | None = None
    """The first leg was sent."""
    prefilled: float | None = None
    """The KV was complete, as far as is known here, and the hand-over began."""
    stepped: float | None = None
    """The newest decode leg told of a token that is not the first of the answer."""
    first_token: float | None = None
    last_token: float | None = None
    local: bool = False
    """A decode node has computed the prompt, and nothing was there before."""
    prefill_ms: dict[str, float] = field(default_factory=dict)
    """What the nodes of all prefill legs say of the stages inside their engines."""
    decode_ms: dict[str, float] = field(default_factory=dict)
    """What the node of the last decode leg says of them."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Stages as seen from here: of legs that told nothing, and between legs."""
    idle: float | None = None
    """Since then no leg is under way, and another one must follow."""
    _lost: bool = False  # the leg before `idle` told nothing
    _open: int = 0  # legs under way
    _computed: float | None = None  # a prefill leg that told nothing was over

    def tokens(self, now: float) -> None:
        """Tokens came from a leg."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    def begins(self, now: float, *, decoding: bool, fetches: bool = False) -> AttemptTimes:
        """A leg is sent; `ends` must follow."""
        if self.sent is None:
            self.sent = now
        if self.idle is not None and self._lost:
            self._spend("queue", now - self.idle)
            self.prefilled = None if self.prefilled is None else now
        self.idle = None
        self._open += 1
        if decoding:
            self.stepped = None
        return AttemptTimes(now, decoding, fetches)

    def told(self, leg: AttemptTimes, place: int, now: float) -> None:
        """A leg whose `tokens` is None is `place` tokens into the answer, whoever was the first to
        tell of them.
        """
        if not leg.decoding:
            leg.tokens = self.prefilled = now
        elif place > 1 or not leg.fetches:
            leg.tokens = self.stepped = now

    def inside(self, timing_ms: dict[str, float], leg: AttemptTimes) -> None:
        """A node told how its leg was spent."""
        leg.counted = True
        if leg.decoding:
            self.decode_ms = timing_ms
        else:
            known = self.prefill_ms
            self.prefill_ms = timing_ms | {
                name: took + timing_ms.get(name, 0.0) for name, took in known.items()
            }

    def seen(self, leg: AttemptTimes, now: float) -> None:
        """A leg is over; if it has told nothing, its time is counted as it was seen from here."""
        if leg.counted:
            return
        leg.counted = True
        came = now if leg.tokens is None else leg.tokens
        if not leg.decoding:
            # Token 1 may have come through the decode leg.
            computed = (
                came if self.first_token is None else min(came, max(leg.began, self.first_token))
            )
            self._spend("prefill", computed - leg.began)
            self._computed = computed
            return
        if not leg.fetches:
            self._spend("prefill", came - leg.began)
        elif (since := self._computed if self.prefilled is None else self.prefilled) is not None:
            self._spend("announce", came - max(leg.began, since))
        if leg.tokens is not None:
            self._spend("decode", now - came)

    def ends(self, leg: AttemptTimes, now: float, *, more: bool) -> None:
        """A leg is over, or was cut. `more`: the answer is not complete."""
        self._open -= 1
        if more and not self._open:
            self.idle, self._lost = now, not leg.counted
        self.seen(leg, now)

    def _spend(self, stage: str, seconds: float) -> None:
        self.spent_s[stage] = self.spent_s.get(stage, 0.0) + max(0.0, seconds)

    def stages_s(self, now: float) -> dict[str, float]:
        """Seconds in each stage that was entered, if the request ended now."""
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
            stages["prefill"] = (
                stages.get("prefill", 0.0) + self.prefill_ms.get("prefill", 0.0) / 1e3
            )
        if self.prefilled is not None and self.stepped is not None and TOLD in self.decode_ms:
            # Both ways lead through a node's HTTP process and one connection: they cancel out.
            stages["announce"] = max(
                0.0, self.stepped - self.prefilled - self.decode_ms[TOLD] / 1e3
            )
        for name, took in self.spent_s.items():
            stages[name] = stages.get(name, 0.0) + took
        if self.idle is not None:
            stages["queue"] += now - self.idle
        stages["total"] = now - self.arrived
        return stages

    def stamped(self, end: bytes, now: float) -> bytes:
        """The end of an answer, with the stages until now."""
        return with_stages(end, {name: took * 1e3 for name, took in self.stages_s(now).items()})

    def inter_token_s(self, tokens: int, answers: int) -> float | None:
        """Return the mean time between tokens of one of so many answers, which have so many tokens
        in all.

        None if each has fewer than two.
        """
        each = tokens / answers
        if each < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (each - 1)
