"""The NCCL backend: over a fake between backends here, and over NCCL where there are two GPUs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from engine_node import wait_until
from fake_nccl import FakeCommunicator, FakeNccl
from peer_process import peer_process

from kvrelay.kv_transfer import nccl_pairs
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.nccl import NcclBackend
from kvrelay.kv_transfer.nccl_pairs import Address, Ask, Meet, PairMessage, Part, decode, encode
from kvrelay.kv_transfer.staging import Lane, StagedPool
from kvrelay.wire.errors import ConfigError, PeerLost, TransferError

# How long a pair may take to be made, and a slice; the second is what tests of a stopped peer wait
# for.
MEET_S, PATIENCE_S = 10.0, 1.5
# Neither divides the other: slices of two blocks and a bit; and blocks of several slices.
SMALL, LARGE = (64, 10_001, 30_000), (24, 100_003, 7_000)
# So many slices that there is a middle to stop in.
LONG = (64, 64 << 10, 4 << 10)


class BackendNode:
    """A backend and its pool, called from this thread as the backend's thread would."""

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        slice_bytes: int,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        pool = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        self.pool = pool.view(num_blocks, block_bytes)
        self.region = PoolRegion(self.pool.data_ptr(), num_blocks, block_bytes, device)
        self.nccl: Any = FakeNccl(PATIENCE_S) if device == "cpu" else None
        settings = {"meet_s": MEET_S, "patience_s": PATIENCE_S, "nccl": self.nccl} | settings
        self.backend = NcclBackend(self.region, "127.0.0.1", slice_bytes=slice_bytes, **settings)
        self.generation = uuid.uuid4().hex
        self.backend.prepare()
        self.metadata = self.backend.open()

    def fill(self, seed: int) -> None:
        """Bytes that follow from the seed, unlike in any other block."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.pool.shape
        self.pool.copy_(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))

    @property
    def welcome(self) -> Source:
        return Source("peer", self.generation, self.region, self.metadata)

    def digest(self, blocks: Sequence[int]) -> str:
        return hashlib.sha256(self.pool[list(blocks)].cpu().numpy().tobytes()).hexdigest()

    def ended(self, handle: object, within_s: float = 10.0) -> bool:
        """Poll until a read ends: True, or its error is raised. False if it does not end in time."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if self.backend.poll(handle):
                return True
            self.backend.progress()
            time.sleep(0.002)
        return False

    def close(self) -> None:
        self.backend.close()


Start = Callable[..., BackendNode]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:
        closing = contextlib.closing
        yield lambda *sizes, **more: stack.enter_context(closing(BackendNode(*sizes, **more)))
    wait_until(
        lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]
    )


def scattered(count: int, num_blocks: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(num_blocks), count)


def meet(reader: BackendNode, source: BackendNode) -> None:
    source.fill(7)
    reader.backend.add_peer(source.welcome)


def read(reader: BackendNode, source: BackendNode, remote: list[int], local: list[int]) -> None:
    """The bytes arrive, and are the source's."""
    assert reader.ended(reader.backend.post_read(source.welcome, remote, local))
    assert reader.digest(local) == source.digest(remote)


def long_read(reader: BackendNode, source: BackendNode) -> object:
    """A read whose first slice has arrived, and most of which has not."""
    everything = list(range(LONG[0]))
    meet(reader, source)
    source.nccl.stops = True
    handle = reader.backend.post_read(source.welcome, everything, everything)
    wait_until(lambda: bool(reader.pool[0].any()))
    assert not reader.backend.poll(handle)  # which would fail if it waited
    return handle


def free(*nodes: BackendNode) -> None:
    """All pairs give their memory back."""
    wait_until(
        lambda: not any(node.backend.budget.used_bytes for node in nodes), 2 * PATIENCE_S + 10.0
    )


# Reading.


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small blocks", "large blocks"])
def test_scattered_blocks_are_equal(start: Start, sizes: tuple[int, int, int]) -> None:
    source, reader = start(*sizes), start(*sizes)
    meet(reader, source)
    for seed, count in enumerate((1, 7, 20)):
        remote, local = scattered(count, sizes[0], seed), scattered(count, sizes[0], seed + 100)
        read(reader, source, remote, local)
    assert reader.backend.budget.used_bytes == nccl_pairs.STAGES * max(sizes[1:])


