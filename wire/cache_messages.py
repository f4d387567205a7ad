"""Messages between a node's HTTP process and its cache process: msgpack over one zmq pair."""

from __future__ import annotations

import msgspec

from kvrelay.wire.config import CacheConfig, TransferConfig
from kvrelay.wire.engine_messages import EngineFailed, Named, TierStats
from kvrelay.wire.kv_events import CacheChanges
from kvrelay.wire.transfer import Fingerprint, Source

__all__ = ["Attach", "CacheSetup", "CacheStats", "FromCache", "ToCache"]


class CacheSetup(msgspec.Struct, frozen=True):
    """A cache process's config."""

    cache: CacheConfig
    transfer: TransferConfig
    fingerprint: Fingerprint
    block_bytes: int  # all heads
    identity: bytes
    log_format: str = ""


class Attach(Named, frozen=True):
    """A command: take blocks from this new engine."""

    engine: Source
    clears: int = 0
    """Resets that were followed until now, also by a process before."""


ToCache = Attach | CacheChanges


class CacheStats(msgspec.Struct, tag=True):
    """A report, sent ten times a second, and at once after each Attach and each reset."""

    source: Source
    clears: int = 0
    """Resets that were told, and followed."""
    engine: str = ""
    """Generation of the engine in the last Attach; all blocks were told after it."""
    host: TierStats = msgspec.field(default_factory=TierStats)
    store: TierStats = msgspec.field(default_factory=TierStats)


FromCache = CacheStats | CacheChanges | EngineFailed
