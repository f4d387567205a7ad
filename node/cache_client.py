"""Client of the cache process: starts it once the engine is ready, and tells it what that holds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvrelay.node.child import Child
from kvrelay.node.process import describe_exit
from kvrelay.wire.cache_messages import (
    Attach,
    CacheSetup,
    CacheStats,
    FromCache,
    ToCache,
)
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.engine_messages import EngineReady
from kvrelay.wire.errors import EngineDead
from kvrelay.wire.kv_events import CPU, STORAGE, CacheChanges
from kvrelay.wire.transfer import Fingerprint, Source

__all__ = ["CacheClient", "identity"]

log = logging.getLogger("kvrelay.node")


class CacheClient:
    """A client of one cache process, without which a node goes on."""

    def __init__(self, config: NodeConfig, hear: Callable[[CacheChanges], None]) -> None:
        """`hear` is told what the process gains and loses."""
        self._config, self._hear = config, hear
        self._child: Child | None = None
        self._setup: CacheSetup | None = None
        self._clears = 0
        self.stats: CacheStats | None = None

    async def attach(self, info: EngineReady) -> None:
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
        if self._child is None:
            self._setup = setup
            try:
                child = await Child.start("kvrelay.node.cache_process", setup, {})
            except OSError as error:
                log.error("no cache process (%s): no KV is kept below the pool", error)
                return
            self._child = child
            child.run(self._read(child), self._watch(child))
        elif setup != self._setup:
            raise EngineDead("the model's files have changed; this node must start again")
        self.tell(Attach(Source(kv.address, kv.port, kv.generation, 0, kv.seal)))

    def tell(self, message: ToCache) -> None:
        if self._child is not None and self._child.alive:
            self._child.send(msgspec.msgpack.encode(message))

    def reset(self) -> None:
        """Name no source until the process has followed a reset of the engine's cache."""
        self._clears += 1

    @property
    def source(self) -> Source | None:
        stats = self.stats
        return None if stats is None or stats.clears != self._clears else stats.source

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.close()

    async def _read(self, child: Child) -> None:
        decoder = msgspec.msgpack.Decoder(FromCache)
        while True:
            match decoder.decode(await child.socket.recv()):
                case CacheStats() as stats:
                    if self.stats is None:
                        child.remove_folder()  # they are connected, and a kill leaves nothing
                    self.stats = stats if child.alive else None
                case CacheChanges() as changes:
                    self._hear(changes)
                case failed:
                    log.error("%s", failed.message)

    async def _watch(self, child: Child) -> None:
        how = describe_exit(await child.process.wait())
        self.stats = None
        for medium in (CPU, STORAGE):
            self._hear(CacheChanges([], [], cleared=True, medium=medium))
        log.error("the cache process ended (%s): no KV is kept below the pool", how)


def identity(fingerprint: Fingerprint, engine: EngineConfig) -> bytes:
    """Return 16 bytes that differ if KV may differ: other model files, types or devices."""
    path = Path(engine.model).expanduser()
    wanted = (".gguf", ".json", ".safetensors")
    found = [each for each in (path, *path.glob("*")) if each.suffix in wanted and each.is_file()]
    # Weights are in the hashes, and another node's copy of the files has other times.
    files = [
        (each.name, each.read_bytes() if each.suffix == ".json" else each.stat().st_size)
        for each in sorted(found)
    ]
    alike = msgspec.structs.replace(fingerprint, protocol=0, protocol_newest=0, tp_size=1)
    of = (alike, engine.device, engine.dtype, engine.quantization, engine.load_format, files)
    return blake2b(msgspec.json.encode(of), digest_size=16).digest()
