"""Limits of a key: requests and tokens per minute, and requests at once. Pure: times are given, in seconds.

Both rates are token buckets: full at first, refilled all the time, and a minute's worth deep. Tokens are taken by
estimate when a request comes and put right when it is over, so a bucket may owe some; then the next request waits for
that, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["NO_LIMIT", "Exceeded", "KeyLimits", "Quota", "Taken", "shown_s"]

_MINUTE_S = 60.0
_ROUNDING = 1e-6  # of a level that was waited for


@dataclass(frozen=True, slots=True)
class Quota:
    """What a key may do; 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    at_once: int = 0
    """Requests under way, waiting ones among them."""


NO_LIMIT = Quota()


@dataclass(frozen=True, slots=True)
class Taken:
    """What one request holds, to be given back once."""

    key: str
    tokens: int
    headers: dict[str, str]
    """OpenAI's x-ratelimit headers, for its answer."""


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that one more request would break. `what` is requests, tokens or concurrency."""

    what: str
    message: str
    retry_after_s: float | None
    """None: never, as it is."""
    headers: dict[str, str]


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
        """Seconds until it holds so much."""
        return max(0.0, amount - self.level) / self.per_s


@dataclass(slots=True)
class _State:
    requests: _Bucket | None
    tokens: _Bucket | None
    running: int = 0
    buckets: list[tuple[str, _Bucket]] = field(default_factory=list)


class KeyLimits:
    """The limits of all keys. Each `take` that is not refused is followed by one `give_back`."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def take(self, key: str, quota: Quota, tokens: int, now: float) -> Taken | Exceeded:
        """Let one request begin that is thought to cost so many tokens; or say why not."""
        state = self._state(key, quota, now)
        if quota.at_once and state.running >= quota.at_once:
            message = f"{state.running} requests of this key are under way, and its limit is {quota.at_once}"
            return Exceeded("concurrency", f"{message}; wait until one has ended", 0.0, _headers(state))
        if state.tokens is not None and tokens > state.tokens.size:
            message = f"the request may cost about {tokens} tokens, and the limit of this key is {state.tokens.size}"
            remedy = "per minute; send a shorter prompt or a lower max_tokens"
            return Exceeded("tokens", f"{message} {remedy}", None, _headers(state))
        for what, bucket, amount in (("requests", state.requests, 1), ("tokens", state.tokens, tokens)):
            if bucket is not None and bucket.level + _ROUNDING < amount:
                needs = "" if what == "requests" else f"the request may cost about {amount}, "
                return Exceeded(
                    what,
                    f"the limit of this key is {bucket.size} {what} per minute; {needs}{max(0, int(bucket.level))} are "
                    "left now: try again after the time in Retry-After",
                    max(b.until(a) for b, a in ((state.requests, 1), (state.tokens, tokens)) if b is not None),
                    _headers(state),
                )
        state.running += 1
        if state.requests is not None:
            state.requests.level -= 1
        if state.tokens is not None:
            state.tokens.level -= tokens
        return Taken(key, tokens, _headers(state))

    def give_back(self, taken: Taken, used: int | None, now: float) -> None:
        """End one after so many tokens; None: it never began, and counts for nothing."""
        state = self._states[taken.key]
        state.running -= 1
        for _, bucket in state.buckets:
            bucket.refill(now)
        if state.tokens is not None:
            state.tokens.level = min(float(state.tokens.size), state.tokens.level + taken.tokens - (used or 0))
        if used is None and state.requests is not None:
            state.requests.level = min(float(state.requests.size), state.requests.level + 1)

    def running(self, key: str) -> int:
        """Requests of a key that are under way."""
        state = self._states.get(key)
        return state.running if state else 0

    def _state(self, key: str, quota: Quota, now: float) -> _State:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _State(None, None)
        for _, bucket in state.buckets:
            bucket.refill(now)
        # Quotas change with a reload: what is left is kept, as far as it goes into the new bucket.
        state.requests = _sized(state.requests, quota.requests_per_minute, now)
        state.tokens = _sized(state.tokens, quota.tokens_per_minute, now)
        named = (("requests", state.requests), ("tokens", state.tokens))
        state.buckets = [(what, bucket) for what, bucket in named if bucket is not None]
        return state


def _sized(bucket: _Bucket | None, size: int, now: float) -> _Bucket | None:
    if bucket is not None and bucket.size == size:
        return bucket
    level = float(size) if bucket is None else min(bucket.level, float(size))
    return _Bucket(size, level, now) if size else None


def _headers(state: _State) -> dict[str, str]:
    headers: dict[str, str] = {}
    for what, bucket in state.buckets:
        headers[f"x-ratelimit-limit-{what}"] = str(bucket.size)
        headers[f"x-ratelimit-remaining-{what}"] = str(max(0, int(bucket.level)))
        headers[f"x-ratelimit-reset-{what}"] = shown_s(bucket.until(bucket.size))
    return headers


def shown_s(seconds: float) -> str:
    """A time as OpenAI's headers have it: 20ms, 7.5s, 6m0s, 1h0m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
