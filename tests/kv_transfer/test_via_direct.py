"""The direct plane's own: what is refused and why, reads in slices, and what is left when a process
is killed.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from peer_process import CONFIG, FINGERPRINT, peer_process
from real_node import BLOCK_BYTES, BLOCKS, RealNode

from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer import direct
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import Fetched, FetchFailed, PoolRegion, Settled
from kvrelay.kv_transfer.direct import DirectBackend, HostFile, Metadata, runs
from kvrelay.kv_transfer.mapped_gpu import GpuPiece
from kvrelay.kv_transfer.transfer_engine import open_connector
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, TransferError

SMALL, SMALL_BYTES = 8, 48


class Pool:
    """A pool and the plane over it, without desk and thread."""

    def __init__(self, num_blocks: int = SMALL, block_bytes: int = SMALL_BYTES) -> None:
        self.blocks = zeros(num_blocks * block_bytes, torch.device("cpu")).view(
            num_blocks, block_bytes
        )
        self.region = PoolRegion(self.blocks.data_ptr(), num_blocks, block_bytes, "cpu")
        self.plane = DirectBackend(self.region)
        self.metadata = self.plane.open()

    def welcome(self, generation: str = "g", **changed: object) -> Source:
        """What a peer is told; `changed` fields of the metadata or of the region."""
        metadata = msgspec.msgpack.decode(self.metadata, type=Metadata)
        known = {
            name: changed.pop(name) for name in list(changed) if name in metadata.__struct_fields__
        }
        metadata = msgspec.structs.replace(metadata, **known)
        region = dataclasses.replace(self.region, **changed)  # type: ignore[arg-type]
        return Source("peer", generation, region, msgspec.msgpack.encode(metadata))

    def place(self) -> HostFile:
        place = msgspec.msgpack.decode(self.metadata, type=Metadata).place
        assert isinstance(place, HostFile)
        return place


@pytest.fixture
def here() -> Pool:
    return Pool()


@pytest.fixture
def there() -> Pool:
    it = Pool()
    it.blocks[:] = torch.arange(it.blocks.numel()).view(it.blocks.shape).to(torch.uint8)
    return it


def finish(plane: DirectBackend, handle: object) -> int:
    """Polls until the read is done."""
    for polls in range(1, 1000):
        if plane.poll(handle):
            return polls
    raise AssertionError("the read does not end")


# --- reading
# ------------------------------------------------------------------------------------------------------


def test_runs_cover_every_pair_once_in_order() -> None:
    rng = random.Random(0)
    for _ in range(200):
        remote, local = ([rng.randrange(6) for _ in range(rng.randrange(9))] for _ in range(2))
        local = (local + [0] * 9)[: len(remote)]
        got = [
            (there + i, here + i)
            for there, here, count in runs(remote, local)
            for i in range(count)
        ]
        assert got == list(zip(remote, local, strict=True))
    assert list(runs([3, 4, 5, 7], [0, 1, 2, 3])) == [(3, 0, 3), (7, 3, 1)]


def test_a_long_read_is_polled_in_steps_and_the_next_one_waits(
    here: Pool, there: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "SLICE_S", 0.0)
    monkeypatch.setattr(direct, "STEP_BYTES", 20)
    here.plane.add_peer(there.welcome())
    first = here.plane.post_read("g", [1, 2], [6, 7])  # one run of 96 bytes: five steps
    second = here.plane.post_read("g", [5], [0])
    assert not here.plane.poll(second)
    assert not here.plane.poll(first)
    assert torch.equal(here.blocks[6, :20], there.blocks[1, :20])
    assert not here.blocks[6, 20:].any()
    assert finish(here.plane, first) == 5
    assert not here.blocks[0].any()
    finish(here.plane, second)
    assert torch.equal(here.blocks[[6, 7, 0]], there.blocks[[1, 2, 5]])
    assert not here.blocks[1:6].any()


def test_a_peer_that_is_dropped_or_added_twice(here: Pool, there: Pool) -> None:
    for _ in range(2):
        here.plane.add_peer(there.welcome())
    assert mapped_read_only() == 1
    running = here.plane.post_read("g", [3], [4])
    here.plane.drop_peer("g")
    here.plane.drop_peer("unknown")
    with pytest.raises(TransferError, match="not there any more"):
        here.plane.post_read("g", [3], [4])
    finish(here.plane, running)  # a mapping lives as long as a read of it
    assert torch.equal(here.blocks[4], there.blocks[3])
    del running
    assert mapped_read_only() == 0


@pytest.mark.parametrize("remote", [[-1], [SMALL], [0, 1 << 40]])
def test_blocks_outside_either_pool_are_refused(here: Pool, there: Pool, remote: list[int]) -> None:
    here.plane.add_peer(there.welcome())
    with pytest.raises(
        TransferError, match=f"remote blocks .* reach outside a pool of {SMALL} blocks"
    ):
        here.plane.post_read("g", remote, [1] * len(remote))
    with pytest.raises(TransferError, match="local blocks"):
        here.plane.post_read("g", [1] * len(remote), remote)


def mapped_read_only() -> int:
    """Pools that this process has mapped as a reader."""
    return len(
        re.findall(r"^\S+ r--s .*kvrelay-pool", Path("/proc/self/maps").read_text(), re.MULTILINE)
    )


# --- what is refused
# ----------------------------------------------------------------------------------------------


def test_another_host_another_kind_and_another_language(here: Pool, there: Pool) -> None:
    with pytest.raises(TransferError, match="needs one host, and peer runs on another one"):
        here.plane.add_peer(there.welcome(boot_id="another"))
    with pytest.raises(
        TransferError, match=r"both KV pools on CPUs or both on GPUs: ours is on cpu, .* on cuda:1"
    ):
        here.plane.add_peer(there.welcome(place=GpuPiece(1, bytes(64), "GPU-1"), device="cuda:1"))
    for metadata in (b"", b"nixl's own \xff", msgspec.msgpack.encode({"boot_id": 3})):
        with pytest.raises(TransferError, match="speaks another language"):
            here.plane.add_peer(replace(there.welcome(), metadata=metadata))


def test_another_pid_namespace(here: Pool, there: Pool) -> None:
    place = msgspec.structs.replace(there.place(), pid_namespace=1)
    with pytest.raises(
        TransferError, match="needs one PID namespace, and peer runs in another one"
    ):
        here.plane.add_peer(there.welcome(place=place))


def test_a_process_or_file_that_is_not_there(here: Pool, there: Pool) -> None:
    for changed in ({"pid": 1 << 30}, {"pid": -1}, {"file": 9999}):
        with pytest.raises(TransferError, match="peer has ended"):
            here.plane.add_peer(
                there.welcome(place=msgspec.structs.replace(there.place(), **changed))
            )


def test_a_process_of_another_user(
    here: Pool, there: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:
        raise PermissionError("no")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(TransferError, match="needs one user, and peer runs as another one"):
        here.plane.add_peer(there.welcome())


def test_a_pool_of_a_process_that_got_the_same_number(here: Pool, there: Pool) -> None:
    """A restarted node has another nonce, whatever its process id and file number are."""
    restarted = Pool()
    with pytest.raises(TransferError, match="is another's: it has ended or restarted"):
        here.plane.add_peer(there.welcome(place=restarted.place()))
    assert mapped_read_only() == 0


@pytest.mark.parametrize("num_blocks", [0, -3, SMALL * 100, SMALL * 1000, 1 << 62])
def test_a_pool_of_another_size(here: Pool, there: Pool, num_blocks: int) -> None:
    """Neither is its nonce found, nor is anything behind its end touched."""
    with pytest.raises(TransferError):
        here.plane.add_peer(there.welcome(num_blocks=num_blocks))
    assert mapped_read_only() == 0


def test_files_that_could_fault_or_block(here: Pool, there: Pool, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(1 << 16))
    reading, writing = os.pipe()
    on_disk = os.open(large, os.O_RDWR)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 1 << 16)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        for file in (reading, on_disk, unsealed, folder):
            with pytest.raises(TransferError, match=r"is not sealed memory of \d+ bytes"):
                here.plane.add_peer(
                    there.welcome(place=msgspec.structs.replace(there.place(), file=file))
                )
    finally:
        for file in (reading, writing, on_disk, unsealed, folder):
            os.close(file)


def test_a_pool_that_is_not_shared_is_a_config_error() -> None:
    private = torch.zeros(SMALL * SMALL_BYTES, dtype=torch.uint8)
    region = PoolRegion(private.data_ptr(), SMALL, SMALL_BYTES, "cpu")
    with pytest.raises(ConfigError, match="memory that peers can map"):
        open_connector(
            "x", FINGERPRINT, region, replace(CONFIG, kv_connector="direct"), lambda: None
        )


# --- two processes
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def reader() -> Iterator[RealNode]:
    it = RealNode("reader", "direct")
    yield it
    it.desk.close()


def test_source_killed_in_the_middle_of_a_read(
    reader: RealNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is mapped stays: the read ends, its blocks are settled, nothing of the source is left."""
    monkeypatch.setattr(direct, "SLICE_S", 0.0)
    monkeypatch.setattr(direct, "STEP_BYTES", BLOCK_BYTES)
    everything = list(range(BLOCKS))
    with peer_process("direct", str(BLOCKS), str(BLOCK_BYTES), "cpu") as source:
        reader.plane.polls_left = 20
        reader.desk.watch("r", source.offer("r", everything))
        reader.desk.fetch("r", everything, everything[::-1])
        assert reader.plane.posted.wait(20.0)
        until = time.monotonic() + 20.0
        while reader.plane.gate.is_set() and time.monotonic() < until:
            time.sleep(0.001)
        source.kill()
        (failed,) = reader.wait(1)
        assert isinstance(failed, FetchFailed)
        assert failed.reason.startswith("PeerLost: ")
        reader.quiet()
        copied = reader.pool[:, 0].tolist()
        assert copied == [0] * (BLOCKS - 20) + list(range(20, 0, -1))
        assert mapped_read_only() == 1
        reader.plane.gate.set()
        assert reader.wait(1) == [Settled("r")]
    assert torch.equal(reader.pool[:, -1], torch.arange(BLOCKS, 0, -1, dtype=torch.uint8))
    assert not [name for name in os.listdir("/dev/shm") if "kvrelay" in name]
    until = time.monotonic() + 20.0
    while mapped_read_only() and time.monotonic() < until:
        time.sleep(0.001)
    assert mapped_read_only() == 0


