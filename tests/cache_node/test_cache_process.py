"""A cache process beside an engine whose pool the test keeps, over real connectors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from stores import name

from kvrelay.cache_node import process
from kvrelay.cache_node.process import CacheProcess
from kvrelay.cache_node.store import PAGE
from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer.backend import Source as Peer
from kvrelay.kv_transfer.checksums import MOST_BLOCKS
from kvrelay.kv_transfer.connector import (
    BlockIds,
    CachedAsked,
    Doubted,
    Event,
    Fetched,
    FetchFailed,
    Granted,
    PoolRegion,
    Released,
    Settled,
)
from kvrelay.kv_transfer.direct import DirectBackend
from kvrelay.kv_transfer.messages import Doubt
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.wire.cache_messages import Attach, CacheSetup, CacheStats, FromCache
from kvrelay.wire.config import CacheConfig, TransferConfig
from kvrelay.wire.errors import ConfigError, TransferError
from kvrelay.wire.kv_events import CPU, STORAGE, CacheChanges, chain, root_of
from kvrelay.wire.transfer import Fingerprint, Source
from kvrelay.wire.versions import HANDOVER

BLOCK_BYTES, BLOCKS = 512, 64
FINGERPRINT = Fingerprint(
    HANDOVER.oldest, "tiny", "float32", 16, 2, 8, 2, 0, 1, protocol_newest=HANDOVER.newest
)
TRANSFER = TransferConfig(
    kv_connector="direct",
    kv_checksums=1e-9,
    lease_s=60.0,
    heartbeat_s=1.0,
    transfer_deadline_s=60.0,
)


class Engine:
    """An engine process as far as its pool goes."""

    def __init__(self, fingerprint: Fingerprint = FINGERPRINT) -> None:
        self.memory = zeros(BLOCKS * BLOCK_BYTES, torch.device("cpu"))
        self.pool, self.events, self.asks = BlockPool(BLOCKS), list[Event](), 0
        self.pool.note_changes(use=True)
        region = PoolRegion(self.memory.data_ptr(), BLOCKS, BLOCK_BYTES, "cpu")
        self.connector = TransferEngine("engine", fingerprint, region, TRANSFER, lambda: None)
        self.leases: dict[str, list[int]] = {}

    def fill(self, number: int, content: torch.Tensor) -> None:
        """Compute a block, and let go of it."""
        (block,) = self.pool.allocate(1) or []
        self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = content
        self.pool.publish(block, name(number))
        self.pool.release([block])

    def changes(self) -> CacheChanges:
        new = self.pool.changes()
        return CacheChanges(list(new.stored), list(new.removed), used=list(new.used))

    def turn(self) -> None:
        for event in self.connector.events():
            match event:
                case CachedAsked(request_id, hashes):
                    blocks = self.pool.lookup(hashes)
                    self.pool.share(blocks)
                    if blocks:
                        self.leases[request_id] = blocks
                    self.connector.answer_cached(request_id, blocks)
                case Released(request_id):
                    self.pool.release(self.leases.pop(request_id))
                case _:
                    self.events.append(event)


class Host:
    """A cache process, run by the test, and its parent's end of the pair."""

    def __init__(self, folder: Path, blocks: int = BLOCKS, **cache: Any) -> None:
        config = CacheConfig(kv_host_memory=blocks * BLOCK_BYTES, **cache)
        setup = CacheSetup(config, TRANSFER, FINGERPRINT, BLOCK_BYTES, b"i" * 16)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.parent, child = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.parent.bind(f"ipc://{folder}/{id(self)}")
        child.connect(f"ipc://{folder}/{id(self)}")
        self.cache, self.child = CacheProcess(setup, child), child
        self.stats = CacheStats(Source("", 0, "", 0))
        self.told: dict[str, set[bytes]] = {CPU: set(), STORAGE: set()}

    def say(self, message: Attach | CacheChanges) -> None:
        self.parent.send(msgspec.msgpack.encode(message))

    def turn(self) -> None:
        self.cache.wakeup()
        self.cache.turn()
        self.hear()

    def hear(self) -> None:
        while self.parent.poll(0):
            match msgspec.msgpack.decode(self.parent.recv(), type=FromCache):
                case CacheChanges() as changes:
                    changes.follow(self.told[changes.medium])
                case CacheStats() as stats:
                    self.stats = stats

    def held(self, number: int) -> bool:
        return bool(self.cache._table.pool.lookup([name(number)]))

    def told_all(self) -> bool:
        """Return whether all that is here is told, and nothing else."""
        cache = self.cache
        files = set() if cache._store is None else set(cache._store.names())
        return self.told == {CPU: set(cache._table.pool.names()), STORAGE: files}

    def flip(self, number: int, rng: random.Random) -> None:
        (slot,) = self.cache._table.pool.lookup([name(number)])
        at = slot * BLOCK_BYTES + rng.randrange(BLOCK_BYTES)
        self.cache._memory[at] ^= 1 << rng.randrange(8)

    def close(self) -> None:
        self.cache._connector.close()
        for socket in (self.parent, self.child):
            socket.close(linger=0)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.rng = folder, random.Random(1)
        self.hosts, self.engines = list[Host](), list[Engine]()
        self.contents: dict[int, torch.Tensor] = {}

    def host(self, *args: Any, **fields: Any) -> Host:
        self.hosts.append(Host(self.folder, *args, **fields))
        return self.hosts[-1]

    def engine(self, host: Host, **fields: Any) -> Engine:
        engine = Engine(**fields)
        self.engines.append(engine)
        host.say(Attach(Source(*engine.connector.address, engine.connector.generation, 0)))
        return engine

    def until(self, done: Callable[[], object], within_s: float = 120.0) -> None:
        end = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < end
            for each in (*self.engines, *self.hosts):
                each.turn()

    def fill(self, host: Host, engine: Engine, numbers: Sequence[int]) -> None:
        """Compute blocks, and wait until the tier has them."""
        for number in numbers:
            if number not in self.contents:
                random_bytes = self.rng.randbytes(BLOCK_BYTES)
                self.contents[number] = torch.frombuffer(bytearray(random_bytes), dtype=torch.uint8)
            engine.fill(number, self.contents[number])
        host.say(engine.changes())
        self.until(lambda: all(host.held(number) for number in numbers))

    def read(self, host: Host, engine: Engine, numbers: Sequence[int]) -> int | str:
        """Read blocks into the engine; return how many, or why none. Each must be right."""
        engine.asks += 1
        ask = f"ask-{engine.asks}"
        self.until(lambda: host.stats.source.port)
        source = host.stats.source
        engine.connector.ask(ask, source, [name(number) for number in numbers], 0, 60.0)
        self.until(lambda: engine.events)
        granted = engine.events.pop()
        assert isinstance(granted, Granted)
        if granted.ticket is None:
            return granted.reason
        remote = granted.ticket.blocks
        blocks = engine.pool.allocate(len(remote))
        assert blocks is not None
        engine.connector.watch(ask, granted.ticket)
        engine.connector.fetch(ask, remote, blocks)
        ends = (Fetched, Settled)
        self.until(lambda: engine.events and isinstance(engine.events[-1], ends))
        first, *_ = engine.events
        engine.events.clear()
        engine.pool.release(blocks)
        if isinstance(first, FetchFailed):
            assert first.verified == 0
            return first.cause
        for number, block in zip(numbers, blocks, strict=False):
            found = engine.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            assert torch.equal(found, self.contents[number]), number
        return len(blocks)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    it = World(tmp_path)
    yield it
    it.until(lambda: all(host.told_all() for host in it.hosts))
    for engine in it.engines:
        engine.connector.close()
    for host in it.hosts:
        host.close()


