"""The real thing: NIXL over UCX on CPU memory, in one process and between two."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from peer_process import CONFIG, FINGERPRINT, PeerProcess, peer_process

from kv_transfer.connector import Connector, Event, Fetched, FetchFailed, PoolRegion, Released, Settled
from kv_transfer.open import open_connector
from wire.config import TransferConfig
from wire.errors import ConfigError

pytest.importorskip("nixl")

BLOCKS, BLOCK_BYTES = 64, 1 << 20


class NixlNode:
    """A connector over a pool of its own, [BLOCKS, BLOCK_BYTES] uint8."""

    def __init__(self, name: str, config: TransferConfig = CONFIG) -> None:
        self.pool = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.woken = threading.Event()
        region = PoolRegion(self.pool.ctypes.data, BLOCKS, BLOCK_BYTES, "cpu")
        self.connector: Connector = open_connector(name, FINGERPRINT, region, config, self.woken.set)

    def wait(self, count: int, within_s: float = 10.0) -> list[Event]:
        got: list[Event] = []
        until = time.monotonic() + within_s
        while len(got) < count and self.woken.wait(max(0.0, until - time.monotonic())):
            self.woken.clear()
            got += self.connector.events()
        assert len(got) == count, got
        return got


@pytest.fixture
def node() -> Iterator[NixlNode]:
    it = NixlNode("here", TransferConfig(lease_s=3.0, heartbeat_s=0.5))
    yield it
    it.connector.close()


def test_scattered_blocks_are_equal_and_idle_connectors_cost_no_cpu(node: NixlNode) -> None:
    source = NixlNode("source")
    try:
        random = np.random.default_rng(0)
        source.pool[:] = random.integers(0, 256, source.pool.shape, np.uint8)
        for count in (1, 7, 40):
            remote, local = (random.permutation(BLOCKS)[:count] for _ in range(2))
            node.connector.watch("r", source.connector.offer("p", remote.tolist(), 1))
            node.connector.fetch("r", remote.tolist(), local.tolist())
            (fetched,) = node.wait(1)
            assert isinstance(fetched, Fetched), fetched
            assert fetched.num_bytes == count * BLOCK_BYTES
            assert np.array_equal(node.pool[local], source.pool[remote])
            assert source.wait(1) == [Released("p", expired=False)]
        node.connector.watch("far", source.connector.offer("far", [1], 1))
        node.connector.fetch("far", [BLOCKS], [0])
        failed, settled = node.wait(2)
        assert isinstance(failed, FetchFailed)
        assert f"outside a pool of {BLOCKS} blocks" in failed.reason
        assert settled == Settled("far")
        source.wait(1)
        cpu = time.process_time()
        source.woken.wait(0.5)
        # Two connectors of which one still expects its peer, 0.5 s: their progress threads would take 1 s.
        assert time.process_time() - cpu < 0.1
    finally:
        before = time.monotonic()
        source.connector.close()
        assert time.monotonic() - before < 1.0


def test_stopped_and_killed_source(node: NixlNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP a READ needs the source's help: stopping it holds the transfer in flight."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    reader = NixlNode("reader", CONFIG)
    try:
        with peer_process("nixl", str(BLOCKS), str(BLOCK_BYTES)) as source:
            everything = list(range(BLOCKS))
            # Bytes are equal between two processes, and the pair is warm.
            reader.connector.watch("first", source.offer("first", everything))
            reader.connector.fetch("first", everything, everything[::-1])
            (fetched,) = reader.wait(1)
            assert isinstance(fetched, Fetched), fetched
            assert np.array_equal(
                reader.pool[::-1, :: BLOCK_BYTES - 1], np.repeat(np.arange(1, BLOCKS + 1), 2).reshape(-1, 2)
            )
            assert source.events(1, within_s=2.0) == [["Released", "first", False]]

            # Stopped: nothing fails before the deadline, nothing is settled before the bytes have come after all.
            reader.pool[:] = 0
            stop_mid_fetch(reader, source, "second")
            (failed,) = reader.wait(1)
            assert isinstance(failed, FetchFailed)
            assert failed.reason.startswith("TransferTimeout: ")
            assert not reader.woken.wait(0.3)
            source.go_on()
            assert reader.wait(1) == [Settled("second")]
            assert source.events(1, within_s=2.0) != []
            landed = reader.pool.copy()
            assert not reader.woken.wait(0.2)
            assert np.array_equal(landed, reader.pool)  # settled means settled

            # Killed in the middle: fails at once and is settled.
            stop_mid_fetch(reader, source, "third")
            source.kill()
            killed_at = time.monotonic()
            failed, settled = reader.wait(2)
            assert isinstance(failed, FetchFailed)
            assert failed.reason.startswith("PeerLost: ")
            assert settled == Settled("third")
            assert time.monotonic() - killed_at < 1.0
    finally:
        reader.connector.close()


def stop_mid_fetch(reader: NixlNode, source: PeerProcess, name: str) -> None:
    reader.connector.watch(name, source.offer(name, list(range(BLOCKS))))
    assert not reader.woken.wait(0.1)  # the lease is renewed meanwhile
    source.stop()
    reader.connector.fetch(name, list(range(BLOCKS)), list(range(BLOCKS)))
    assert not reader.woken.wait(0.1)


def test_missing_nixl_is_a_config_error_naming_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"pip install kvrelay\[node\]"):
        NixlNode("x")
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-")]


def test_unregistrable_pool_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="neither cpu nor cuda:N"):
        open_connector("x", FINGERPRINT, PoolRegion(0, 1, 1, "tpu"), CONFIG, lambda: None)
