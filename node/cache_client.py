"""Client of the cache process: starts it once the engine is ready, and tells it what that holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvrelay.node.child import REPORT_S, RESTART_S, Child
from kvrelay.node.process import describe_exit
from kvrelay.wire.cache_messages import (
    Attach,
    CacheSetup,
    CacheStats,
    FromCache,
    ToCache,
)
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.engine_messages import EngineFailed, EngineReady
from kvrelay.wire.errors import EngineDead
from kvrelay.wire.kv_events import CPU, STORAGE, CacheChanges
from kvrelay.wire.transfer import Fingerprint, Source

__all__ = ["CacheClient", "identity"]

log = logging.getLogger("kvrelay.node")


class CacheClient:
    """A client of the cache process, without which a node goes on."""

    def __init__(self, config: NodeConfig, hear: Callable[[CacheChanges], None]) -> None:
        """`hear` is told what the process gains and loses."""
        self._config, self._hear = config, hear
        self._child: Child | None = None
        self._setup: CacheSetup | None = None
        self._engine: Source | None = None
        self._lives: asyncio.Task[None] | None = None
        self._resets = self._told = 0
        """Resets of the engine's cache that were ordered, and those that the process was told."""
        self.stats: CacheStats | None = None

    def attach(self, info: EngineReady) -> None:
        """Have the process take blocks from a new engine. Raises EngineDead for other KV."""
        config, kv = self._config, info.kv
        if not config.cache.kv_host_memory or kv is None:
            return
        heads, ranks = kv.fingerprint.kv_heads, kv.fingerprint.tp_size  # more ranks repeat heads
        setup = CacheSetup(
            config.cache,
            config.transfer,
            kv.fingerprint,
            info.kv_bytes_per_token * info.block_size * heads // max(heads, ranks),
            identity(kv.fingerprint, config.engine),
            config.log_format,
        )
        if setup != (self._setup or setup):
            raise EngineDead("the model's files have changed; this node must start again")
        self._setup, self._resets = setup, self._told  # a dead engine follows no order
        self._engine = Source(kv.address, kv.port, kv.generation, 0, kv.seal)
        if self._lives is None:
            self._lives = asyncio.create_task(self._live(setup))
        self._send(Attach(self._engine, self._told))

    def tell(self, changes: CacheChanges) -> None:
        self._told += changes.cleared
        self._send(changes)

    def _send(self, message: ToCache) -> None:
        if self._child is not None and self._child.alive:
            self._child.send(msgspec.msgpack.encode(message))

    def reset(self) -> None:
        """Name no source until the process has followed a reset of the engine's cache."""
        self._resets += 1

    @property
    def source(self) -> Source | None:
        stats = self.stats
        return None if stats is None or stats.clears != self._resets else stats.source

    async def stop(self) -> None:
        if self._lives is not None:
            self._lives.cancel()
            await asyncio.gather(self._lives, return_exceptions=True)
        if self._child is not None:
            await self._child.close()

    async def _live(self, setup: CacheSetup) -> None:
        not_before, followed, goes_on = 0.0, 0, True
        while goes_on:
            try:
                child = await Child.start("kvrelay.node.cache_process", setup, {})
            except OSError as error:
                log.error("no cache process (%s): no KV is kept below the pool", error)
                return
            self._child = child
            child.run(self._read(child))
            assert self._engine is not None
            self._send(Attach(self._engine, followed))
            for _ in range(self._told - followed):  # files are older than the process
                self._send(CacheChanges([], [], cleared=True))
            how = describe_exit(await child.process.wait())
            stats, self.stats = self.stats, None
            goes_on = stats is not None and time.monotonic() >= not_before
            followed = 0 if stats is None else stats.clears
            await asyncio.sleep(REPORT_S)
            await child.close()
            for medium in (CPU, STORAGE):
                self._hear(CacheChanges([], [], cleared=True, medium=medium))
            follows = "another one starts" if goes_on else "no KV is kept below the pool"
            log.error("the cache process ended (%s): %s", how, follows)
            not_before = time.monotonic() + RESTART_S

    async def _read(self, child: Child) -> None:
        decoder = msgspec.msgpack.Decoder(FromCache)
        while True:
            match decoder.decode(await child.socket.recv()):
                case CacheStats() as stats if child.alive:
                    if self.stats is None:
                        child.remove_folder()  # they are connected, and a kill leaves nothing
                    if stats.engine != (self.stats.engine if self.stats else ""):
                        told = "an engine is told of %d blocks in host memory and %d in the store"
                        log.info(told, stats.host.blocks, stats.store.blocks)
                    self.stats = stats
                case CacheChanges() as changes:
                    self._hear(changes)
                case EngineFailed(message):
                    log.error("%s", message)


def identity(fingerprint: Fingerprint, engine: EngineConfig) -> bytes:
    """Return 16 bytes that differ if KV may differ: other settings of the model, types or devices.

    Its weights are in the hashes of blocks.
    """
    path = Path(engine.model).expanduser()
    found = [each for each in (path, *path.glob("*.json")) if each.suffix == ".json"]
    files = [(each.name, each.read_bytes()) for each in sorted(found) if each.is_file()]
    alike = replace(fingerprint, protocol=0, protocol_newest=0, tp_size=1)
    of = (alike, engine.device, engine.dtype, engine.quantization, engine.load_format, files)
    return blake2b(msgspec.json.encode(of), digest_size=16).digest()
