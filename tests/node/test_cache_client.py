"""Whose KV a node finds below its pool."""

from __future__ import annotations

import shutil
from pathlib import Path

from node_doubles import write_config

from kvrelay.node.cache_client import identity
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.transfer import Fingerprint

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
