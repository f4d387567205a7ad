"""Facts and doubles that several tests of a node share: a model whose 300 tokens are bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvrelay.node.serving import Serving
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import EngineReady

VOCAB, EOS = 300, 2
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_config(folder: Path) -> str:
    """Write the model's config; return its path."""
    config = folder / "config.json"
    config.write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": EOS}))
    return str(config)


def engine_info(max_model_len: int = 1000, **fields: Any) -> EngineReady:
    return EngineReady("e", "g", "m", VOCAB, max_model_len, 16, 99, 1, [EOS], 0.0, **fields)


def serving_of(folder: Path, info: EngineReady, **fields: Any) -> Serving:
    tokenizer = load_tokenizer(write_config(folder))
    return Serving(Role.AGGREGATED, "m", TEMPLATE, tokenizer, info, **fields)


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ticket(tokens: int) -> dict[str, Any]:
    """The hand-over of a prompt of so many tokens, as a body has it."""
    return {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
        "remote_block_ids": [list(range(1, 1 + -(-tokens // 16)))],
        "generation": "g",
        "num_tokens": tokens,
    }
