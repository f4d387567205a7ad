"""What the router uses of openai_api must not bring tokenizer or template code with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def loaded_by(statement: str, repository: Path) -> set[str]:
    """Top-level names in sys.modules after a statement in a fresh interpreter."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    env = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_types_body_and_sse_load_no_tokenizer_and_no_template_code(repository: Path) -> None:
    loaded = loaded_by(
        "import kvrelay.openai_api.types, kvrelay.openai_api.body, kvrelay.openai_api.sse",
        repository,
    )
    assert not loaded & {"tokenizers", "jinja2", "transformers", "torch", "numpy", "gguf"}


def test_the_whole_package_loads_neither_transformers_nor_torch_nor_numpy(repository: Path) -> None:
    loaded = loaded_by(
        "import kvrelay.openai_api.writer, kvrelay.openai_api.chat_template, kvrelay.openai_api.tokenizer",
        repository,
    )
    assert "tokenizers" in loaded
    assert not loaded & {"transformers", "torch", "numpy", "gguf"}
