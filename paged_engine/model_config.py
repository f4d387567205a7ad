"""Sizes of a model and the declared differences between architectures. Never imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvrelay.wire.errors import ConfigError

__all__ = [
    "DTYPES",
    "Fields",
    "MixtureOfExperts",
    "ModelConfig",
    "Quantization",
    "RopeScaling",
]

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A change of the rotary frequencies, with config.json's names."""

    kind: str
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(
                f"rope scaling {self.kind!r} is not supported; {', '.join(ROPE_KINDS)} and none "
                f"(default) are"
            )
        if min(self.factor, self.original_max_position) <= 0:
            raise ConfigError(
                "rope scaling needs a positive factor and original length, "
                f"got {self.factor} and {self.original_max_position}"
            )
        if self.kind == "longrope" and not (
            len(self.short_factors) == len(self.long_factors) > 0
            and min(*self.short_factors, *self.long_factors) > 0
        ):
            raise ConfigError(
                "rope scaling longrope needs a short_factor and a long_factor, two lists of "
                "positive numbers of equal "
                f"length, got {len(self.short_factors)} and {len(self.long_factors)} numbers"
            )


@dataclass(frozen=True, slots=True)
class Quantization:
    ignored: tuple[str, ...]
    """Names, parts of names at dots, or re:REGEX."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: an output row."""

    def keeps(self, weight: str) -> bool:
        """Return whether an fp8 weight stays fp8 in memory; others become plain."""
        return self.block is None and "lm_head" not in weight and ".experts." not in weight

    def covers(self, module: str) -> bool:
        return not any(
            re.match(pattern[3:], module)
            if pattern.startswith("re:")
            else f".{pattern}." in f".{module}."
            for pattern in self.ignored
        )


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    experts: int
    per_token: int
    intermediate_size: int
    renormalize: bool
    dense_layers: tuple[int, ...]
    """Layers with one dense MLP instead."""

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.experts or self.intermediate_size <= 0:
            raise ConfigError(
                f"a token cannot be sent to {self.per_token} of {self.experts} experts of "
                f"intermediate size {self.intermediate_size}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model's sizes. Raises ConfigError where they do not fit together."""

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    window: int
    """Tokens that a token sees; 0 for all (see full_attention_layers)."""
    dtype: str
    eos_token_ids: tuple[int, ...]
    full_attention_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    """Rotary base of layers with a window; None: as all others."""
    partial_rotary_factor: float = 1.0
    embedding_scale: float = 1.0
    gemma_norms: bool = False
    """Weights of norms are stored less one, and outputs of attention and MLP are normed too."""
    activation: str = "silu"
    """silu or gelu_tanh of the gate, times the other half."""
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    moe: MixtureOfExperts | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), -1 if field.name == "window" else 0
            if type(value) in (int, float) and value <= least:
                raise ConfigError(f"model {self.name}: {field.name} must be positive, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} KV heads evenly"
            )
        if not 0 < self.rotary_dim <= self.head_dim or (self.rotary_dim | self.head_dim) % 2:
            raise ConfigError(
                f"model {self.name}: partial_rotary_factor {self.partial_rotary_factor} rotates "
                f"{self.rotary_dim} of {self.head_dim} elements of a head; both must be even, and "
                "the first not larger"
            )
        factors = self.rope_scaling and self.rope_scaling.short_factors
        if factors and len(factors) != self.rotary_dim // 2:
            raise ConfigError(
                f"model {self.name}: rope scaling longrope has {len(factors)} factors, the rotary "
                f"embedding {self.rotary_dim // 2} frequencies"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"model {self.name}: dtype {self.dtype!r} is not supported; {', '.join(DTYPES)} are"
            )

    @property
    def attention_scale(self) -> float:
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(sorted({self.layer_window(layer) for layer in range(self.num_layers)}))

    def layer_window(self, layer: int) -> int:
        return 0 if layer in self.full_attention_layers else self.window

    def layer_experts(self, layer: int) -> MixtureOfExperts | None:
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe


@dataclass(frozen=True, slots=True)
class Fields:
    """A reader of loosely typed values; its ConfigErrors name file, field and value."""

    values: Mapping[str, Any]
    where: str

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where} has no {key}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{self.where}: {key} must be {what}, got {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, default, (int,), "a whole number"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def number_or_none(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, (str,), "a string"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._typed(key, default, (bool,), "true or false"))

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(map(float, self._list(key, (int, float), "numbers")))

    def texts(self, key: str) -> tuple[str, ...]:
        return self._list(key, (str,), "strings")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a whole number or a list of them; () if there is none."""
        value = self.values.get(key)
        return (value,) if type(value) is int else self._list(key, (int,), "whole numbers")

    def _list(self, key: str, kinds: tuple[type, ...], what: str) -> tuple[Any, ...]:
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(type(item) in kinds for item in value):
            raise ConfigError(f"{self.where}: {key} must be a list of {what}, got {value!r}")
        return tuple(value)

    def section(self, key: str) -> Fields:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} must be an object, got {value!r}")
        return Fields(value, f"{self.where}: {key}")
