"""An open GGUF file: its metadata, and its tensors de-quantized one at a time. Knows nothing of any
architecture.

The header is wire/gguf_header.py's, de-quantization the gguf package's.
"""

from __future__ import annotations

import math
import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvrelay.wire.errors import ConfigError
from kvrelay.wire.gguf_header import TensorPlace, read_gguf_header

if TYPE_CHECKING:
    import torch

__all__ = ["GgufFile", "GgufTensor"]

# The gguf package takes 16 rows at a time, too few to be fast where they are short. A block knows
# nothing of the row that it is in, so rows can have so many of them: a third of the time for
# SmolLM2.
_ROW_BLOCKS = 128

_DENSE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in torch's order (rows first), `kind` its quantization, for
    example Q4_1.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    num_bytes: int


class GgufFile:
    """An open, memory-mapped GGUF file (version 2 or 3, little-endian).

    Raises ConfigError, naming the file, if it is not one, is cut short, or is one part of a split
    model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = read_gguf_header(self._bytes, string_lists=False)
            self.metadata = header.metadata
            self.tensors = {
                name: self._tensor(name, place) for name, place in header.tensors.items()
            }
        except (OSError, ValueError) as why:
            raise ConfigError(f"{path} is not a readable GGUF file: {why}") from why

    def load(self, name: str) -> torch.Tensor:
        """The tensor: F32, F16 and BF16 as stored, every quantization as float32."""
        import torch  # who only asks for the header need not wait for it

        tensor = self.tensors[name]
        if dtype := _DENSE.get(tensor.kind):
            with warnings.catch_warnings():
                # torch warns that the mapped file is read-only; clone() is what makes the tensor
                # writable.
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                count = math.prod(tensor.shape)
                return (
                    torch.frombuffer(
                        self._bytes, dtype=getattr(torch, dtype), count=count, offset=tensor.start
                    )
                    .clone()
                    .view(tensor.shape)
                )
        packed = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.start)
        quantization = GGMLQuantizationType[tensor.kind]
        _, block_bytes = GGML_QUANT_SIZES[quantization]
        row_bytes = math.gcd(tensor.num_bytes // block_bytes, _ROW_BLOCKS) * block_bytes
        try:
            values = dequantize(packed.reshape(-1, row_bytes), quantization)
        except NotImplementedError as why:
            raise ConfigError(
                f"{self.path}: tensor {name} has type {tensor.kind}, which cannot be read: {why}"
            ) from why
        return torch.from_numpy(values).view(tensor.shape)

    def _tensor(self, name: str, place: TensorPlace) -> GgufTensor:
        quantization = GGMLQuantizationType(place.kind)
        block_values, block_bytes = GGML_QUANT_SIZES[quantization]
        num_bytes = math.prod(place.shape) // block_values * block_bytes
        if place.start + num_bytes > len(self._bytes):
            raise ValueError(
                f"it is cut short: tensor {name} ends at byte {place.start + num_bytes} of "
                f"{len(self._bytes)}"
            )
        return GgufTensor(quantization.name, place.shape, place.start, num_bytes)
