"""Cache process of a node: a loop over a connector, a table of blocks, and a store below it."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

import msgspec
import torch
import zmq

from kvrelay.cache_node.store import PAGE, BlockFiles, BlockObjects, look_for_gds
from kvrelay.cache_node.store_tier import StoreTier
from kvrelay.cache_node.table import CacheTable
from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer.cached import NOT_HELD
from kvrelay.kv_transfer.checksums import sums_of
from kvrelay.kv_transfer.connector import (
    BlockIds,
    CachedAsked,
    Doubted,
    Fetched,
    FetchFailed,
    Granted,
    PoolRegion,
    Released,
    Settled,
)
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.paged_engine.blocks import Changes
from kvrelay.wire.cache_messages import Attach, CacheSetup, CacheStats, ToCache
from kvrelay.wire.config_checks import gib
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.kv_events import CPU, STORAGE, BlockHash, CacheChanges, all_held
from kvrelay.wire.log_lines import Seldom
from kvrelay.wire.transfer import Source

__all__ = ["CacheProcess"]

log = logging.getLogger("kvrelay.cache")

STATS_INTERVAL_S = 0.1
_BATCH_BYTES, _BATCH_BLOCKS = 64 << 20, 256
_PAUSE_S = 1.0


@dataclass(slots=True)
class _Pull:
    request_id: str
    names: list[BlockHash]
    engine: Source
    since: int
    began: float
    remote: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class CacheProcess:
    def __init__(self, setup: CacheSetup, socket: zmq.Socket[bytes]) -> None:
        """Take the memory. `socket` leads to the parent. Raises ConfigError."""
        cache, size = setup.cache, setup.block_bytes
        objects = "://" in cache.kv_store
        limit = inf if objects else cache.kv_store_size
        blocks = cache.kv_host_memory // size
        if blocks < 2 or (cache.kv_store and limit < PAGE + size):
            raise ConfigError(
                f"kv_host_memory is {cache.kv_host_memory} bytes, kv_store_size "
                f"{cache.kv_store_size}, and two blocks of KV take {2 * size}; raise them"
            )
        self._socket, self._setup = socket, setup
        self._block_s = size / cache.kv_write_behind_bytes_s
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToCache)
        self._memory = zeros(blocks * size, torch.device("cpu"))
        region = PoolRegion(self._memory.data_ptr(), blocks, size, "cpu")
        self._sums = sums_of(region, setup.fingerprint.kv_heads)
        self._table = CacheTable(blocks - 1)
        self._table.pool.note_changes()
        self._table.pool.allow_pins(cache.kv_pin_share, cache.kv_pin_s)
        self._store: StoreTier | None = None
        if cache.kv_store:
            kind = BlockObjects if objects else BlockFiles
            store = kind(cache.kv_store, setup.identity, region, self._sums)
            self._store = StoreTier(self._table, store, limit, self._block_s, self.wakeup)
        self._connector = TransferEngine(
            engine_id=f"cache-{uuid.uuid4().hex[:12]}",
            fingerprint=msgspec.structs.replace(setup.fingerprint, tp_size=1),
            region=region,
            config=replace(setup.transfer, kv_port=0, kv_checksums=1.0),
            wake=self.wakeup,
            kept=self._kept,
        )
        self._engine: Source | None = None
        self._pull: _Pull | None = None
        self._leases: dict[str, list[int]] = {}
        self._pull_at = self._report_at = 0.0
        self._failed = Seldom()
        host, port = self._connector.address
        self._source = Source(
            host, port, self._connector.generation, 0, self._connector.address_seal
        )
        log.info("the cache process is ready: %d blocks in %s", blocks, gib(blocks * size))

    def serve(self) -> None:
        folder = self._setup.cache.kv_store
        if folder and "://" not in folder:
            threading.Thread(target=look_for_gds, daemon=True).start()
        while True:
            self.turn()

    def turn(self) -> None:
        now = time.monotonic()
        self._table.pool.expire(now)
        self._begin_pull(now)
        if now >= self._report_at:
            self._report(now)
        times = [self._pull_at, self._store.next_at if self._store else 0.0]
        due = min([self._report_at, *(each for each in times if each > now)])
        if self._wake in dict(self._poller.poll(round((due - now) * 1000 + 0.5))):
            os.eventfd_read(self._wake)
        with suppress(zmq.Again):
            while True:
                self._handle(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        self._handle_events()
        if self._store is not None:
            self._store.turn(time.monotonic())

    def wakeup(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _handle(self, message: Attach | CacheChanges) -> None:
        if isinstance(message, Attach):
            self._engine, self._table.clears = message.engine, message.clears
            self._table.offered.clear()
            self._tell(everything=True)
            # At once, because a first use of a GPU takes seconds: until a node hears that we have
            # followed all its resets, it ends with its engine.
            self._report(time.monotonic())
            self._connector.meet(message.engine)
            return
        self._table.note(message)
        if message.cleared:
            if self._store is not None:
                self._store.clear()
            self._report(time.monotonic())

    def _handle_events(self) -> None:
        for event in self._connector.events():
            pull = self._pull
            if pull is not None and event.request_id != pull.request_id:
                pull = None  # the event may be of one that was given up
            match event:
                case CachedAsked():
                    self._asked(event)
                case Released(request_id):
                    self._table.pool.release(self._leases.pop(request_id))
                case Doubted(blocks):
                    self._check(blocks)
                case Granted() if pull is not None:
                    self._granted(pull, event)
                case Fetched() if pull is not None:
                    self._fetched(pull, event)
                case FetchFailed(_, reason):
                    self._table.stats.failed += len(pull.slots) if pull else 0
                    self._warn(reason)
                case Settled() if pull is not None:
                    self._end_pull(pull, failed=True)

    # Up: an engine asks for blocks.

    def _asked(self, asked: CachedAsked) -> None:
        table, pool = self._table, self._table.pool
        held = pool.lookup(asked.hashes)
        pool.share(held)
        table.came(asked.hashes[: len(held)], used=True)

        def grant() -> None:
            blocks = pool.lookup(asked.hashes)
            pool.share(blocks)
            pool.release(held)
            if blocks:
                self._leases[asked.request_id] = blocks
                table.stats.loaded += len(blocks)
            self._connector.answer_cached(asked.request_id, blocks)

        if self._store is None:
            grant()
        else:
            self._store.read(asked.hashes[len(held) :], grant)

    def _kept(self, blocks: BlockIds) -> list[bytes]:
        return [self._table.checksums.get(block, b"") for block in blocks]

    def _check(self, blocks: BlockIds) -> None:
        known = [block for block in blocks if block in self._table.checksums]
        for block, found in zip(known, self._sums(known), strict=True):
            if found != self._table.checksums[block]:
                log.error("a block in host memory has changed; test the memory of this machine")
                self._table.stats.corrupt += 1
                self._table.pool.forget(block)

    # Down: the engine has blocks that this process wants.

    def _begin_pull(self, now: float) -> None:
        engine = self._engine
        if engine is None or self._pull or now < self._pull_at or not self._table.offered:
            return
        most = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // self._setup.block_bytes))
        if names := self._table.wanted(most):
            self._pull = _Pull(uuid.uuid4().hex, names, engine, self._table.clears, now)
            limit_s = self._setup.transfer.transfer_deadline_s
            self._connector.ask(self._pull.request_id, engine, names, 0, limit_s)

    def _granted(self, pull: _Pull, granted: Granted) -> None:
        slots = None
        if granted.ticket is not None:
            pull.remote = granted.ticket.blocks
            slots = self._table.room(len(pull.remote))
            self._connector.watch(pull.request_id, granted.ticket)
        if slots is None:
            self._connector.cancel(pull.request_id)
            if failed := granted.reason != NOT_HELD:
                self._warn(granted.reason or "all of host memory is in use")
            self._end_pull(pull, failed=failed)
            return
        pull.slots = slots
        self._connector.fetch(pull.request_id, pull.remote, slots)

    def _fetched(self, pull: _Pull, fetched: Fetched) -> None:
        sums = [fetched.checksums[block] for block in pull.remote if block in fetched.checksums]
        self._table.stats.stored += len(sums)
        self._end_pull(pull, sums)
        if self._store is not None:
            self._store.to_write += pull.names[: len(sums)]

    def _end_pull(self, pull: _Pull, sums: Sequence[bytes] = (), *, failed: bool = False) -> None:
        """Keep blocks with checksums. Blocks of a failed pull are asked for again, after others.

        Otherwise the first block that did not come is asked for no more.
        """
        next_at = pull.began + len(pull.slots) * self._block_s
        self._pull, self._pull_at = None, max(next_at, time.monotonic() + _PAUSE_S * failed)
        self._table.landed(pull.names, pull.slots, sums, pull.since)
        if (pull.engine, pull.since) == (self._engine, self._table.clears):
            left = pull.names if failed else pull.names[len(pull.slots) + 1 :]
            self._table.offered |= dict.fromkeys(left)

    def _warn(self, reason: str) -> None:
        if times := self._failed.times(time.monotonic()):
            log.warning("no KV from the engine, times=%d: %s", times, reason)

    def _tell(self, *, everything: bool = False) -> None:
        """Tell what has come and gone, or to a new engine everything."""
        pool, store = self._table.pool, self._store
        held: list[tuple[str, Changes, Iterable[BlockHash]]]
        held = [(CPU, pool.changes(), pool.names())]
        if store is not None:
            held.append((STORAGE, store.news(), store.names()))
        for medium, new, names in held:
            parts = [CacheChanges([*new.stored], [*new.removed], new.cleared, medium=medium)]
            for part in all_held(names, medium) if everything else parts[: bool(new)]:
                self._socket.send(msgspec.msgpack.encode(part))

    def _report(self, now: float) -> None:
        self._report_at = now + STATS_INTERVAL_S
        self._tell()
        table, store = self._table, self._store
        told = self._engine.generation if self._engine else ""
        stats = CacheStats(self._source, table.clears, told, table.stats)
        stats.host.blocks, stats.host.used = table.pool.cached, table.pool.total - table.pool.free
        if store is not None:
            stats.store = store.stats
        self._socket.send(msgspec.msgpack.encode(stats))