def test_many_transfers_two_readers_and_both_directions_at_once(
    start: Start,
) -> None:
    one, two, here = (start(*SMALL) for _ in range(3))
    for reader, source in ((one, here), (two, here), (here, one)):
        meet(reader, source)
    # Both read our even blocks into their odd ones, while we read the first one's even ones many
    # times.
    mine, theirs = list(range(0, SMALL[0], 2)), list(range(1, SMALL[0], 2))
    handles = [
        (reader, reader.backend.post_read(here.welcome, mine, theirs)) for reader in (one, two)
    ]
    for k in range(0, 32, 4):
        handle = here.backend.post_read(one.welcome, mine[k : k + 4], theirs[k : k + 4])
        handles.append((here, handle))
    assert all(reader.ended(handle) for reader, handle in handles)
    assert one.digest(theirs) == two.digest(theirs) == here.digest(mine)
    assert here.digest(theirs) == one.digest(mine)


def test_what_cannot_be_asked_is_refused_before_anything_starts(
    start: Start,
) -> None:
    source, reader = start(*SMALL), start(*SMALL)
    reader.backend.add_peer(source.welcome)
    with pytest.raises(TransferError, match="too many to ask for at once"):
        reader.backend.post_read(source.welcome, [63] * 2_000_000, [0])
    with pytest.raises(TransferError, match="one kv_connector"):
        reader.backend.add_peer(replace(source.welcome, generation="nixl", metadata=b"NIXL's"))


@pytest.mark.parametrize("strange", [{"key": b"short"}, {"port": -1}])
def test_a_strange_address_costs_its_peer_alone(start: Start, strange: dict[str, Any]) -> None:
    source, reader = start(*SMALL), start(*SMALL)
    address = msgspec.structs.replace(
        msgspec.msgpack.decode(source.metadata, type=Address), **strange
    )
    odd = replace(source.welcome, generation="odd", metadata=msgspec.msgpack.encode(address))
    reader.backend.add_peer(odd)
    with pytest.raises(PeerLost):
        reader.ended(reader.backend.post_read(odd, [1], [1]))
    meet(reader, source)
    read(reader, source, [5], [6])


def test_what_cannot_be_opened_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="needs a GPU, and the KV pool is on cpu; take nixl or"):
        NcclBackend(PoolRegion(0, 1, 1, "cpu"), "127.0.0.1", 1.0, 1.0).prepare()
    node = BackendNode(*SMALL)
    node.backend.close()
    elsewhere = NcclBackend(node.region, "203.0.113.1", 1.0, 1.0, nccl=node.nccl)
    elsewhere.prepare()
    with pytest.raises(ConfigError, match="cannot listen at kv_host"):
        elsewhere.open()


# Strangers.


@contextlib.contextmanager
def dialled(address: Address, key: bytes) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_serverkey = key
    dealer.connect(f"tcp://{address.host}:{address.port}")
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


def answer(dealer: zmq.Socket[bytes], within_s: float = 5.0) -> PairMessage | None:
    return decode(dealer.recv()) if dealer.poll(int(within_s * 1000)) else None


def test_whoever_has_not_been_welcomed_gets_no_answer(start: Start) -> None:
    address = msgspec.msgpack.decode(start(*SMALL).metadata, type=Address)
    another, _ = zmq.curve_keypair()
    with dialled(address, another) as stranger:
        stranger.send(encode(Meet(b"a" * 16, 1 << 40, b"")))
        assert answer(stranger, 0.3) is None
    with dialled(address, address.key) as peer:
        peer.send(encode(Meet(b"a" * 16, 1 << 40, b"")))
        assert isinstance(answer(peer), Part)


def test_a_reader_that_asks_for_what_none_may_loses_its_pair_and_nobody_else_does(
    start: Start,
) -> None:
    source, reader = start(*SMALL), start(*SMALL)
    meet(reader, source)
    read(reader, source, [1, 2], [3, 4])
    address = msgspec.msgpack.decode(source.metadata, type=Address)
    with dialled(address, address.key) as hostile:
        hostile.send(b"\x00rubbish")
        hostile.send_multipart([b"two", b"frames"])
        asks: list[tuple[list[int], int, int]]
        asks = [([64], 0, 1), ([-1], 0, 1), ([1 << 40], 0, 1), ([], 0, 1)]
        asks += [([1], -1, 2), ([1], 1, 10_001), ([1], 5, 0), ([1], 0, 1001)]
        for blocks, start_at, num_bytes in asks:
            name = os.urandom(16)
            hostile.send(encode(Meet(name, 1000, b"nobody waits here")))
            hostile.send(encode(Ask(name, blocks, start_at, num_bytes)))
            assert _parted(hostile, name)
    read(reader, source, [5], [6])


