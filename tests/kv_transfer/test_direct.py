"""The direct backend's own: what is refused and why, reads in slices, and what is left when a process
is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_node import CONFIG, FINGERPRINT, RealNode, reason
from peer_process import PeerProcess, peer_process

from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer import direct
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import Fetched, PoolRegion, Released, Settled
from kvrelay.kv_transfer.direct import DirectBackend, HostFile, Metadata
from kvrelay.kv_transfer.gpu_side import GpuPiece
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, TransferError

SMALL, SMALL_BYTES = 8, 48
LARGE = BLOCKS, BLOCK_BYTES = 64, 1 << 20


class Pool:
    """A pool and the backend over it, without engine and thread."""

    def __init__(self, num_blocks: int = SMALL, block_bytes: int = SMALL_BYTES) -> None:
        self.blocks = zeros(num_blocks * block_bytes, torch.device("cpu")).view(
            num_blocks, block_bytes
        )
        self.region = PoolRegion(self.blocks.data_ptr(), num_blocks, block_bytes, "cpu")
        self.backend = DirectBackend(self.region)
        self.metadata = self.backend.open()

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


def finish(backend: DirectBackend, handle: object) -> int:
    """Polls until the read is done."""
    for polls in range(1, 1000):
        if backend.poll(handle):
            return polls
    raise AssertionError("the read does not end")


# reading


def test_a_long_read_is_polled_in_steps_and_the_next_one_waits(
    here: Pool, there: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "SLICE_S", 0.0)
    monkeypatch.setattr(direct, "STEP_BYTES", 20)  # less than a block
    here.backend.add_peer(there.welcome())
    first = here.backend.post_read(there.welcome(), [1, 2], [6, 7])
    second = here.backend.post_read(there.welcome(), [5], [0])
    assert not here.backend.poll(second)
    assert not here.backend.poll(first)
    assert torch.equal(here.blocks[6], there.blocks[1])
    assert not here.blocks[7].any()
    assert finish(here.backend, first) == 2
    assert not here.blocks[0].any()
    finish(here.backend, second)
    assert torch.equal(here.blocks[[6, 7, 0]], there.blocks[[1, 2, 5]])
    assert not here.blocks[1:6].any()


def test_a_mapping_lives_as_long_as_a_read_of_it(here: Pool, there: Pool) -> None:
    here.backend.add_peer(there.welcome())
    assert mapped_read_only() == 1
    running = here.backend.post_read(there.welcome(), [3], [4])
    here.backend.drop_peer("g")
    finish(here.backend, running)
    assert torch.equal(here.blocks[4], there.blocks[3])
    del running
    assert mapped_read_only() == 0


def mapped_read_only() -> int:
    """Pools that this process has mapped as a reader."""
    return len(
        re.findall(r"^\S+ r--s .*kvrelay-pool", Path("/proc/self/maps").read_text(), re.MULTILINE)
    )


# what is refused


def test_another_host_another_kind_and_another_language(here: Pool, there: Pool) -> None:
    with pytest.raises(TransferError, match="needs one host, and peer runs on another one"):
        here.backend.add_peer(there.welcome(boot_id="another"))
    with pytest.raises(TransferError, match="does not see GPU GPU-1, which peer is on"):
        here.backend.add_peer(there.welcome(place=GpuPiece(1, bytes(64), "GPU-1"), device="cuda:1"))
    for metadata in (b"", b"nixl's own \xff", msgspec.msgpack.encode({"boot_id": 3})):
        with pytest.raises(TransferError, match="speaks another language"):
            here.backend.add_peer(replace(there.welcome(), metadata=metadata))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"pid_namespace": 1}, "needs one PID namespace, and peer runs in another one"),
        ({"pid": 1 << 30}, "peer has ended"),
        ({"pid": -1}, "peer has ended"),
        ({"file": 9999}, "peer has ended"),
    ],
)
def test_memory_that_is_not_there(
    here: Pool, there: Pool, changed: dict[str, int], why: str
) -> None:
    place = msgspec.structs.replace(there.place(), **changed)
    with pytest.raises(TransferError, match=why):
        here.backend.add_peer(there.welcome(place=place))


def test_a_process_of_another_user(
    here: Pool, there: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:
        raise PermissionError("no")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(TransferError, match="needs one user, and peer runs as another one"):
        here.backend.add_peer(there.welcome())


def test_a_pool_of_a_process_that_got_the_same_number(here: Pool, there: Pool) -> None:
    """A restarted node has another nonce, whatever its process id and file number are."""
    restarted = Pool()
    with pytest.raises(TransferError, match="is another's: it has ended or restarted"):
        here.backend.add_peer(there.welcome(place=restarted.place()))
    assert mapped_read_only() == 0


@pytest.mark.parametrize("num_blocks", [0, -3, SMALL * 100, SMALL * 1000, 1 << 62])
def test_a_pool_of_another_size(here: Pool, there: Pool, num_blocks: int) -> None:
    """Neither is its nonce found, nor is anything behind its end touched."""
    with pytest.raises(TransferError):
        here.backend.add_peer(there.welcome(num_blocks=num_blocks))
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
                here.backend.add_peer(
                    there.welcome(place=msgspec.structs.replace(there.place(), file=file))
                )
    finally:
        for file in (reading, writing, on_disk, unsealed, folder):
            os.close(file)


def test_a_pool_that_is_not_shared_is_a_config_error() -> None:
    private = torch.zeros(SMALL * SMALL_BYTES, dtype=torch.uint8)
    region = PoolRegion(private.data_ptr(), SMALL, SMALL_BYTES, "cpu")
    with pytest.raises(ConfigError, match="memory that peers can map"):
        TransferEngine(
            "x", FINGERPRINT, region, replace(CONFIG, kv_connector="direct"), lambda: None
        )


# two processes


def filled(*sizes: Any) -> RealNode:
    return RealNode("source", "direct", *sizes, filled=True)


def fetch_all(reader: RealNode, source: PeerProcess, name: str) -> None:
    everything = list(range(BLOCKS))
    reader.fetch(name, source.offer(name, everything), everything, everything[::-1])


def check_all(reader: RealNode) -> None:
    content = torch.arange(BLOCKS, 0, -1).to(reader.pool)
    assert torch.equal(reader.pool, content[:, None].expand(LARGE))


# on GPUs


GPU = (*LARGE, "cuda:0")
HOST = (*LARGE, "cpu")
# From where to where.
ways = pytest.mark.parametrize(
    ("gpu_reader", "there"), [(GPU, GPU), (GPU, HOST), (HOST, GPU)], indirect=["gpu_reader"]
)


@pytest.fixture
def gpu_reader(request: pytest.FixtureRequest) -> Iterator[RealNode]:
    config = TransferConfig(lease_s=3.0, heartbeat_s=0.5)
    here = getattr(request, "param", GPU)
    with contextlib.closing(RealNode("reader", "direct", *here, config)) as it:
        yield it


def fetched_all(reader: RealNode, source: PeerProcess, name: str) -> None:
    fetch_all(reader, source, name)
    reader.fetched()
    check_all(reader)


@pytest.mark.gpu
@ways
def test_gpu_pools_of_two_processes_on_one_gpu(gpu_reader: RealNode, there: Any) -> None:
    with peer_process(filled, *there) as source:
        for name in ("first", "second"):
            gpu_reader.pool.zero_()
            torch.cuda.synchronize()
            fetched_all(gpu_reader, source, name)
        # Other blocks stay as they are.
        before = gpu_reader.pool.clone()
        gpu_reader.fetch("r", source.offer("r", [5, 9, 2]), [5, 9, 2], [0, 40, 63])
        gpu_reader.fetched()
        before[[0, 40, 63]] = torch.tensor([6, 10, 3]).to(before)[:, None]
        assert torch.equal(gpu_reader.pool, before)


@pytest.mark.gpu
def test_gpu_source_that_cuda_hides_from_the_reader(gpu_reader: RealNode) -> None:
    """As `kvrelay up` starts nodes: each sees its own GPU alone. The reader here sees all of them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with peer_process(filled, *GPU, CUDA_VISIBLE_DEVICES="1") as source:
        fetched_all(gpu_reader, source, "r")
        assert source.events(1, within_s=10.0) == [Released("r", expired=False)]
        # The other way round the peer's GPU 0 is one that this process does not see.
        gpu_reader.fill()
        source.ask("fetch", "back", gpu_reader.engine.offer("back", [7], 1), [7], [1])
        assert isinstance(source.events(1, within_s=30.0)[0], Fetched)