def test_killed_reader_leaves_nothing_in_the_source(reader: RealNode) -> None:
    source = reader  # the other way round
    source.fill()
    with peer_process("direct", str(BLOCKS), str(BLOCK_BYTES), "cpu") as child:
        files = sorted(os.listdir("/proc/self/fd"))
        child.ask("gate", False)
        child.ask("watch", "r", msgspec.to_builtins(source.desk.offer("r", [1, 2], 32)))
        child.ask("fetch", "r", [1, 2], [3, 4])
        assert child.ask("posted")
        child.kill()
        (released,) = source.wait(1)
        assert released.request_id == "r"
    until = time.monotonic() + 20.0  # the control channel closes the connection when it notices
    while len(os.listdir("/proc/self/fd")) > len(files) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= len(files)


def test_restarted_source_is_refused() -> None:
    """A ticket of the old process that leads to the new one's address."""
    with peer_process("direct", "4", "4096", "cpu") as old:
        ticket = old.offer("r", [1])
        reader = RealNode("reader", "direct", 4, 4096)
        try:
            with peer_process("direct", "4", "4096", "cpu") as new:
                other = new.offer("r", [1])
                mixed = msgspec.structs.replace(other, generation=ticket.generation)
                reader.desk.watch("r", mixed)
                reader.desk.fetch("r", [1], [1])
                failed, settled = reader.wait(2)
                assert isinstance(failed, FetchFailed)
                assert "has restarted" in failed.reason
                assert settled == Settled("r")
        finally:
            reader.desk.close()


