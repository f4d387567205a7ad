"""Whether files of weights are whole, as far as their headers say. Reads a few pages of each, and
needs no torch.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvrelay.wire.gguf_header import TensorPlace, read_gguf_header

__all__ = ["check_gguf", "check_safetensors"]

_MAX_HEADER_BYTES = 100 << 20


def check_safetensors(file: Path) -> None:
    """Raise ValueError, saying how it is not whole, or none of its kind."""
    _check(file, _end_of_safetensors)


def check_gguf(file: Path) -> None:
    """Raise ValueError, saying how it is not whole, or none of its kind."""
    _check(file, _end_of_gguf)


def _check(file: Path, end_of: Callable[[mmap.mmap], int]) -> None:
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            end, size = end_of(content), len(content)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as why:
        raise ValueError(f"is damaged ({why})") from why
    if size < end:
        raise ValueError(f"has {size} bytes of {end}")


def _end_of_safetensors(content: mmap.mmap) -> int:
    """Where the last tensor ends, in bytes from the start of the file."""
    length = int(struct.unpack_from("<Q", content)[0])
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
    header: Mapping[str, Any] = json.loads(content[8 : 8 + length])
    last = 0
    for name, each in header.items():
        if name != "__metadata__":
            last = max(last, int(each["data_offsets"][1]))
    return 8 + length + last


def _end_of_gguf(content: mmap.mmap) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    def end(place: TensorPlace) -> int:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(place.kind)]
        return int(place.start + math.prod(place.shape) // block * block_bytes)

    return max(map(end, read_gguf_header(content, string_lists=False).tensors.values()), default=0)