def _parted(dealer: zmq.Socket[bytes], name: bytes) -> bool:
    """Whether this pair was ended for what it was asked."""
    while (message := answer(dealer)) is not None:
        if isinstance(message, Part) and message.pair == name:
            return "refused: asked for" in message.reason
    return False


# Faults.


def test_a_stopped_source_is_given_up_holds_up_nobody_and_changes_nothing_later(
    start: Start,
) -> None:
    stopped, other, reader = (start(*LONG) for _ in range(3))
    handle = long_read(reader, stopped)
    meet(reader, other)
    read(reader, other, [5], [6])
    with pytest.raises(PeerLost):
        reader.ended(handle)
    # The blocks are somebody else's now.
    reader.fill(8)
    expected = reader.digest(range(LONG[0]))
    stopped.nccl.stopped.clear()
    free(stopped)
    assert reader.digest(range(LONG[0])) == expected
    read(reader, stopped, [5], [6])  # the same two meet again


def test_source_that_is_stopped_before_it_meets_is_given_up(
    start: Start,
) -> None:
    source, reader = start(*SMALL), start(*SMALL, meet_s=0.5)
    meet(reader, source)
    source.nccl.stopped.set()
    for handle in [reader.backend.post_read(source.welcome, [k], [k]) for k in range(3)]:
        with pytest.raises(PeerLost):
            reader.ended(handle)
    free(reader)
    source.nccl.stopped.clear()
    free(source)
    assert not reader.pool.any()
    read(reader, source, [5], [6])


@pytest.mark.parametrize("phase", ["never met", "idle pair", "in the middle"])
def test_lost_source_fails_the_read_at_once_and_its_successor_is_read(
    start: Start, phase: str
) -> None:
    reader, source = start(*LONG, meet_s=60.0, patience_s=60.0), BackendNode(*LONG)
    reader.nccl.patience_s = 60.0
    if phase == "in the middle":
        handle = long_read(reader, source)
    else:
        meet(reader, source)
        if phase == "idle pair":
            read(reader, source, [5], [6])
    source.backend.close()
    if phase != "in the middle":
        handle = reader.backend.post_read(source.welcome, [5], [6])
    with pytest.raises(PeerLost):
        reader.ended(handle)
    free(reader)
    successor = start(*LONG)
    meet(reader, successor)
    read(reader, successor, [7], [8])


@pytest.mark.parametrize("fault", ["close", "stop"])
@pytest.mark.parametrize("phase", ["idle pair", "in the middle"])
def test_lost_reader_costs_the_source_neither_memory_nor_its_other_readers(
    start: Start, phase: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_pairs, "IDLE_S", PATIENCE_S / 2)
    source, other, lost = start(*LONG), start(*LONG), BackendNode(*LONG)
    meet(lost, source)
    meet(other, source)
    if phase == "idle pair":
        read(lost, source, [1], [2])
    else:
        everything = list(range(LONG[0]))
        lost.nccl.stops = fault == "stop"
        handle = lost.backend.post_read(source.welcome, everything, everything)
        wait_until(lambda: bool(lost.pool[0].any()))
    lost.close() if fault == "close" else lost.nccl.stopped.set()
    read(other, source, [1], [2])
    free(source)
    if fault == "stop":
        lost.nccl.stopped.clear()
        if phase == "in the middle":
            with pytest.raises(PeerLost):
                lost.ended(handle)
        read(lost, source, [5], [6])  # the two meet again
        lost.backend.close()


# Memory.


def test_idle_pairs_are_closed_and_made_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_pairs, "IDLE_S", 0.1)
    source, reader = start(*SMALL), start(*SMALL)
    meet(reader, source)
    for block in range(3):
        read(reader, source, [block], [10 + block])
        free(reader, source)


def test_memory_cap_holds_over_all_pairs_and_idle_ones_make_room(
    start: Start,
) -> None:
    pair_bytes = nccl_pairs.STAGES * SMALL[2]
    source = start(*SMALL, memory_cap_bytes=2 * pair_bytes)
    readers = [start(*SMALL) for _ in range(4)]
    for reader in readers:
        meet(reader, source)
    for turn in range(2):
        handles = [reader.backend.post_read(source.welcome, [turn], [9]) for reader in readers]
        for reader, handle in zip(readers, handles, strict=True):
            assert reader.ended(handle)
            assert reader.digest([9]) == source.digest([turn])
            assert source.backend.budget.used_bytes <= 2 * pair_bytes


