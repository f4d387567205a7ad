"""Nodes whose keys mean different things refuse each other: what an engine process says of itself
at the handshake.
"""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from kvrelay.node.engine_reports import fingerprint_of
from kvrelay.paged_engine.engine import Engine
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.transfer import Fingerprint

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
CONFIG = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 256,
    "rope_scaling": LONGROPE,
    "pad_token_id": 0,
}


def test_nodes_of_one_limit_agree_and_those_with_other_rotary_frequencies_do_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def said(max_model_len: int) -> Fingerprint:
        config = EngineConfig(
            str(tmp_path),
            load_format="dummy",
            device="cpu",
            max_model_len=max_model_len,
            threads=1,
            kv_cache_memory_bytes=4 << 20,
        )
        return fingerprint_of(Engine(config), config)

    short, middle, long = said(128), said(256), said(1024)
    assert short.rope == middle.rope == ""
    assert short.difference(middle) is None
    assert short.difference(long) == "rope is '' here and 'longrope, long' there"
    assert short.difference(replace(short, tp_size=4)) is None, "ranks read what others wrote"
    other = short.difference(replace(short, kv_dtype="fp8"))
    assert other == "kv_dtype is 'float32' here and 'fp8' there"
    assert (long.kv_heads, long.block_size, long.tp_size, long.kv_dtype) == (2, 16, 1, "float32")
