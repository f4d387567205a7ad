"""When each stage of a request happened, for its log line and the histograms. Times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Timeline"]


@dataclass(slots=True)
class Timeline:
    """One request. A stage that was not reached stays None; `first_token` and `last_token` are for any leg."""

    arrived: float
    sent: float | None = None
    """The prefill leg was sent."""
    handed_over: float | None = None
    """The prefill leg ended."""
    decoding: float | None = None
    """The first tokens of a decode leg came."""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    inside_ms: dict[str, float] = field(default_factory=dict)
    """What the nodes say of the stages inside their engines, each by its own clock."""

    def tokens(self, now: float, decoding: bool) -> None:
        """Tokens came from a leg."""
        if self.first_token is None:
            self.first_token = now
        if decoding and self.decoding is None:
            self.decoding = now
        self.last_token = now

    def inside(self, leg: str, timing_ms: dict[str, float]) -> None:
        """A node told how its leg was spent; stages that took no time are left out."""
        self.inside_ms |= {f"{leg}.{name}": took for name, took in timing_ms.items() if took}

    def line(self) -> str:
        """All stages in milliseconds, for the log."""
        every = {name: seconds * 1e3 for name, seconds in self.stages_s().items()} | self.inside_ms
        return " ".join(f"{name}_ms={took:.1f}" for name, took in every.items())

    def stages_s(self) -> dict[str, float]:
        """Seconds from stage to stage, of the stages that were entered; a broken stage lasts until the end."""
        points = [self.arrived, self.sent, self.handed_over, self.decoding, self.ended]
        stages: dict[str, float] = {}
        for at, name in enumerate(("queue", "prefill", "handover", "decode")):
            start, end = points[at], next((point for point in points[at + 1 :] if point is not None), None)
            if start is not None and end is not None:
                # A decode leg that has begun early may have the first token before the prefill leg is done.
                stages[name] = max(0.0, end - start)
        if self.ended is not None:
            stages["total"] = self.ended - self.arrived
        return stages

    def inter_token_s(self, tokens: int) -> float | None:
        """Mean time between tokens, or None with fewer than two."""
        if tokens < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (tokens - 1)
