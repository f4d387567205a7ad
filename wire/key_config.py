"""An API key of the router, as its configuration has it: not the key, but its hash, and what it may
do.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvrelay.wire.errors import ConfigError

__all__ = ["KeyConfig"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_PRIORITY = 2**31 - 1
_MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """One API key. `kvrelay key NAME` draws one and prints the first two fields."""

    name: str
    """Who it belongs to: for logs, metrics and fair shares."""
    sha256: str
    """Of the key, in hexadecimal. A plain hash is enough for a random key: there is nothing to
    guess.
    """
    weight: float = 1.0
    """Its share while requests wait, against the other keys'."""
    priority: int = 0
    """Of its requests that ask for none, and the most important (the lowest) that they may ask for."""
    requests_per_minute: int = 0
    """0 is no limit."""
    tokens_per_minute: int = 0
    """Tokens of prompts and answers; 0 is no limit."""
    max_running: int = 0
    """Requests under way at once, waiting ones among them; 0 is no limit."""
    max_queue: int = 0
    """Requests that wait for a node at once; 0 is no limit but the router's."""
    models: tuple[str, ...] = ()
    """Models and adapters that it may ask for; empty allows all."""
    admin: bool = False
    """It may change what the cluster serves."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"a key's name must be 1 to 64 letters, digits, dots, dashes or underscores, got "
                f"{self.name[:80]!r}"
            )
        if not _HASH.fullmatch(self.sha256):
            # Perhaps it is the key itself: it is not repeated.
            raise ConfigError(
                f"sha256 of key {self.name} must be 64 hexadecimal digits in lower case, got "
                f"{len(self.sha256)} "
                "characters; `kvrelay key NAME` prints a key and its hash"
            )
        if not (math.isfinite(self.weight) and 1 / _MAX_WEIGHT <= self.weight <= _MAX_WEIGHT):
            raise ConfigError(
                f"weight of key {self.name} must be between {1 / _MAX_WEIGHT:g} and "
                f"{_MAX_WEIGHT:g}, got {self.weight}"
            )
        if not -_MAX_PRIORITY <= self.priority <= _MAX_PRIORITY:
            raise ConfigError(
                f"priority of key {self.name} must be between {-_MAX_PRIORITY} and "
                f"{_MAX_PRIORITY}, got {self.priority}"
            )
        for name in ("requests_per_minute", "tokens_per_minute", "max_running", "max_queue"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} of key {self.name} must not be negative, got {getattr(self, name)}; "
                    f"0 is no limit"
                )