def test_a_new_engine_finds_what_the_old_one_had(world: World) -> None:
    host = world.host()
    old = world.engine(host)
    world.fill(host, old, range(10))
    world.until(lambda: old.pool.free == old.pool.total)
    old.connector.close()
    world.engines.remove(old)
    new = world.engine(host)
    assert world.read(host, new, range(12)) == 10
    assert world.read(host, new, [11, 1]) == "NotHeld"
    world.until(lambda: not host.cache._leases)
    # It takes from the new one, too.
    world.fill(host, new, [20, 21])
    assert world.read(host, new, [20, 21]) == 2
    world.until(lambda: host.cache._table.pool.free == BLOCKS - 1)


@pytest.mark.parametrize(
    ("field", "other"),
    [("model", "other"), ("kv_dtype", "bfloat16"), ("block_size", 32), ("layers", 3)],
)
def test_an_engine_with_another_fingerprint_finds_nothing(
    world: World, field: str, other: object
) -> None:
    host = world.host()
    world.fill(host, world.engine(host), range(3))
    changed = msgspec.structs.replace(FINGERPRINT, **{field: other})
    stranger = world.engine(host, fingerprint=changed)
    assert f"{field} is {other!r} here" in str(world.read(host, stranger, range(3)))


def test_the_same_tokens_under_another_root_find_nothing(world: World) -> None:
    roots = [root_of(salt, adapter) for salt in (None, "s") for adapter in ("", "a", "b")]
    numbers = [int.from_bytes(chain(root, range(16)), "big") for root in roots]
    host = world.host()
    engine = world.engine(host)
    for at, number in enumerate(numbers):
        world.fill(host, engine, [number])
        for other in numbers[at + 1 :]:
            assert world.read(host, engine, [other]) == "NotHeld"
    assert [world.read(host, engine, [number]) for number in numbers] == [1] * 6


