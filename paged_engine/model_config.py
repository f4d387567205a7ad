"""What a model is: its sizes and the declared differences between architectures, and the tensors that follow from them.

Owns ModelConfig and the names and shapes of its weights. Reads no file and never imports torch: where the values come
from is the business of hf_config.py and gguf_model.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wire.errors import ConfigError

__all__ = ["ARCHITECTURES", "DTYPES", "Fields", "ModelConfig", "RopeScaling", "check_names", "tensor_shapes"]

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """What changes the rotary frequencies. `linear` uses `factor` alone, `llama3` all four."""

    kind: str
    """llama3 or linear."""
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    """Context length in tokens before the scaling."""

    def __post_init__(self) -> None:
        if self.kind not in ("llama3", "linear"):
            raise ConfigError(f"rope scaling {self.kind!r} is not supported; llama3, linear and none are")
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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. Raises ConfigError where the sizes do not fit together."""

    architecture: str
    """One of ARCHITECTURES."""
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
    """RMS norm over head_dim of each query and key head, before the rotary embedding."""
    window: int
    """A token sees itself and the window - 1 tokens before it, in all layers; 0 sees everything."""
    dtype: str
    """float32, bfloat16 or float16: the checkpoint's own (bfloat16 for a quantized GGUF)."""
    eos_token_ids: tuple[int, ...]

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
                raise ConfigError(f"model {self.name}: {field} must be positive, got {getattr(self, field)}")
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"model {self.name}: architecture {self.architecture!r} is none of {', '.join(ARCHITECTURES)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model {self.name}: head_dim must be even for the rotary embedding, got {self.head_dim}")
        if self.window < 0:
            raise ConfigError(f"model {self.name}: the sliding window must not be negative, got {self.window}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"model {self.name}: dtype {self.dtype!r} is not supported; {', '.join(DTYPES)} are")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every weight, in the order of the forward pass. Linear weights are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    for name, (rows, columns, bias) in linears.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_names(found: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Raise ConfigError unless a checkpoint holds exactly the wanted tensors.

    Tensors too many are refused too: a bias or a scale that we leave out would give wrong answers, not an error.
    """
    have, want = set(found), set(wanted)
    for what, names in (("lacks", want - have), ("holds unknown", have - want)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"{where} {what} tensor {min(names)}{more}; is its config the right one?")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to loosely typed values. Each reader raises ConfigError naming the file, the field and its value.

    A default is taken when the field is missing or null.
    """

    values: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(key) is not None

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.values[key] if self.has(key) else default
        if value is None:
            raise ConfigError(f"{self.where} has no {key}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{self.where}: {key} must be {what}, got {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        return int(self._typed(key, default, (int,), "a whole number"))

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        return float(self._typed(key, default, (int, float), "a number"))

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return str(self._typed(key, default, (str,), "a string"))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._typed(key, default, (bool,), "true or false"))

    def integers(self, key: str) -> tuple[int, ...]:
        """A whole number or a list of them; () if there is none."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise ConfigError(f"{self.where}: {key} must be a whole number or a list of them, got {value!r}")
        return tuple(items)