@pytest.mark.gpu
@ways
def test_gpu_source_killed_during_and_before_a_read(gpu_reader: RealNode, there: Any) -> None:
    """Mapped memory outlives its process: no CUDA error, the blocks are settled, the next peer
    works.
    """
    with peer_process(filled, *there) as source:
        fetch_all(gpu_reader, source, "warm")
        gpu_reader.wait(1)
        gpu_reader.backend.gate.clear()
        gpu_reader.backend.posted.clear()
        fetch_all(gpu_reader, source, "killed")
        assert gpu_reader.backend.posted.wait(20.0)  # launched, or about to be
        source.kill()
        assert reason(gpu_reader.wait(1)[0]).startswith("PeerLost: ")
        gpu_reader.backend.gate.set()
        assert gpu_reader.wait(1) == [Settled("killed")]
    torch.cuda.synchronize()
    with peer_process(filled, *there) as another:
        fetched_all(gpu_reader, another, "again")


@pytest.mark.gpu
def test_gpu_handle_that_leads_elsewhere_is_refused_and_harms_nothing(gpu_reader: RealNode) -> None:
    backend = DirectBackend(gpu_reader.region)
    metadata = msgspec.msgpack.decode(backend.open(), type=Metadata)
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
            backend.add_peer(Source("peer", "g", gpu_reader.region, changed))
    backend.close()
    torch.zeros(1, device="cuda").add_(1).item()  # the context is sound
