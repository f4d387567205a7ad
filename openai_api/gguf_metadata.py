"""The metadata of a GGUF file, token lists among it, without numpy."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from kvrelay.wire.errors import ConfigError
from kvrelay.wire.gguf_header import read_gguf_header

__all__ = ["read_gguf_metadata"]


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys and values (bool, int, float, str, or a list of one of these). Raises ConfigError
    naming the file.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return read_gguf_header(content).metadata
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} is not a readable GGUF file: {why}") from why
