"""The GGUF file format: metadata, and tensors de-quantized one at a time. Knows nothing of any architecture.

Reads the header itself: gguf.GGUFReader makes several numpy views per token of the vocabulary, 2.7 s for SmolLM2's
49,152 tokens; skipping over the strings takes 0.05 s. De-quantization is the gguf package's.
"""

from __future__ import annotations

import math
import mmap
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from wire.errors import ConfigError

__all__ = ["GgufFile", "GgufTensor", "Value"]

Value = bool | int | float | str | list[bool | int | float] | None
"""A metadata value. Lists of strings (the tokenizer's) are None: they are not read here."""

_SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format; 8 is a string, 9 a list."""
_STRING, _LIST = 8, 9
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in torch's order (rows first), `kind` its quantization, for example Q4_1."""

    kind: str
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    num_bytes: int


class GgufFile:
    """An open, memory-mapped GGUF file (version 2 or 3, little-endian).

    Raises ConfigError, naming the file, if it is not one, is cut short, or is one part of a split model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = 0
            self.metadata, self.tensors = self._read_header()
        except (OSError, ValueError, IndexError, OverflowError, struct.error) as why:
            raise ConfigError(f"{path} is not a readable GGUF file: {why}") from why

    def load(self, name: str) -> torch.Tensor:
        """The tensor: F32, F16 and BF16 as stored, every quantization as float32."""
        tensor = self.tensors[name]
        if dtype := _DENSE.get(tensor.kind):
            with warnings.catch_warnings():
                # torch warns that the mapped file is read-only; clone() is what makes the tensor writable.
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                count = math.prod(tensor.shape)
                return (
                    torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=tensor.start)
                    .clone()
                    .view(tensor.shape)
                )
        packed = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.start)
        try:
            values = dequantize(packed.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType[tensor.kind])
        except NotImplementedError as why:
            raise ConfigError(
                f"{self.path}: tensor {name} has type {tensor.kind}, which cannot be read: {why}"
            ) from why
        return torch.from_numpy(values)

    def _read_header(self) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
        if self._bytes[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported; 2 and 3 (little-endian) are")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(num_values)}
        if metadata.get("split.count", 0) not in (0, 1):
            raise ValueError("it is one part of a split model; join the parts with llama-gguf-split --merge")
        places = [(self._string(), self._place()) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        return metadata, {name: self._placed(name, base, *place) for name, place in places}

    def _scalar(self, form: str) -> int:
        value: int = struct.unpack_from(f"<{form}", self._bytes, self._at)[0]
        self._at += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        if size > len(self._bytes) - self._at:
            raise ValueError(f"it is cut short: a string of {size} bytes at byte {self._at} of {len(self._bytes)}")
        self._at += size
        return self._bytes[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _LIST:
            return self._list()
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self._scalar(_SCALARS[kind])

    def _list(self) -> list[bool | int | float] | None:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            read = struct.Struct("<Q").unpack_from
            for _ in range(count):
                self._at += 8 + read(self._bytes, self._at)[0]
            return None
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind} in a list")
        form = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(form, self._bytes, self._at))
        self._at += struct.calcsize(form)
        return values

    def _place(self) -> tuple[tuple[int, ...], int, int]:
        """(shape in torch's order, quantization type, offset behind the header) of the next tensor."""
        dimensions = self._scalar("I")
        shape = struct.unpack_from(f"<{dimensions}Q", self._bytes, self._at)
        self._at += 8 * dimensions
        return shape[::-1], self._scalar("I"), self._scalar("Q")

    def _placed(self, name: str, base: int, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        quantization = GGMLQuantizationType(kind)
        block_values, block_bytes = GGML_QUANT_SIZES[quantization]
        num_bytes = math.prod(shape) // block_values * block_bytes
        if base + offset + num_bytes > len(self._bytes):
            raise ValueError(
                f"it is cut short: tensor {name} ends at byte {base + offset + num_bytes} of {len(self._bytes)}"
            )
        return GgufTensor(quantization.name, shape, base + offset, num_bytes)