# --- on GPUs
# ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_reader() -> Iterator[RealNode]:
    it = RealNode(
        "reader", "direct", device="cuda:0", config=TransferConfig(lease_s=3.0, heartbeat_s=0.5)
    )
    yield it
    it.desk.close()


def fetch_all(reader: RealNode, source: object, name: str) -> None:
    everything = list(range(BLOCKS))
    reader.desk.watch(name, source.offer(name, everything))  # type: ignore[attr-defined]
    reader.desk.fetch(name, everything, everything[::-1])


def check_all(reader: RealNode) -> None:
    content = torch.arange(BLOCKS, 0, -1).to(reader.pool.device, torch.uint8)
    assert torch.equal(reader.pool, content[:, None].expand(BLOCKS, BLOCK_BYTES))


@pytest.mark.gpu
def test_gpu_pools_of_two_processes_on_one_gpu(gpu_reader: RealNode) -> None:
    with peer_process("direct", str(BLOCKS), str(BLOCK_BYTES), "cuda:0") as source:
        for name in ("first", "second"):
            gpu_reader.pool.zero_()
            torch.cuda.synchronize()
            fetch_all(gpu_reader, source, name)
            (fetched,) = gpu_reader.wait(1, within_s=30.0)
            assert isinstance(fetched, Fetched), fetched
            check_all(gpu_reader)
        # Other blocks stay as they are.
        before = gpu_reader.pool.clone()
        gpu_reader.desk.watch("r", source.offer("r", [5, 9, 2]))
        gpu_reader.desk.fetch("r", [5, 9, 2], [0, 40, 63])
        (fetched,) = gpu_reader.wait(1)
        assert isinstance(fetched, Fetched), fetched
        before[[0, 40, 63]] = torch.tensor([6, 10, 3], dtype=torch.uint8, device="cuda")[:, None]
        assert torch.equal(gpu_reader.pool, before)