def test_a_read_under_way_as_the_source_closes_its_idle_pair_is_made_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair_bytes = nccl_pairs.STAGES * SMALL[2]
    source = start(*SMALL, memory_cap_bytes=pair_bytes)
    slow, other = start(*SMALL), start(*SMALL)
    meet(slow, source)
    meet(other, source)
    read(slow, source, [1], [2])

    def interrupt(communicator: FakeCommunicator) -> None:
        communicator.close()
        time.sleep(0.1)  # the pair's own thread finds out first

    monkeypatch.setattr(FakeCommunicator, "interrupt", interrupt)
    slow.nccl.stopped.set()
    handle = slow.backend.post_read(source.welcome, [3], [4])  # sent, and not yet received
    read(other, source, [5], [6])
    slow.nccl.stopped.clear()
    assert slow.ended(handle)
    assert slow.digest([4]) == source.digest([3])


def test_a_broken_read_has_not_ended_while_a_copy_into_the_pool_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, copied, lane = threading.Event(), threading.Event(), StagedPool.lane

    @contextlib.contextmanager
    def slow(pool: StagedPool) -> Iterator[Lane]:
        with lane(pool) as quick:
            try:
                yield quick
            finally:
                over.set()
                copied.wait(10.0)  # as a GPU's stream does

    source, reader = start(*LONG), start(*LONG, nccl=FakeNccl(patience_s=0.1))
    monkeypatch.setattr(StagedPool, "lane", slow)
    monkeypatch.setattr(Lane, "settled", lambda _: copied.is_set())
    handle = long_read(reader, source)
    assert over.wait(10.0)
    reader.close()
    assert not reader.backend.poll(handle)
    copied.set()
    with pytest.raises(PeerLost):
        reader.ended(handle)


def test_a_pair_that_finds_no_room_says_so(start: Start) -> None:
    source, reader = start(*SMALL), start(*SMALL, memory_cap_bytes=1000, meet_s=0.2)
    meet(reader, source)
    with pytest.raises(
        PeerLost, match="no room for another pair of 90000 bytes: pairs in use hold 0 of 1000"
    ):
        reader.ended(reader.backend.post_read(source.welcome, [1], [2]))


# Two GPUs: NCCL wants one for each rank.

BIG = (96, 8 << 20, 32 << 20)


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "sizes", [SMALL, LARGE, (256, 65_536, 1 << 20), BIG], ids=["odd", "odd large", "index", "runs"]
)
def test_gpu_scattered_blocks_are_equal(sizes: tuple[int, int, int]) -> None:
    with (
        peer_process(BackendNode, *sizes, "cuda:1") as source,
        contextlib.closing(BackendNode(*sizes, "cuda:0")) as reader,
    ):
        source.ask("fill", 7)
        welcome = source.ask("welcome")
        reader.backend.add_peer(welcome)
        for seed, count in enumerate((1, 7, 20)):
            remote, local = scattered(count, sizes[0], seed), scattered(count, sizes[0], seed + 100)
            assert reader.ended(reader.backend.post_read(welcome, remote, local), 60.0)
            assert reader.digest(local) == source.ask("digest", remote)


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_gpu_source_lost_in_the_middle_changes_nothing_and_ends_alone(fault: str) -> None:
    sizes = (96, 8 << 20, 1 << 20)
    with (
        peer_process(BackendNode, *sizes, "cuda:1") as source,
        contextlib.closing(BackendNode(*sizes, "cuda:0")) as reader,
    ):
        source.ask("fill", 7)
        welcome = source.ask("welcome")
        reader.backend.add_peer(welcome)
        everything = list(range(sizes[0]))
        assert reader.ended(reader.backend.post_read(welcome, [0], [0]), 60.0)
        source.stop()  # so that the transfer certainly breaks
        handle = reader.backend.post_read(welcome, everything, everything)
        if fault == "kill":
            source.kill()
        with pytest.raises(PeerLost):
            reader.ended(handle, PATIENCE_S + 10.0)
        reader.fill(8)
        expected = reader.digest(everything)
        wait_until(lambda: reader.backend.budget.used_bytes == 0, 20.0)
        if fault == "stop":
            source.go_on()
            wait_until(lambda: source.ask("backend.budget.used_bytes") == 0, 20.0)
        assert reader.digest(everything) == expected
        if fault == "stop":
            assert reader.ended(reader.backend.post_read(welcome, [5], [6]), 60.0)
            assert reader.digest([6]) == source.ask("digest", [5])
