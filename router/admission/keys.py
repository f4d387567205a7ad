"""API keys by their hashes, and what each may do. Pure.

Keys are random (256 bits), so a plain SHA-256 of them is kept: a slow hash protects words that
people think up, and would cost every request. A given key is compared with all, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvrelay.wire.errors import Forbidden, NotFound, RequestError, Unauthorized
from kvrelay.wire.router_config import KeyConfig

__all__ = ["ANYONE", "Caller", "Keyring", "draw_key", "hash_of"]

_PREFIX = "kvr-"  # so that scanners for leaked keys can know one
_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Caller(KeyConfig):
    """A sender of requests, known by the hash of its key."""

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


class Keyring:
    def __init__(self, api_key: str, keys: Sequence[KeyConfig]) -> None:
        self.take_over(api_key, keys)

    def take_over(self, api_key: str, keys: Sequence[KeyConfig]) -> None:
        in_clear = [Caller("api-key", hash_of(api_key), admin=True)] if api_key else []
        self.callers = [*map(Caller.of, keys), *in_clear] or [ANYONE]

    def caller(self, given: str) -> Caller:
        """Return the owner of a key. Raises Unauthorized if nobody has it."""
        if self.callers == [ANYONE]:
            return ANYONE
        digest = hash_of(given)
        found: Caller | None = None
        for caller in self.callers:  # all of them, whichever it is
            if hmac.compare_digest(caller.sha256, digest):
                found = caller
        if found is None:
            raise Unauthorized(
                "the API key is missing or wrong; send it as `Authorization: Bearer <key>`"
            )
        return found


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def draw_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)