@pytest.mark.gpu
def test_gpu_source_that_cuda_hides_from_the_reader(gpu_reader: RealNode) -> None:
    """As `kvrelay up` starts nodes: each sees its own GPU alone. The reader here sees all of them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    hidden = {"CUDA_VISIBLE_DEVICES": "1"}
    with peer_process("direct", str(BLOCKS), str(BLOCK_BYTES), "cuda:0", env=hidden) as source:
        fetch_all(gpu_reader, source, "r")
        (fetched,) = gpu_reader.wait(1, within_s=30.0)
        assert isinstance(fetched, Fetched), fetched
        check_all(gpu_reader)
        assert [event[:2] for event in source.events(1, within_s=10.0)] == [["Released", "r"]]
        # The other way round the peer's GPU 0 is one that this process does not see.
        gpu_reader.fill()
        source.ask(
            "watch",
            "back",
            msgspec.to_builtins(gpu_reader.desk.offer("back", [7], 1)),
            timeout_s=60.0,
        )
        source.ask("fetch", "back", [7], [1])
        assert [event[:2] for event in source.events(1, within_s=30.0)] == [["Fetched", "back"]]


@pytest.mark.gpu
def test_gpu_source_killed_during_and_before_a_read(gpu_reader: RealNode) -> None:
    """Mapped memory outlives its process: no CUDA error, the blocks are settled, the next peer
    works.
    """
    with peer_process("direct", str(BLOCKS), str(BLOCK_BYTES), "cuda:0") as source:
        fetch_all(gpu_reader, source, "warm")
        gpu_reader.wait(1, within_s=30.0)
        gpu_reader.plane.gate.clear()
        gpu_reader.plane.posted.clear()
        fetch_all(gpu_reader, source, "killed")
        assert gpu_reader.plane.posted.wait(20.0)  # launched, or about to be
        source.kill()
        (failed,) = gpu_reader.wait(1, within_s=3.0)
        assert isinstance(failed, FetchFailed)
        assert failed.reason.startswith("PeerLost: ")
        gpu_reader.plane.gate.set()
        assert gpu_reader.wait(1) == [Settled("killed")]
    torch.cuda.synchronize()
    with peer_process("direct", str(BLOCKS), str(BLOCK_BYTES), "cuda:0") as another:
        fetch_all(gpu_reader, another, "again")
        (fetched,) = gpu_reader.wait(1, within_s=30.0)
        assert isinstance(fetched, Fetched), fetched
        check_all(gpu_reader)


@pytest.mark.gpu
def test_gpu_handle_that_leads_elsewhere_is_refused_and_harms_nothing(gpu_reader: RealNode) -> None:
    plane = DirectBackend(gpu_reader.region)
    metadata = msgspec.msgpack.decode(plane.open(), type=Metadata)
    assert isinstance(metadata.place, GpuPiece)
    for handle in (
        b"",
        bytes(64),
        metadata.place.handle,
    ):  # the last: CUDA does not open what is our own
        place = msgspec.structs.replace(metadata.place, handle=handle)
        changed = msgspec.msgpack.encode(
            msgspec.structs.replace(metadata, place=place, nonce=bytes(32))
        )
        with pytest.raises(TransferError):
            plane.add_peer(Source("peer", "g", gpu_reader.region, changed))
    plane.close()
    torch.zeros(1, device="cuda").add_(1).item()  # the context is sound
