"""From Hugging Face's config.json to a ModelConfig. Reads values that are already parsed; opens no file.

Defaults are those of transformers' configuration classes, because save_pretrained may leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_engine.model_config import ARCHITECTURES, Fields, ModelConfig, RopeScaling
from wire.errors import ConfigError

__all__ = ["model_config_of"]

_MODEL_TYPES = dict(zip(("llama", "mistral", "qwen2", "qwen3"), ARCHITECTURES, strict=True))


def model_config_of(raw: Mapping[str, Any], generation: Mapping[str, Any], name: str, where: str) -> ModelConfig:
    """`raw` is config.json, `generation` generation_config.json ({} if there is none), `where` names raw's file.

    Raises ConfigError for an architecture or a feature that the engine does not have, naming it.
    """
    fields = Fields(raw, where)
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    llama, qwen2, qwen3 = (architecture == f"{family}ForCausalLM" for family in ("Llama", "Qwen2", "Qwen3"))
    attention_bias = (llama or qwen3) and fields.flag("attention_bias", False)
    heads = fields.integer("num_attention_heads")
    max_position = fields.integer("max_position_embeddings")
    rope = _rope_fields(fields)
    eos = Fields(generation, "generation_config.json").integers("eos_token_id") or fields.integers("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        name=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", 128 if qwen3 else fields.integer("hidden_size") // max(heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", 10_000.0),
        rope_scaling=_rope_scaling(rope, fields.integer("original_max_position_embeddings", max_position)),
        max_position=max_position,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=llama and fields.flag("mlp_bias", False),
        qk_norm=qwen3,
        window=0 if llama else _window(fields, mistral=not (qwen2 or qwen3)),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch."),
        eos_token_ids=eos,
    )


def _architecture(fields: Fields) -> str:
    named = fields.values.get("architectures")
    if isinstance(named, list) and named:
        architecture = str(named[0])
    else:
        model_type = fields.text("model_type")
        architecture = _MODEL_TYPES.get(model_type, model_type)
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{fields.where}: architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    return architecture


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("quantization_config"):
        quantization = fields.values["quantization_config"]
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ConfigError(
            f"{fields.where}: quantization_config ({method}) is not supported; "
            "use the model's unquantized safetensors or a GGUF file"
        )
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{fields.where}: hidden_act {activation!r} is not supported; silu is")


def _rope_fields(fields: Fields) -> Fields:
    """One flat set of rope values: transformers 5 writes rope_parameters, older files rope_theta and rope_scaling."""
    merged: dict[str, Any] = {key: fields.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for key in ("rope_scaling", "rope_parameters"):
        part = fields.values.get(key) or {}
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise ConfigError(f"{fields.where}: {key} must be one flat object for all layers, got {part!r}")
        merged |= part
    rope = Fields(merged, f"{fields.where}: rope")
    partial = rope.number("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ConfigError(f"{fields.where}: partial_rotary_factor {partial} is not supported; 1.0 is")
    return rope


def _rope_scaling(rope: Fields, max_position: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    llama3 = kind == "llama3"
    return RopeScaling(
        kind=kind,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if llama3 else 1.0),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )


def _window(fields: Fields, *, mistral: bool) -> int:
    """Sliding window in tokens, 0 if there is none. Layers that differ are refused: one pool holds one kind."""
    if mistral:
        # null turns the window off, a missing key means 4,096: MistralConfig's default.
        window = fields.integer("sliding_window", 0) if "sliding_window" in fields.values else 4096
    elif fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", 4096)
    else:
        window = 0
    if not window:
        return 0
    layers = fields.integer("num_hidden_layers")
    first = 0 if mistral else fields.integer("max_window_layers", 28)
    by_position = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    kinds = set(fields.values.get("layer_types") or by_position)
    if kinds == {"full_attention"}:
        return 0
    if kinds != {"sliding_attention"}:
        raise ConfigError(
            f"{fields.where}: layers of different attention ({', '.join(sorted(map(str, kinds)))}) are not supported "
            "yet; all layers must have a sliding window, or none"
        )
    return window
