"""Sizes of a model and the declared differences between architectures. Never imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.wire.errors import ConfigError

__all__ = [
    "ARCHITECTURES",
    "DTYPES",
    "Fields",
    "MixtureOfExperts",
    "ModelConfig",
    "Quantization",
    "RopeScaling",
]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Phi3ForCausalLM",
    "OPTForCausalLM",
)
ACTIVATIONS = ("silu", "gelu_tanh", "relu")
NORMS = ("rms", "rms_plus_one", "layer")
NORM_PLACES = ("before", "around", "after")
DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """What changes the rotary frequencies (paged_engine/rope.py)."""

    kind: str
    factor: float
    """How many times longer the context becomes."""
    low_freq_factor: float
    """llama3: turns over the original context up to which frequencies are divided."""
    high_freq_factor: float
    """llama3: turns from which a frequency is kept."""
    original_max_position: int
    """Context length in tokens before the scaling."""
    beta_fast: float = 32.0
    """yarn: turns from which a frequency is kept."""
    beta_slow: float = 1.0
    """yarn: turns up to which a frequency is divided by the factor."""
    truncate: bool = True
    """yarn: the blend between the two begins and ends at whole pairs."""
    attention_factor: float | None = None
    """yarn, longrope: what cos and sin are multiplied by; None: from the other fields."""
    mscale: float = 0.0
    """yarn: with mscale_all_dim, weights in the attention factor; 0: none."""
    mscale_all_dim: float = 0.0
    short_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies up to the original context."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same for longer contexts."""

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
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "rope scaling llama3 needs 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ConfigError(
                f"rope scaling yarn needs 0 < beta_slow < beta_fast, got {self.beta_slow} and "
                f"{self.beta_fast}"
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
    """Which linear weights a checkpoint holds as float8_e4m3fn * scale."""

    scales: str
    """What has one scale: tensor, channel (an output row) or block."""
    activations: str
    """How activations were meant: dynamic (scale per token), static (one) or none (16 bit)."""
    targets: tuple[str, ...]
    """Modules as in `ignored`; Linear stands for all linear ones."""
    ignored: tuple[str, ...]
    """Modules stored as usual: names, parts of names at dots, or re:REGEX."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns of a block."""

    def keeps(self, weight: str) -> bool:
        """Return whether an fp8 weight stays fp8 in memory, with a scale per row.

        Others become plain ones while they are read: experts', the output layer's, blocks, and
        those whose activations are 16 bit.
        """
        per_row = self.scales != "block" and self.activations != "none"
        return per_row and "lm_head" not in weight and ".experts." not in weight

    def covers(self, module: str) -> bool:
        """Return whether the linear module of this name is stored as fp8."""
        targeted = "Linear" in self.targets or _is_named(module, self.targets)
        return targeted and not _is_named(module, self.ignored)


