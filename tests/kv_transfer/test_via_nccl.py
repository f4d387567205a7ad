"""The NCCL plane: over TCP between real processes, and over NCCL where there are two GPUs."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import zmq
from nccl_peer import FINGERPRINT, PATIENCE_S, PeerPlane, PlaneNode, peer_plane
from woken import Woken

from kvrelay.kv_transfer import pairs
from kvrelay.kv_transfer.connector import Fetched, PoolRegion, Released
from kvrelay.kv_transfer.open import open_connector
from kvrelay.kv_transfer.over_tcp import Invitation
from kvrelay.kv_transfer.pair_messages import Address, Ask, Meet, PairMessage, Part, decode, encode
from kvrelay.kv_transfer.via_nccl import NcclPlane
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, PeerLost, TransferError

# Neither divides the other: slices of two blocks and a bit; and blocks of several slices.
SMALL, LARGE = (64, 10_001, 30_000), (24, 100_003, 7_000)
# Some 4,000 slices, so that there is a middle to stop in.
LONG = (64, 1 << 20, 16 << 10)


@contextlib.contextmanager
def plane_node(*sizes: int, device: str = "cpu", **settings: float) -> Iterator[PlaneNode]:
    node = PlaneNode(*sizes, device, **settings)
    try:
        yield node
    finally:
        node.plane.close()


def until(true: Callable[[], object], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.005)


def scattered(count: int, num_blocks: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(num_blocks), count)


def long_read(reader: PlaneNode, source: PeerPlane) -> object:
    """A read whose first slice has arrived, and most of which has not."""
    everything = list(range(LONG[0]))
    generation = meet(reader, source)
    handle = reader.plane.post_read(generation, everything, everything)
    until(lambda: bool(reader.pool[0].any()))
    return handle


def meet(reader: PlaneNode, source: PeerPlane) -> str:
    source.ask("fill", 7)
    welcome = source.welcome
    reader.plane.add_peer(welcome)
    return welcome.generation


# Reading.


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small blocks", "large blocks"])
def test_scattered_blocks_are_equal(sizes: tuple[int, int, int]) -> None:
    with peer_plane(*sizes) as source, plane_node(*sizes) as reader:
        generation = meet(reader, source)
        for seed, count in enumerate((1, 7, 20)):
            remote, local = scattered(count, sizes[0], seed), scattered(count, sizes[0], seed + 100)
            assert reader.ended(reader.plane.post_read(generation, remote, local))
            assert reader.digest(local) == source.ask("digest", remote)
        assert reader.plane.budget.used_bytes == pairs.STAGES * sizes[2]


def test_many_transfers_two_readers_and_both_directions_at_once() -> None:
    with peer_plane(*SMALL) as one, peer_plane(*SMALL) as two, plane_node(*SMALL) as here:
        here.fill(1)
        blocks = SMALL[0]
        generation = meet(here, one)
        mine, theirs = list(range(0, blocks, 2)), list(range(1, blocks, 2))
        for child in (one, two):
            child.meet(here.welcome)
        # Both children read our even blocks into their odd ones, while we read the first child's
        # even ones many times.
        for child in (one, two):
            child.tell("read", here.generation, mine, theirs)
        handles = [
            here.plane.post_read(generation, mine[k : k + 4], theirs[k : k + 4])
            for k in range(0, 32, 4)
        ]
        assert all(here.ended(handle) for handle in handles)
        assert one.answer() is True
        assert two.answer() is True
        assert one.ask("digest", theirs) == two.ask("digest", theirs) == here.digest(mine)
        assert here.digest(theirs) == one.ask("digest", mine)


def test_blocks_outside_either_pool_are_refused_before_anything_starts() -> None:
    with plane_node(*SMALL) as source, plane_node(*SMALL) as reader:
        reader.plane.add_peer(source.welcome)
        for remote, local, whose in (
            ([64], [0], "remote"),
            ([-1], [0], "remote"),
            ([0], [64], "local"),
        ):
            with pytest.raises(
                TransferError, match=rf"{whose} blocks .* reach outside a pool of 64 blocks"
            ):
                reader.plane.post_read(source.generation, remote, local)
        with pytest.raises(TransferError, match="too many to ask for at once"):
            reader.plane.post_read(source.generation, [63] * 2_000_000, [0])
        with pytest.raises(TransferError, match="not there any more"):
            reader.plane.post_read("somebody", [0], [0])


def test_a_peer_of_another_kind_is_refused() -> None:
    with plane_node(*SMALL) as source, plane_node(*SMALL) as reader:
        with pytest.raises(TransferError, match="one kv_connector"):
            reader.plane.add_peer(replace(source.welcome, metadata=b"NIXL's"))
        elsewhere = PoolRegion(0, 64, 10_001, "cuda:0")
        with pytest.raises(TransferError, match="both on CPUs or both on GPUs"):
            reader.plane.add_peer(replace(source.welcome, region=elsewhere))


def test_what_cannot_be_opened_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="neither cpu nor cuda:N"):
        NcclPlane(PoolRegion(0, 1, 1, "tpu"), "127.0.0.1", 1.0, 1.0)
    pool = np.zeros(1, np.uint8)
    elsewhere = NcclPlane(PoolRegion(pool.ctypes.data, 1, 1, "cpu"), "203.0.113.1", 1.0, 1.0)
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


def test_whoever_has_not_been_welcomed_gets_no_answer() -> None:
    with plane_node(*SMALL) as source:
        address = msgspec.msgpack.decode(source.metadata, type=Address)
        another, _ = zmq.curve_keypair()
        with dialled(address, another) as stranger:
            stranger.send(encode(Meet(b"a" * 16, 1 << 40, b"")))
            assert answer(stranger, 0.3) is None
        with dialled(address, address.key) as peer:
            peer.send(encode(Meet(b"a" * 16, 1 << 40, b"")))
            assert isinstance(answer(peer), Part)


def test_a_reader_that_asks_for_blocks_outside_the_pool_loses_its_pair_and_nobody_else_does() -> (
    None
):
    with peer_plane(*SMALL) as reader, plane_node(*SMALL) as source:
        source.fill(2)
        reader.meet(source.welcome)
        assert reader.ask("read", source.generation, [1, 2], [3, 4]) is True
        address = msgspec.msgpack.decode(source.metadata, type=Address)
        with (
            dialled(address, address.key) as hostile,
            socket.create_server(("127.0.0.1", 0)) as silent,
        ):
            facts = msgspec.msgpack.encode(
                Invitation("127.0.0.1", silent.getsockname()[1], bytes(32))
            )
            hostile.send(b"\x00rubbish")
            hostile.send_multipart([b"two", b"frames"])
            for blocks in ([64], [-1], [1 << 40], []):
                name = os.urandom(16)
                hostile.send(encode(Meet(name, 1000, facts)))
                hostile.send(encode(Ask(name, blocks, 0, 1)))
                assert _parted(hostile, name)
        assert reader.ask("read", source.generation, [5], [6]) is True
        assert reader.ask("digest", [3, 4, 6]) == source.digest([1, 2, 5])


def _parted(dealer: zmq.Socket[bytes], name: bytes) -> bool:
    """Whether this pair was ended for its blocks."""
    while (message := answer(dealer)) is not None:
        if isinstance(message, Part) and message.pair == name:
            return "a pool of 64 blocks" in message.reason
    return False


# Faults.


def test_source_stopped_in_the_middle_and_continued_past_the_deadline_changes_nothing() -> None:
    with peer_plane(*LONG) as source, plane_node(*LONG) as reader:
        handle = long_read(reader, source)
        source.stop()
        stopped_at = time.monotonic()
        slowest = 0.0

        def poll() -> bool:
            nonlocal slowest
            before = time.monotonic()
            try:
                return reader.plane.poll(handle)
            finally:
                slowest = max(slowest, time.monotonic() - before)

        with pytest.raises(PeerLost):
            until(poll, PATIENCE_S + 5.0)
        assert time.monotonic() - stopped_at < PATIENCE_S + 2.0
        assert slowest < 0.5  # the plane's thread never waits
        # The blocks are somebody else's now.
        reader.fill(8)
        expected = reader.digest(range(LONG[0]))
        source.go_on()
        generation = source.welcome.generation  # it answers, so it has gone on
        until(lambda: source.ask("used") == 0)
        assert reader.digest(range(LONG[0])) == expected
        # The same two meet again.
        assert reader.ended(reader.plane.post_read(generation, [5], [6]))
        assert reader.digest([6]) == source.ask("digest", [5])


def test_source_that_is_stopped_before_it_meets_is_given_up() -> None:
    with peer_plane(*SMALL) as source, plane_node(*SMALL, meet_s=1.0) as reader:
        generation = meet(reader, source)
        source.stop()
        handles = [reader.plane.post_read(generation, [k], [k]) for k in range(3)]
        for handle in handles:
            with pytest.raises(PeerLost):
                reader.ended(handle)
        until(lambda: reader.plane.budget.used_bytes == 0)
        source.go_on()
        assert source.ask("digest", [0])
        assert not reader.pool.any()
        assert reader.ended(reader.plane.post_read(generation, [5], [6]))


def test_a_stopped_source_does_not_hold_up_another_one() -> None:
    with peer_plane(*LONG) as stopped, peer_plane(*LONG) as source, plane_node(*LONG) as reader:
        handle = long_read(reader, stopped)
        stopped.stop()
        reader.pool.zero_()
        generation = meet(reader, source)
        before = time.monotonic()
        assert reader.ended(reader.plane.post_read(generation, [5], [6]))
        assert time.monotonic() - before < PATIENCE_S
        with pytest.raises(PeerLost):
            reader.ended(handle)
        assert reader.ended(reader.plane.post_read(generation, [7], [8]))


@pytest.mark.parametrize("phase", ["never met", "idle pair", "in the middle"])
def test_killed_source_fails_the_read_at_once_and_its_successor_is_read(phase: str) -> None:
    with plane_node(*LONG) as reader:
        with peer_plane(*LONG) as source:
            if phase == "in the middle":
                handle = long_read(reader, source)
            else:
                generation = meet(reader, source)
                if phase == "idle pair":
                    assert reader.ended(reader.plane.post_read(generation, [5], [6]))
            source.kill()
            killed_at = time.monotonic()
            if phase != "in the middle":
                handle = reader.plane.post_read(generation, [5], [6])
            with pytest.raises(PeerLost):
                reader.ended(handle)
            assert time.monotonic() - killed_at < PATIENCE_S
        until(lambda: reader.plane.budget.used_bytes == 0, PATIENCE_S + 2.0)
        with peer_plane(*LONG) as successor:
            generation = meet(reader, successor)
            assert reader.ended(reader.plane.post_read(generation, [7], [8]))
            assert reader.digest([8]) == successor.ask("digest", [7])


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("phase", ["idle pair", "in the middle"])
def test_lost_reader_costs_the_source_neither_memory_nor_its_other_readers(
    phase: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "IDLE_S", PATIENCE_S / 2)  # here, not in the children
    with peer_plane(*LONG) as lost, peer_plane(*LONG) as other, plane_node(*LONG) as source:
        source.fill(3)
        lost.meet(source.welcome)
        other.meet(source.welcome)
        everything = list(range(LONG[0]))
        if phase == "idle pair":
            assert lost.ask("read", source.generation, [1], [2]) is True
        else:
            lost.tell("read", source.generation, everything, everything)
            until(lambda: source.plane.budget.used_bytes > 0)
        lost.kill() if fault == "kill" else lost.stop()
        assert other.ask("read", source.generation, [1], [2]) is True
        assert other.ask("digest", [2]) == source.digest([1])
        until(lambda: source.plane.budget.used_bytes == 0, 2 * PATIENCE_S + 10.0)
        if fault == "stop":
            lost.go_on()
            if phase == "in the middle":
                said = lost.answer()
                if said is True:  # the last of it was on its way already
                    assert lost.ask("digest", everything) == source.digest(everything)
                else:
                    assert str(said).startswith("PeerLost: ")
            # The source may have closed the pair while its reader slept: the two meet again.
            assert lost.ask("read", source.generation, [5], [6]) is True
            assert lost.ask("digest", [6]) == source.digest([5])


def test_close_in_the_middle_returns_soon_and_never_touches_the_pool_again() -> None:
    with peer_plane(*LONG) as source:
        reader = PlaneNode(*LONG)
        handle = long_read(reader, source)
        before = time.monotonic()
        reader.plane.close()
        assert time.monotonic() - before < PATIENCE_S
        landed = reader.pool.clone()
        with pytest.raises(PeerLost):
            reader.plane.poll(handle)
        until(lambda: source.ask("used") == 0)
        assert torch.equal(landed, reader.pool)
        assert source.ask("close") == []
        until(
            lambda: (
                not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]
            )
        )


def test_dropped_peer_is_forgotten() -> None:
    with peer_plane(*SMALL) as source, plane_node(*SMALL) as reader:
        generation = meet(reader, source)
        assert reader.ended(reader.plane.post_read(generation, [5], [6]))
        reader.plane.drop_peer(generation)
        reader.plane.drop_peer("unknown")
        until(lambda: reader.plane.budget.used_bytes == 0)
        until(lambda: source.ask("used") == 0)
        with pytest.raises(TransferError, match="not there any more"):
            reader.plane.post_read(generation, [5], [6])
        assert meet(reader, source) == generation
        assert reader.ended(reader.plane.post_read(generation, [5], [6]))


# Memory.


def test_idle_pairs_are_closed_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "IDLE_S", 0.1)
    with peer_plane(*SMALL) as source, plane_node(*SMALL) as reader:
        generation = meet(reader, source)
        for block in range(3):
            assert reader.ended(reader.plane.post_read(generation, [block], [10 + block]))
            until(lambda: reader.plane.budget.used_bytes == 0)
            until(lambda: source.ask("used") == 0)
        assert reader.digest([10, 11, 12]) == source.ask("digest", [0, 1, 2])


def test_memory_cap_holds_over_all_pairs_and_idle_ones_make_room() -> None:
    pair_bytes = pairs.STAGES * SMALL[2]
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(plane_node(*SMALL, memory_cap_bytes=2 * pair_bytes))
        source.fill(4)
        readers = [stack.enter_context(plane_node(*SMALL)) for _ in range(4)]
        for reader in readers:
            reader.plane.add_peer(source.welcome)
        for turn in range(2):
            handles = [reader.plane.post_read(source.generation, [turn], [9]) for reader in readers]
            for reader, handle in zip(readers, handles, strict=True):
                assert reader.ended(handle)
                assert reader.digest([9]) == source.digest([turn])
        assert source.plane.budget.peak_bytes == 2 * pair_bytes


def test_a_pair_that_finds_no_room_says_so() -> None:
    with (
        plane_node(*SMALL) as source,
        plane_node(*SMALL, memory_cap_bytes=1000, meet_s=0.2) as reader,
    ):
        reader.plane.add_peer(source.welcome)
        with pytest.raises(
            PeerLost, match="no room for another pair of 90000 bytes: pairs in use hold 0 of 1000"
        ):
            reader.ended(reader.plane.post_read(source.generation, [1], [2]))


# As a connector.


class Node(Woken):
    """A connector over a pool of its own."""

    def __init__(self, name: str, num_blocks: int = 64, block_bytes: int = 10_002) -> None:
        self.pool = np.zeros((num_blocks, block_bytes), np.uint8)
        super().__init__()
        region = PoolRegion(self.pool.ctypes.data, num_blocks, block_bytes, "cpu")
        config = TransferConfig(kv_connector="nccl", lease_s=3.0, heartbeat_s=0.5)
        self.connector = self.watching = open_connector(
            name, FINGERPRINT, region, config, self.woken.set
        )


def test_connectors_hand_over_and_cost_no_cpu_when_idle() -> None:
    source, reader = Node("source"), Node("reader")
    try:
        source.pool[:] = np.random.default_rng(0).integers(0, 256, source.pool.shape, np.uint8)
        for count in (1, 40):
            remote, local = scattered(count, 64, count), scattered(count, 64, count + 1)
            reader.connector.watch("r", source.connector.offer("p", remote, 1))
            reader.connector.fetch("r", remote, local)
            (fetched,) = reader.wait(1)
            assert isinstance(fetched, Fetched), fetched
            assert np.array_equal(reader.pool[local], source.pool[remote])
            assert source.wait(1) == [Released("p", expired=False)]
        cpu = time.process_time()
        source.woken.wait(0.5)
        assert time.process_time() - cpu < 0.2
    finally:
        before = time.monotonic()
        reader.connector.close()
        source.connector.close()
        assert time.monotonic() - before < 4.0
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")])


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
        peer_plane(*sizes, device="cuda:1") as source,
        plane_node(*sizes, device="cuda:0") as reader,
    ):
        generation = meet(reader, source)
        for seed, count in enumerate((1, 7, 20)):
            remote, local = scattered(count, sizes[0], seed), scattered(count, sizes[0], seed + 100)
            assert reader.ended(reader.plane.post_read(generation, remote, local), 60.0)
            assert reader.digest(local) == source.ask("digest", remote)


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_gpu_source_lost_in_the_middle_changes_nothing_and_ends_alone(fault: str) -> None:
    sizes = (96, 8 << 20, 1 << 20)
    with (
        peer_plane(*sizes, device="cuda:1") as source,
        plane_node(*sizes, device="cuda:0") as reader,
    ):
        generation = meet(reader, source)
        everything = list(range(sizes[0]))
        assert reader.ended(reader.plane.post_read(generation, [0], [0]), 60.0)
        source.stop()  # so that the transfer certainly breaks
        handle = reader.plane.post_read(generation, everything, everything)
        if fault == "kill":
            source.kill()
        with pytest.raises(PeerLost):
            reader.ended(handle, PATIENCE_S + 10.0)
        reader.fill(8)
        expected = reader.digest(everything)
        until(lambda: reader.plane.budget.used_bytes == 0, 20.0)
        if fault == "stop":
            source.go_on()
            until(lambda: source.ask("used") == 0, 20.0)
        assert reader.digest(everything) == expected
        if fault == "stop":
            assert reader.ended(reader.plane.post_read(generation, [5], [6]), 60.0)
            assert reader.digest([6]) == source.ask("digest", [5])