def test_no_flipped_block_of_ten_thousand_is_served(world: World) -> None:
    host = world.host()
    engine, flipped = world.engine(host), 0
    while flipped < 10_000:
        numbers = range(flipped, flipped + 50)
        world.fill(host, engine, numbers)
        for number in numbers:
            host.flip(number, world.rng)
        assert world.read(host, engine, numbers) == "KvCorrupted"
        flipped += 50
        world.until(lambda: host.cache._table.stats.corrupt == flipped)  # noqa: B023
        assert not any(host.held(number) for number in numbers)
        engine.pool.reset()
        engine.pool.changes()
    world.until(lambda: engine.pool.free == engine.pool.total)
    world.until(lambda: host.stats.host.corrupt == flipped)
    assert (host.stats.host.blocks, host.cache._table.pool.free) == (0, BLOCKS - 1)
    # One costs the whole read, and is dropped alone.
    world.fill(host, engine, range(6))
    host.flip(3, world.rng)
    assert world.read(host, engine, range(6)) == "KvCorrupted"
    world.until(lambda: not host.held(3))
    assert world.read(host, engine, range(6)) == 3


def test_what_host_memory_has_no_room_for_comes_from_files(world: World) -> None:
    pytest.importorskip("nixl")
    store = {"kv_store": str(world.folder / "store"), "kv_store_size": 40 * (PAGE + BLOCK_BYTES)}
    host = world.host(9, **store)
    engine = world.engine(host)
    for first in range(0, 32, 8):
        world.fill(host, engine, range(first, first + 8))
        world.until(lambda: host.stats.store.stored == first + 8)  # noqa: B023
    assert world.read(host, engine, range(8)) == 8
    world.until(lambda: (host.stats.host.blocks, host.stats.store.blocks) == (8, 32))
    # A node that starts again is warm; what was damaged meanwhile is a miss.
    host.close()
    world.hosts.remove(host)
    (folder,) = (world.folder / "store").iterdir()
    (folder / name(20).hex()).write_bytes(b"torn")
    again = world.host(33, **store)
    fresh = world.engine(again)
    assert world.read(again, fresh, range(32)) == 20
    world.until(lambda: (again.stats.store.corrupt, again.stats.store.blocks) == (1, 31))
    again.say(CacheChanges([], [], cleared=True))
    world.until(lambda: again.stats.clears == 1 and not any(folder.iterdir()))
    assert world.read(again, fresh, range(32)) == "NotHeld"


def test_write_behind_keeps_to_its_bandwidth(world: World) -> None:
    host = world.host(kv_write_behind_bytes_s=10 * BLOCK_BYTES)
    engine, began = world.engine(host), time.monotonic()
    for number in range(5):
        world.fill(host, engine, [number])
    assert time.monotonic() - began >= 0.4


def test_an_engine_that_has_lost_what_it_told_costs_nothing_else(world: World) -> None:
    host = world.host()
    engine = world.engine(host)
    for number in range(12):
        engine.fill(number, torch.zeros(BLOCK_BYTES, dtype=torch.uint8))
    told = engine.changes()
    for number in (0, 5, 6, 11):
        engine.pool.forget(*engine.pool.lookup([name(number)]))
    host.say(told)
    world.until(lambda: all(host.held(number) for number in (1, 2, 3, 4, 7, 8, 9, 10)))
    assert host.stats.host.stored <= 8
    world.until(lambda: engine.pool.free == engine.pool.total)


