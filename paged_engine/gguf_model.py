"""GGUF files: metadata to ModelConfig, tensors de-quantized under Hugging Face names.

gguf.GGUFReader takes 2 s of CPU time for SmolLM2's header, wire/gguf_header.py 0.01 s.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType
from gguf.quants import dequantize
from gguf.tensor_mapping import get_tensor_name_map

from kvrelay.paged_engine.model_config import Fields, ModelConfig, RopeScaling
from kvrelay.paged_engine.model_tensors import check_names, tensor_shapes
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.gguf_header import TensorPlace, read_gguf_header

if TYPE_CHECKING:
    import torch

__all__ = ["GgufFile", "gguf_model_config", "gguf_tensors"]

# The gguf package takes 16 rows at a time; longer rows take a third of the time.
_ROW_BLOCKS = 128


class GgufFile:
    """A memory-mapped GGUF file (version 2 or 3, little-endian).

    Raises ConfigError if it is not one, is cut short, or is one part of a split model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = read_gguf_header(self._bytes)
            self.metadata, self.tensors = header.metadata, header.tensors
            for name, place in self.tensors.items():
                end = place.start + _num_bytes(place)
                if end > len(self._bytes):
                    raise ValueError(
                        f"it is cut short: tensor {name} ends at byte {end} of {len(self._bytes)}"
                    )
        except (OSError, ValueError) as why:
            raise ConfigError(f"{path} is not a readable GGUF file: {why}") from why

    def load(self, name: str) -> torch.Tensor:
        import torch  # the header needs none

        place = self.tensors[name]
        packed = np.frombuffer(self._bytes, np.uint8, _num_bytes(place), place.start)
        quantization = GGMLQuantizationType(place.kind)
        _, block_bytes = GGML_QUANT_SIZES[quantization]
        row_bytes = math.gcd(len(packed) // block_bytes, _ROW_BLOCKS) * block_bytes
        try:
            values = dequantize(packed.reshape(-1, row_bytes), quantization)
        except NotImplementedError as why:
            raise ConfigError(
                f"{self.path}: tensor {name} has type {_kind(place)}, which cannot be read: {why}"
            ) from why
        # A copy: F32 is a view of the read-only file.
        return torch.from_numpy(np.array(values, np.float32)).view(place.shape)


def _kind(place: TensorPlace) -> str:
    return str(GGMLQuantizationType(place.kind).name)


def _num_bytes(place: TensorPlace) -> int:
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(place.kind)]
    return int(math.prod(place.shape) // block_values * block_bytes)


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_FACTORS = "rope_freqs.weight"
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


def gguf_model_config(file: GgufFile) -> ModelConfig:
    fields = Fields(file.metadata, str(file.path))
    arch = _arch(fields)
    if fields.integer(f"{arch}.expert_count", 0):
        raise ConfigError(
            f"{file.path}: mixture-of-experts models are not supported in GGUF files; "
            "use the model's safetensors folder"
        )
    for name in ("token_embd.weight", "blk.0.ffn_up.weight"):
        if name not in file.tensors:
            raise ConfigError(f"{file.path} lacks tensor {name}; it holds no weights to serve")
    kind = _kind(file.tensors["blk.0.ffn_up.weight"])
    heads = fields.integer(f"{arch}.attention.head_count")
    hidden = fields.integer(f"{arch}.embedding_length")
    head_dim = fields.integer(f"{arch}.attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(f"{arch}.{key}", head_dim) != head_dim:
            raise ConfigError(
                f"{file.path}: {key} must equal the head size {head_dim}, got "
                f"{fields.values[f'{arch}.{key}']}"
            )
    theta = fields.number(f"{arch}.rope.freq_base", 10_000.0)
    max_position = fields.integer(f"{arch}.context_length")
    eos = [fields.integers(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return ModelConfig(
        architecture=_ARCHITECTURES[arch],
        name=_QUANTIZATION_SUFFIX.sub("", file.path.stem),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
        num_layers=fields.integer(f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        # Stored as float32: 9.999999747378752e-06 is 1e-05.
        rms_norm_eps=float(f"{fields.number(f'{arch}.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, fields, arch, head_dim, theta, max_position),
        max_position=max_position,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        window=fields.integer(f"{arch}.attention.sliding_window", 0),
        dtype={"F32": "float32", "F16": "float16"}.get(kind, "bfloat16"),
        eos_token_ids=tuple(dict.fromkeys(token for tokens in eos for token in tokens)),
    )


def gguf_tensors(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    # Qwen3's names are those of all.
    known = get_tensor_name_map(MODEL_ARCH.QWEN3, config.num_layers)
    names = {
        name: str(known.get_name(name, (".weight", ".bias"))) for name in tensor_shapes(config)
    }
    check_names(set(file.tensors) - {_ROPE_FACTORS}, names.values(), str(file.path))
    interleaved = _arch(Fields(file.metadata, str(file.path))) == "llama"
    for name, stored in names.items():
        tensor = file.load(stored)
        if interleaved and (".q_proj." in name or ".k_proj." in name):
            tensor = _half_split(
                tensor, config.num_heads if ".q_proj." in name else config.num_kv_heads
            )
        yield name, tensor


def _arch(fields: Fields) -> str:
    arch = fields.text("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ConfigError(
            f"{fields.where}: architecture {arch!r} is not supported; {', '.join(_ARCHITECTURES)} "
            "are. Others are served from their safetensors folder"
        )
    return arch


def _half_split(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    # From llama.cpp's rotary order (0, h, 1, h+1, ...) to (0, 1, ..., h, ...).
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _rope_scaling(
    file: GgufFile, fields: Fields, arch: str, head_dim: int, theta: float, max_position: int
) -> RopeScaling | None:
    if _ROPE_FACTORS in file.tensors:
        return _llama3_from_factors(file, head_dim, theta)
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    original = fields.integer(f"{arch}.rope.scaling.original_context_length", max_position)
    return RopeScaling(kind, fields.number(f"{arch}.rope.scaling.factor"), 1.0, 1.0, original)


def _llama3_from_factors(file: GgufFile, head_dim: int, theta: float) -> RopeScaling:
    from kvrelay.paged_engine.rope import rope_frequencies  # imports torch

    stored = file.load(_ROPE_FACTORS)
    scaling = RopeScaling("llama3", stored.max().item(), 1.0, 4.0, 8192)
    plain, scaled = (rope_frequencies(each, theta, head_dim, 0)[0] for each in (None, scaling))
    if len(stored) != len(plain) or not stored.allclose(plain / scaled, rtol=1e-4):
        raise ConfigError(
            f"{file.path}: the factors in {_ROPE_FACTORS} are not those of llama3 rope scaling (1, "
            "4, 8192); use the model's safetensors folder"
        )
    return scaling
