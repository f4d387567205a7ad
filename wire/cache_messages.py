"""Messages between a node's HTTP process and its cache process: msgpack over one zmq pair."""

from __future__ import annotations

import msgspec

from kvrelay.wire.config import CacheConfig, TransferConfig
from kvrelay.wire.engine_messages import EngineFailed, TierStats
from kvrelay.wire.kv_events import CacheChanges
from kvrelay.wire.transfer import Fingerprint, Source

__all__ = ["Attach", "CacheReady", "CacheSetup", "CacheStats", "FromCache", "ToCache"]


class CacheSetup(msgspec.Struct, frozen=True):
    """A description of what a cache process is for."""

    cache: CacheConfig
    transfer: TransferConfig
    fingerprint: Fingerprint
    """Of the engine; the cache process is one rank with all heads."""
    block_bytes: int
    """Bytes of a block, all heads."""
    identity: bytes
    """Equal for equal KV; names its files."""
    log_format: str = ""


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A command: take blocks from this engine process, whose pool is empty now."""

    engine: Source


ToCache = Attach | CacheChanges


class CacheReady(msgspec.Struct, frozen=True, tag=True):
    """A message that engines can ask this process."""

    source: Source


class CacheStats(msgspec.Struct, frozen=True, tag=True):
    """A snapshot, sent every half second and after each reset."""

    host: TierStats = msgspec.field(default_factory=TierStats)
    store: TierStats = msgspec.field(default_factory=TierStats)
    resets: int = 0
    """Resets of the present engine's cache that this process has followed."""


FromCache = CacheReady | CacheStats | EngineFailed
