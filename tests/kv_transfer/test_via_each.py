"""What every connector must do, with real bytes: in one process, and between two of which one is
stopped or killed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from peer_process import AT_ONCE_S, CONFIG, PeerProcess, of_another_host, peer_process
from real_node import BLOCK_BYTES, BLOCKS, RealNode

from kvrelay.kv_transfer.connector import Fetched, FetchFailed, PoolRegion, Released, Settled
from kvrelay.kv_transfer.direct import DirectBackend
from kvrelay.kv_transfer.nixl import NixlBackend
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError

EVERYTHING = list(range(BLOCKS))


@pytest.fixture(params=["nixl", "direct"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl")
    return str(request.param)


@pytest.fixture
def node(kind: str) -> Iterator[RealNode]:
    it = RealNode("here", kind, config=TransferConfig(lease_s=3.0, heartbeat_s=0.5))
    yield it
    it.desk.close()


def test_scattered_blocks_are_equal_and_idle_connectors_cost_no_cpu(
    node: RealNode, kind: str
) -> None:
    source = RealNode("source", kind)
    try:
        generator = torch.Generator().manual_seed(0)
        source.pool[:] = torch.randint(
            0, 256, source.pool.shape, dtype=torch.uint8, generator=generator
        )
        for count in (1, 7, 40):
            remote, local = (torch.randperm(BLOCKS, generator=generator)[:count] for _ in range(2))
            expected = node.pool.clone()
            expected[local] = source.pool[remote]
            node.desk.watch("r", source.desk.offer("p", remote.tolist(), 1))
            node.desk.fetch("r", remote.tolist(), local.tolist())
            (fetched,) = node.wait(1)
            assert isinstance(fetched, Fetched), fetched
            assert fetched.num_bytes == count * BLOCK_BYTES
            assert torch.equal(node.pool, expected)
            assert source.wait(1) == [Released("p", expired=False)]
        node.desk.watch("far", source.desk.offer("far", [1], 1))
        node.desk.fetch("far", [BLOCKS], [0])
        failed, settled = node.wait(2)
        assert isinstance(failed, FetchFailed)
        assert f"outside a pool of {BLOCKS} blocks" in failed.reason
        assert settled == Settled("far")
        source.wait(1)
        cpu = time.process_time()
        source.woken.wait(0.5)
        # Two connectors of which one still expects its peer, 0.5 s: progress threads of their own
        # would take 1 s.
        assert time.process_time() - cpu < 0.2
    finally:
        before = time.monotonic()
        source.desk.close()
        assert time.monotonic() - before < AT_ONCE_S


def test_stopped_and_killed_source(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP a READ needs the source's help: stopping it holds the transfer in flight. A direct
    one needs none.
    """
    monkeypatch.setenv("UCX_TLS", "tcp")
    of_another_host(monkeypatch)
    reader = RealNode("reader", kind)
    try:
        with peer_process(kind, str(BLOCKS), str(BLOCK_BYTES), "cpu") as source:
            # Bytes are equal between two processes, and the pair is warm.
            reader.desk.watch("first", source.offer("first", EVERYTHING))
            reader.desk.fetch("first", EVERYTHING, EVERYTHING[::-1])
            (fetched,) = reader.wait(1)
            assert isinstance(fetched, Fetched), fetched
            content = torch.arange(BLOCKS, 0, -1, dtype=torch.uint8)
            assert torch.equal(reader.pool, content[:, None].expand(BLOCKS, BLOCK_BYTES))
            assert source.events(1, within_s=AT_ONCE_S) == [["Released", "first", False]]

            # Stopped: nothing fails before the deadline, nothing is settled before the bytes have
            # come after all.
            reader.pool[:] = 0
            stop_mid_fetch(reader, source, "second")
            events = reader.wait(1 if kind == "nixl" else 2)
            assert isinstance(events[0], FetchFailed)
            assert events[0].reason.startswith("TransferTimeout: ")
            reader.quiet(0.3)
            source.go_on()
            events += reader.wait(2 - len(events))
            assert events[1] == Settled("second")
            assert source.events(1, within_s=AT_ONCE_S) != []
            landed = reader.pool.clone()
            reader.quiet(0.2)
            assert torch.equal(landed, reader.pool)  # settled means settled

            # Killed in the middle: fails at once and is settled.
            stop_mid_fetch(reader, source, "third")
            source.kill()
            killed_at = time.monotonic()
            failed, settled = reader.wait(2)
            assert isinstance(failed, FetchFailed)
            assert failed.reason.startswith("PeerLost: ")
            assert settled == Settled("third")
            assert time.monotonic() - killed_at < AT_ONCE_S
    finally:
        reader.desk.close()


def test_no_block_that_is_used_again_is_touched_by_a_source_that_was_stopped_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes of an abandoned READ come after all. The block pool has given nobody the blocks
    that they land in.
    """
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    scheduler = Scheduler(
        BlockPool(BLOCKS),
        block_size=16,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        max_model_len=16,
        eos_token_ids=(),
    )
    reader = RealNode("reader", "nixl")
    try:
        with peer_process("nixl", str(BLOCKS), str(BLOCK_BYTES), "cpu") as source:
            mine = scheduler.lend_blocks("r", scheduler.spare_blocks)
            assert mine is not None
            reader.desk.watch("r", source.offer("r", mine))
            reader.renewed("r")
            source.stop()
            reader.desk.fetch("r", mine, mine)
            assert isinstance(reader.wait(1)[0], FetchFailed)
            scheduler.kept.quarantine_held("r")
            others = scheduler.pool.allocate(scheduler.pool.free)
            assert others is not None
            reader.pool[others] = 255
            source.go_on()
            assert reader.wait(1) == [Settled("r")]
            assert reader.pool[mine].any()
            assert bool((reader.pool[others] == 255).all())
            scheduler.kept.settle("r")
            assert sorted(scheduler.pool.allocate(scheduler.pool.free) or []) == sorted(mine)
    finally:
        reader.desk.close()


def stop_mid_fetch(reader: RealNode, source: PeerProcess, name: str) -> None:
    reader.desk.watch(name, source.offer(name, EVERYTHING))
    reader.renewed(name)
    source.stop()
    reader.desk.fetch(name, EVERYTHING, EVERYTHING)
    reader.quiet()


def test_source_killed_before_the_fetch(kind: str) -> None:
    reader = RealNode("reader", kind)
    try:
        with peer_process(kind, "4", "4096", "cpu") as source:
            reader.desk.watch("r", source.offer("r", [1, 2]))
            reader.quiet(CONFIG.heartbeat_s)
            source.kill()
        reader.desk.fetch("r", [1, 2], [3, 4])
        failed, settled = reader.wait(2)
        assert isinstance(failed, FetchFailed)
        assert settled == Settled("r")
        assert not reader.pool.any()
    finally:
        reader.desk.close()


def test_a_device_that_is_neither_cpu_nor_gpu_is_a_config_error(kind: str) -> None:
    region = PoolRegion(0, 1, 1, "tpu")
    with pytest.raises(ConfigError, match="neither cpu nor cuda:N"):
        _ = NixlBackend("x", region, "127.0.0.1") if kind == "nixl" else DirectBackend(region)
