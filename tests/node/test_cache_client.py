"""Whose KV a node finds below its pool, and what becomes of a node without a cache process."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from node_doubles import write_config

from kvrelay.node.cache_client import CacheClient, identity
from kvrelay.node.child import Child
from kvrelay.wire.config import CacheConfig, EngineConfig, NodeConfig, TransferConfig
from kvrelay.wire.engine_messages import EngineReady
from kvrelay.wire.kv_events import CacheChanges
from kvrelay.wire.transfer import Fingerprint, KvFacts

FINGERPRINT = Fingerprint(
    protocol=1,
    model="tiny",
    kv_dtype="bfloat16",
    block_size=16,
    kv_heads=2,
    head_dim=16,
    layers=1,
    window=0,
    tp_size=1,
)


def test_a_copy_of_a_model_finds_the_same_kv_and_a_changed_one_does_not(tmp_path: Path) -> None:
    def of(folder: Path) -> bytes:
        return identity(FINGERPRINT, EngineConfig(model=str(folder)))

    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    write_config(mine)
    (mine / "model.safetensors").write_bytes(b"weights")
    shutil.copytree(mine, other, copy_function=shutil.copy)  # with new times
    assert of(other) == of(mine)
    config = other / "config.json"
    written = config.read_bytes()
    config.write_bytes(written.replace(b" ", b"\t"))  # of the same size
    assert of(other) != of(mine)
    config.write_bytes(written)
    assert of(other) == of(mine)
    (other / "model.safetensors").write_bytes(b"more weights")
    assert of(other) != of(mine)


async def test_a_node_goes_on_without_a_process_and_with_a_link_that_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(*_: object) -> Child:
        raise BlockingIOError(11, os.strerror(11))

    monkeypatch.setattr(Child, "start", full)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    config = NodeConfig(
        engine=EngineConfig(str(tmp_path), enable_prefix_caching=True),
        transfer=TransferConfig(kv_checksums=0.1),
        cache=CacheConfig(kv_host_memory=1 << 20),
    )
    client = CacheClient(config, lambda _: None)
    kv = KvFacts(FINGERPRINT)
    client.attach(EngineReady("e", "g", "tiny", 9, 9, 16, 9, 64, [], 0.0, kv=kv))
    client.tell(CacheChanges([], []))
    async with asyncio.timeout(5):
        while not caplog.text:
            await asyncio.sleep(0)
    await client.stop()
    assert client.source is None
    assert "no cache process ([Errno 11] Resource temporarily unavailable)" in caplog.text
