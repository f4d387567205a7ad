"""Limits of a key: requests and tokens per minute, and requests at once. Pure; times are seconds.

Both rates are token buckets, a minute's worth deep. Tokens are taken by estimate when a request
comes and put right when it is over, so a bucket may owe some, and the next request waits for that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from kvrelay.router.admission.keys import Caller

__all__ = ["KeyLimits", "Refusal", "shown_s"]

_MINUTE_S = 60.0
_ROUNDING = 1e-6  # of a level that was waited for


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal to begin a request. `reason` is one of few words, for metrics."""

    reason: str
    message: str
    retry_after_s: float | None
    """The expected wait if the request came again; 0: unknown; None: it will never be taken."""


@dataclass(slots=True)
class _Bucket:
    size: int
    level: float
    at: float

    @property
    def per_s(self) -> float:
        return self.size / _MINUTE_S

    def refill(self, now: float) -> None:
        self.level = min(float(self.size), self.level + max(0.0, now - self.at) * self.per_s)
        self.at = max(self.at, now)

    def until(self, amount: float) -> float:
        return max(0.0, amount - self.level) / self.per_s


@dataclass(slots=True)
class _State:
    running: int = 0
    buckets: dict[str, _Bucket] = field(default_factory=dict)


class KeyLimits:
    """A record of all keys' use. `give_back` must follow each `take` that is not refused."""

    def __init__(self) -> None:
        self._states: defaultdict[str, _State] = defaultdict(_State)

    def take(self, caller: Caller, tokens: int, now: float) -> Refusal | None:
        """Take a request of about so many tokens, or return why not."""
        state = self._states[caller.name]
        _refill(state, caller, now)
        if caller.max_running and state.running >= caller.max_running:
            message = (
                f"{state.running} requests of this key are under way, and its limit is "
                f"{caller.max_running}"
            )
            return Refusal("key_concurrency", f"{message}; wait until one has ended", 0.0)
        if 0 < caller.tokens_per_minute < tokens:
            limit = f"the limit of this key is {caller.tokens_per_minute} per minute"
            remedy = "send a shorter prompt or a lower max_tokens"
            return Refusal(
                "key_tokens",
                f"the request may cost about {tokens} tokens, and {limit}; {remedy}",
                None,
            )
        costs = {"requests": 1, "tokens": tokens}
        for what, bucket in state.buckets.items():
            if bucket.level + _ROUNDING < costs[what]:
                needs = "" if what == "requests" else f"the request may cost about {tokens}, "
                return Refusal(
                    f"key_{what}",
                    f"the limit of this key is {bucket.size} {what} per minute; "
                    f"{needs}{max(0, int(bucket.level))} are "
                    "left now: try again after the time in Retry-After",
                    max(each.until(costs[of]) for of, each in state.buckets.items()),
                )
        state.running += 1
        for what, bucket in state.buckets.items():
            bucket.level -= costs[what]
        return None

    def give_back(self, key: str, tokens: int, used: int | None, now: float) -> None:
        """End a request that has used so many tokens of its estimate; None: it never began."""
        state = self._states[key]
        state.running -= 1
        left = {"requests": 1 if used is None else 0, "tokens": tokens - (used or 0)}
        for what, bucket in state.buckets.items():
            bucket.refill(now)
            bucket.level = min(float(bucket.size), bucket.level + left[what])

    def headers(self, key: str) -> dict[str, str]:
        headers: dict[str, str] = {}
        for what, bucket in self._states[key].buckets.items():
            headers[f"x-ratelimit-limit-{what}"] = str(bucket.size)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, int(bucket.level)))
            headers[f"x-ratelimit-reset-{what}"] = shown_s(bucket.until(bucket.size))
        return headers


def _refill(state: _State, caller: Caller, now: float) -> None:
    for what, size in (
        ("requests", caller.requests_per_minute),
        ("tokens", caller.tokens_per_minute),
    ):
        if not size:
            state.buckets.pop(what, None)
            continue
        bucket = state.buckets.setdefault(what, _Bucket(size, float(size), now))
        bucket.refill(now)
        # Limits change with a reload: what is left is kept, as far as it goes into the new bucket.
        bucket.size, bucket.level = size, min(bucket.level, float(size))


def shown_s(seconds: float) -> str:
    """Return a time as OpenAI's headers show it: 20ms, 8s, 6m0s, 1h0m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