def test_a_node_hears_of_its_process_before_that_meets_the_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first use of a GPU takes seconds, and a node that has not heard ends with its engine."""
    host, heard = world.host(), list[int]()

    def meet(_engine: Source) -> bool:
        while host.stats.clears != 7 and host.parent.poll(5000):
            host.hear()
        heard.append(host.stats.clears)
        return True

    monkeypatch.setattr(host.cache._connector, "meet", meet)
    world.until(lambda: host.stats.source.port)
    host.say(Attach(Source("", 0, "new", 0), 7))
    world.until(lambda: heard)
    assert (heard, host.stats.engine) == ([7], "new")


def test_blocks_whose_read_failed_are_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, post_read = list[Peer](), DirectBackend.post_read

    def fails_at_first(backend: DirectBackend, source: Peer, *blocks: BlockIds) -> object:
        tries.append(source)
        if len(tries) == 1:
            raise TransferError("not yet")
        return post_read(backend, source, *blocks)

    monkeypatch.setattr(DirectBackend, "post_read", fails_at_first)
    monkeypatch.setattr(process, "_PAUSE_S", 0.0)
    host = world.host()
    world.fill(host, world.engine(host), range(3))
    world.until(lambda: host.stats.host.stored == 3)
    assert host.stats.host.failed == 3


@pytest.mark.parametrize("since", ["", "reset", "engine"])
def test_blocks_of_a_failed_ask_are_asked_for_again_by_the_same_engine_and_until_a_reset(
    world: World, monkeypatch: pytest.MonkeyPatch, since: str
) -> None:
    monkeypatch.setattr(process, "_PAUSE_S", 0.0)
    host = world.host()
    engine, cache = world.engine(host), host.cache
    for number in range(3):
        engine.fill(number, torch.zeros(BLOCK_BYTES, dtype=torch.uint8))
    host.say(engine.changes())
    while (pull := cache._pull) is None:
        host.turn()
    if since == "reset":
        host.say(CacheChanges([], [], cleared=True))
    if since == "engine":
        host.say(Attach(Source(*engine.connector.address, "another", 0)))
    told = "another" if since == "engine" else engine.connector.generation
    while (host.stats.clears, host.stats.engine) != (since == "reset", told):
        host.turn()  # the engine, which does not turn, answers nothing
    assert cache._pull is pull
    assert len(pull.names) == 3
    with monkeypatch.context() as patch:
        lost = [Granted(pull.request_id, None, "PeerLost: gone")]
        patch.setattr(cache._connector, "events", lambda: lost)
        host.turn()
    if since:
        assert (cache._pull, cache._table.offered) == (None, {})
    else:
        world.until(lambda: all(host.held(number) for number in range(3)))


def test_a_peer_that_doubts_without_end_has_few_blocks_summed(world: World) -> None:
    connector = world.host().cache._connector
    connector.answer(b"peer", Doubt([7] * 300_000))
    connector.answer(b"peer", Doubt([*range(300_000)]))
    few, more = [event.blocks for event in connector.events() if isinstance(event, Doubted)]
    assert (few, len(more)) == ((7,), MOST_BLOCKS)


def test_room_for_no_block_is_refused(world: World) -> None:
    for blocks, store_size in ((1, 10 * BLOCK_BYTES), (10, BLOCK_BYTES - 1)):
        with pytest.raises(ConfigError, match="two blocks of KV take 1024; raise them"):
            world.host(blocks, kv_store="store", kv_store_size=store_size)


def test_what_comes_of_a_pull_that_was_given_up_ends_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = world.host()
    engine = world.engine(host)
    engine.fill(1, torch.zeros(BLOCK_BYTES, dtype=torch.uint8))
    host.say(engine.changes())
    while (pull := host.cache._pull) is None:
        host.turn()
    with monkeypatch.context() as patch:
        late = [Granted("another", None), Fetched("another", 0), Settled("another")]
        patch.setattr(host.cache._connector, "events", lambda: late)
        host.turn()
    assert host.cache._pull is pull
    world.until(lambda: host.held(1))
