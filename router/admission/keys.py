"""API keys by their hashes, what each may do, and how much of it. Pure; times are seconds.

Keys are random (256 bits), so a plain SHA-256 is enough, and a slow hash would cost every request.
A given key is looked up by its hash.

Limits per minute are token buckets, a minute's worth deep. Tokens are taken by estimate and put
right at the end, so a bucket may owe some, for which the next request waits.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kvrelay.wire.errors import (
    Forbidden,
    KvrelayError,
    NotFound,
    Overloaded,
    RateLimited,
    RequestError,
    Unauthorized,
)
from kvrelay.wire.router_config import KeyConfig

__all__ = [
    "ANYONE",
    "Caller",
    "KeyLimits",
    "Refusal",
    "callers_by_hash",
    "draw_key",
    "hash_of",
    "owner_of",
]

_PREFIX = "kvr-"  # so that scanners for leaked keys can know one
_MAX_PRIORITY = 2**31 - 1
_MINUTE_S = 60.0
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class Caller(KeyConfig):
    most_important: int = -_MAX_PRIORITY

    @classmethod
    def of(cls, key: KeyConfig) -> Caller:
        return cls(**asdict(key), most_important=key.priority)

    def may(self, model: str) -> bool:
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        if not self.may(model):
            names = ", ".join(repr(name) for name in sorted(self.models))
            raise NotFound(
                f"model {model!r} is not served to this key; served to it: {names}",
                param="model",
                code="model_not_found",
            )

    def per_minute(self) -> dict[str, int]:
        limits = {"requests": self.requests_per_minute, "tokens": self.tokens_per_minute}
        return {what: size for what, size in limits.items() if size}

    def check_admin(self) -> None:
        if not self.admin:
            raise Forbidden(
                f"the key {self.name} may not change what is served; give it `admin: true`, or "
                f"use another"
            )

    def check_priority(self, asked: int | None) -> int:
        """Return a request's priority, the key's by default. Raises RequestError, Forbidden."""
        if asked is None:
            return self.priority
        if not -_MAX_PRIORITY <= asked <= _MAX_PRIORITY:
            limits = f"{-_MAX_PRIORITY} and {_MAX_PRIORITY}"
            raise RequestError(f"priority must be between {limits}, got {asked}", param="priority")
        if asked < self.most_important:
            raise Forbidden(
                f"priority {asked} is more important than this key may ask for; send "
                f"{self.most_important} or more, or "
                "leave it out",
                param="priority",
            )
        return asked


ANYONE = Caller("anyone", "0" * 64, admin=True)
"""The caller where no key is configured; no key has this hash."""


def callers_by_hash(api_key: str, keys: Sequence[KeyConfig]) -> dict[str, Caller]:
    in_clear = [Caller("api-key", hash_of(api_key), admin=True)] if api_key else []
    return {each.sha256: each for each in [*map(Caller.of, keys), *in_clear]} or {"": ANYONE}


def owner_of(given: str, callers: Mapping[str, Caller]) -> Caller:
    """Return the owner of a key. Raises Unauthorized if nobody has it."""
    # The time of the look-up tells of a hash at most, from which no key can be found.
    caller = callers.get(hash_of(given)) or callers.get("")
    if caller is None:
        raise Unauthorized(
            "the API key is missing or wrong; send it as `Authorization: Bearer <key>`"
        )
    return caller


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def draw_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal to begin a request. `reason` is one of few words, for metrics."""

    reason: str
    message: str
    retry_after_s: float | None
    """The expected wait; 0: unknown; None: the request will never be taken."""
    error: type[KvrelayError] = Overloaded

    @property
    def for_want_of_nodes(self) -> bool:
        """Return whether more nodes would have taken the request."""
        return self.reason in ("ttft", "ttft_passed", "queue_full", "deadline")


class KeyLimits:
    """A record of all keys' use. `give_back` must follow each `take` that is not refused."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._full_at: defaultdict[tuple[str, str], float] = defaultdict(float)
        """When a key's bucket will be full again, in seconds."""

    def take(self, caller: Caller, tokens: int, now: float) -> Refusal | None:
        """Take a request of about so many tokens, or return why not."""
        running, sizes = self._running[caller.name], caller.per_minute()
        if caller.max_running and running >= caller.max_running:
            limit = f"{running} requests of this key run, and its limit is {caller.max_running}"
            return Refusal("key_concurrency", f"{limit}; wait for an end", 0.0, RateLimited)
        about = f"the request may cost about {tokens} tokens"
        if tokens > sizes.get("tokens", tokens):
            limit = f"the limit of this key is {sizes['tokens']} per minute"
            message = f"{about}, and {limit}; send a shorter prompt or a lower max_tokens"
            return Refusal("key_tokens", message, None, RateLimited)
        costs = {"requests": 1, "tokens": tokens}
        waits = [
            (self._empty_s(caller, what, now) + (costs[what] / size - 1) * _MINUTE_S, what)
            for what, size in sizes.items()
        ]
        wait_s, what = max(waits, default=(0.0, ""))
        if wait_s > _ROUNDING_S:
            left = f"{self._left(caller, what, now)} of {sizes[what]} {what} per minute are left"
            message = f"{about}, and {left} to this key: try again after the time in Retry-After"
            return Refusal(f"key_{what}", message, wait_s, RateLimited)
        self._running[caller.name] += 1
        self._spend(caller, costs, now)
        return None

    def give_back(self, caller: Caller, tokens: int, used: int | None, now: float) -> None:
        """End a request that used so many tokens; None: it never began."""
        self._running[caller.name] -= 1
        left = {"requests": -1 if used is None else 0, "tokens": (used or 0) - tokens}
        self._spend(caller, left, now)

    def headers(self, caller: Caller, now: float) -> dict[str, str]:
        headers: dict[str, str] = {}
        for what, size in caller.per_minute().items():
            headers[f"x-ratelimit-limit-{what}"] = str(size)
            headers[f"x-ratelimit-remaining-{what}"] = str(self._left(caller, what, now))
        return headers

    def _spend(self, caller: Caller, costs: dict[str, int], now: float) -> None:
        for what, size in caller.per_minute().items():
            begin = max(now, self._full_at[caller.name, what])
            self._full_at[caller.name, what] = begin + costs[what] / size * _MINUTE_S

    def _empty_s(self, caller: Caller, what: str, now: float) -> float:
        return max(0.0, self._full_at[caller.name, what] - now)

    def _left(self, caller: Caller, what: str, now: float) -> int:
        share = 1 - self._empty_s(caller, what, now) / _MINUTE_S
        return max(0, int(share * caller.per_minute()[what] + _ROUNDING_S))