def _is_named(module: str, patterns: Iterable[str]) -> bool:
    return any(
        re.match(pattern[3:], module)
        if pattern.startswith("re:")
        else f".{pattern}." in f".{module}."
        for pattern in patterns
    )


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """An MLP that is a weighted sum of few of many small ones, chosen per token."""

    experts: int
    per_token: int
    intermediate_size: int
    renormalize: bool
    """Whether the weights of the chosen experts are made to sum to one."""
    dense_layers: tuple[int, ...]
    """Layers with one MLP of the model's intermediate_size instead."""

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.experts or self.intermediate_size <= 0:
            raise ConfigError(
                f"a token cannot be sent to {self.per_token} of {self.experts} experts of "
                f"intermediate size "
                f"{self.intermediate_size}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. Raises ConfigError where the sizes do not fit together.

    Fields with a default are what sets the newer architectures apart from Llama.
    """

    architecture: str
    name: str
    """Short served name, for example SmolLM2-135M-Instruct."""
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
    """Longest context in tokens that the model was made for."""
    tie_embeddings: bool
    """The output layer is the embedding; there is no lm_head.weight."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over head_dim of each query and key head, before rotation."""
    window: int
    """Tokens that a token sees, itself included; 0 for all (see full_attention_layers)."""
    dtype: str
    """The checkpoint's own: float32, bfloat16 (any quantized GGUF) or float16."""
    eos_token_ids: tuple[int, ...]
    full_attention_layers: tuple[int, ...] = ()
    """Layers that see everything though the model has a window."""
    local_rope_theta: float | None = None
    """Rotary base of layers with a window, without rope scaling; None: as all others."""
    partial_rotary_factor: float = 1.0
    """Share of head_dim, counted from its start, that is rotated."""
    learned_positions: bool = False
    """A learned vector per position is added to the embedding; nothing is rotated."""
    embedding_scale: float = 1.0
    """Factor of embeddings, rounded to the dtype of the computation."""
    norm: str = "rms"
    """rms; rms_plus_one: the weight is stored less one; layer: less the mean, with bias."""
    norm_places: str = "before"
    """before: attention's and the MLP's input; around: input, and output before the residual is
    added; after: the sum with the residual, and none at the model's end.
    """
    activation: str = "silu"
    """silu or gelu_tanh of the gate, times the other half; relu: there is no gate."""
    query_pre_attn_scalar: float | None = None
    """Attention scores are divided by its square root; None: by head_dim's."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    logit_softcap: float | None = None
    """The same for the logits."""
    moe: MixtureOfExperts | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for field in (*sizes, "max_position", "rms_norm_eps", "rope_theta"):
            if getattr(self, field) <= 0:
                raise ConfigError(
                    f"model {self.name}: {field} must be positive, got {getattr(self, field)}"
                )
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"model {self.name}: architecture {self.architecture!r} is none of "
                f"{', '.join(ARCHITECTURES)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model {self.name}: head_dim must be even for the rotary embedding, got "
                f"{self.head_dim}"
            )
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ConfigError(
                f"model {self.name}: partial_rotary_factor {self.partial_rotary_factor} rotates "
                f"{self.rotary_dim} of "
                f"{self.head_dim} elements of a head; it must be an even number of them"
            )
        scaling = self.rope_scaling
        if (
            scaling is not None
            and scaling.kind == "longrope"
            and len(scaling.short_factors) != self.rotary_dim // 2
        ):
            raise ConfigError(
                f"model {self.name}: rope scaling longrope has {len(scaling.short_factors)} "
                f"factors, the rotary "
                f"embedding {self.rotary_dim // 2} frequencies"
            )
        for field, values in (
            ("norm", NORMS),
            ("norm_places", NORM_PLACES),
            ("activation", ACTIVATIONS),
        ):
            if getattr(self, field) not in values:
                raise ConfigError(
                    f"model {self.name}: {field} {getattr(self, field)!r} is none of "
                    f"{', '.join(values)}"
                )
        for field in (
            "query_pre_attn_scalar",
            "attention_softcap",
            "logit_softcap",
            "local_rope_theta",
        ):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ConfigError(f"model {self.name}: {field} must be positive, got {value}")
        if self.window < 0:
            raise ConfigError(
                f"model {self.name}: the sliding window must not be negative, got {self.window}"
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
    def gated(self) -> bool:
        return self.activation != "relu"

    @property
    def windows(self) -> tuple[int, ...]:
        """Return the distinct windows of the layers."""
        return tuple(sorted({self.window_of(layer) for layer in range(self.num_layers)}))

    def window_of(self, layer: int) -> int:
        return 0 if layer in self.full_attention_layers else self.window

    def experts_of(self, layer: int) -> MixtureOfExperts | None:
        """Return a layer's experts; None if its MLP is dense."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to loosely typed values; ConfigError names file, field and value.

    A default is taken when the field is missing or null.
    """

    values: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.values[key] if self.has(key) else default
        if value is None:
            raise ConfigError(f"{self.where} has no {key}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{self.where}: {key} must be {what}, got {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, default, (int,), "a whole number"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, (str,), "a string"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._typed(key, default, (bool,), "true or false"))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers; () if there is none."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(type(item) in (int, float) for item in value):
            raise ConfigError(f"{self.where}: {key} must be a list of numbers, got {value!r}")
        return tuple(map(float, value))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; () if there is none."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.where}: {key} must be a list of strings, got {value!r}")
        return tuple(value)

    def section(self, key: str) -> Fields:
        """Return the object of that name; without fields if there is none."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} must be an object, got {value!r}")
        return Fields(value, f"{self.where}: {key}")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a whole number or a list of them; () if there is none."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise ConfigError(
                f"{self.where}: {key} must be a whole number or a list of them, got {value!r}"
            )
        return tuple(items)
