"""Turn Hugging Face's config.json into a ModelConfig. Opens no file.

AutoConfig would add 1.3 s of CPU time to a node's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.paged_engine.model_config import (
    Fields,
    MixtureOfExperts,
    ModelConfig,
    Quantization,
    RopeScaling,
)
from kvrelay.wire.errors import ConfigError

__all__ = ["ARCHITECTURES", "parse_model_config", "parse_quantization"]

# What a config.json may leave out, in Llama's spelling. Missing is not null, which has its own
# meaning.
_FULL = {"use_sliding_window": False}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _FULL,
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": _FULL,
    "Qwen3ForCausalLM": _FULL,
    "MixtralForCausalLM": {"norm_topk_prob": True},
    "Qwen3MoeForCausalLM": _FULL,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": {},
}
ARCHITECTURES = tuple(_DEFAULTS)
_RENAMED = {"num_local_experts": "num_experts", "hidden_activation": "hidden_act"}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], name: str, where: str
) -> ModelConfig:
    """Return the model of a config.json and a generation_config.json ({} if none).

    `where` names the file in errors. Raises ConfigError naming what is not supported.
    """
    named = raw.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else named
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: architecture {architecture!r} is not supported; "
            f"{', '.join(ARCHITECTURES)} are"
        )
    fields = _llama_spelling(raw, architecture, where)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    max_position = fields.integer("max_position_embeddings")
    rope = _rope_fields(fields)
    scaling = _rope_scaling(
        rope, max_position, fields.integer("original_max_position_embeddings", 0)
    )
    if scaling is not None and scaling.kind == "yarn":
        extended = round(scaling.original_max_position * scaling.factor)
        max_position = max(max_position, extended)
    activation = fields.text("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"{where}: hidden_act {activation!r} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    window, full_attention_layers = _windows(fields)
    biased = fields.flag("attention_bias", False)
    eos = Fields(generation, "generation_config.json").integers("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        name=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", 10_000.0),
        rope_scaling=scaling,
        max_position=max_position,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=biased or architecture == "Qwen2ForCausalLM",
        o_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture.startswith(("Qwen3", "Gemma3")),
        window=window,
        full_attention_layers=full_attention_layers,
        partial_rotary_factor=rope.number("partial_rotary_factor", 1.0),
        activation=_ACTIVATIONS[activation],
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch."),
        eos_token_ids=eos or fields.integers("eos_token_id"),
        moe=_experts(fields) if fields.integer("num_experts", 0) else None,
        quantization=parse_quantization(fields),
        **(_gemma(fields) if architecture.startswith("Gemma") else {}),
    )


def _llama_spelling(raw: Mapping[str, Any], architecture: str, where: str) -> Fields:
    if architecture == "Gemma3ForConditionalGeneration":
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError(f"{where}: text_config must be an object, got {text!r}")
        raw, where = {**raw, **text}, f"{where}: text_config"
    renamed = {ours: raw[theirs] for theirs, ours in _RENAMED.items() if theirs in raw}
    values = {**_DEFAULTS[architecture], **raw, **renamed}
    rope = values.get("rope_parameters")
    if architecture.startswith("Gemma3") and isinstance(rope, dict) and "full_attention" in rope:
        values["rope_parameters"] = rope["full_attention"]
        local = Fields(rope, f"{where}: rope_parameters").section("sliding_attention")
        values["rope_local_base_freq"] = local.number("rope_theta", values["rope_local_base_freq"])
    return Fields(values, where)


def _experts(fields: Fields) -> MixtureOfExperts:
    every, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    layers = range(fields.integer("num_hidden_layers"))
    return MixtureOfExperts(
        experts=fields.integer("num_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer(
            "moe_intermediate_size", fields.integer("intermediate_size")
        ),
        renormalize=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % every),
    )


def _gemma(fields: Fields) -> dict[str, Any]:
    if fields.flag("use_bidirectional_attention", False):
        raise ConfigError(
            f"{fields.where}: use_bidirectional_attention true is not supported; false is"
        )
    return {
        "gemma_norms": True,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "query_pre_attn_scalar": fields.number("query_pre_attn_scalar"),
        "attention_softcap": fields.number_or_none("attn_logit_softcapping"),
        "logit_softcap": fields.number_or_none("final_logit_softcapping"),
        "local_rope_theta": fields.number_or_none("rope_local_base_freq"),
    }


def _rope_fields(fields: Fields) -> Fields:
    merged: dict[str, Any] = {
        key: fields.values.get(key) for key in ("rope_theta", "partial_rotary_factor")
    }
    for key in ("rope_scaling", "rope_parameters"):
        part = fields.values.get(key) or {}
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise ConfigError(
                f"{fields.where}: {key} must be one flat object for all layers, got {part!r}"
            )
        merged |= part
    return Fields(merged, f"{fields.where}: rope")


def _rope_scaling(rope: Fields, max_position: int, original: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in the first Phi-3 files
    if kind == "default":
        return None
    llama3, longrope = kind == "llama3", kind == "longrope"
    original = original or rope.integer("original_max_position_embeddings", max_position)
    return RopeScaling(
        kind=kind,
        factor=rope.number(
            "factor", max_position / max(original, 1) if kind in ("yarn", "longrope") else None
        ),
        low_freq_factor=rope.number("low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if llama3 else 1.0),
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number_or_none("attention_factor"),
        short_factors=rope.numbers("short_factor") if longrope else (),
        long_factors=rope.numbers("long_factor") if longrope else (),
    )


def _windows(fields: Fields) -> tuple[int, tuple[int, ...]]:
    if not fields.flag("use_sliding_window", True):
        return 0, ()
    window = fields.integer("sliding_window", 0)  # null turns it off
    layers = range(fields.integer("num_hidden_layers"))
    first, every = (
        fields.integer("max_window_layers", 0),
        fields.integer("sliding_window_pattern", 0),
    )
    full = [layer for layer in layers if layer < first or (every and (layer + 1) % every == 0)]
    kinds = fields.values.get("layer_types")
    if kinds:
        if not isinstance(kinds, list) or len(kinds) != len(layers):
            raise ConfigError(
                f"{fields.where}: layer_types must name the kinds of {len(layers)} layers, got "
                f"{kinds!r}"
            )
        if odd := {*map(str, kinds)} - {"sliding_attention", "full_attention"}:
            raise ConfigError(
                f"{fields.where}: layer_types {min(odd)!r} is not supported; sliding_attention and "
                "full_attention are"
            )
        full = [layer for layer in layers if kinds[layer] == "full_attention"]
    return (window, tuple(full)) if window and len(full) < len(layers) else (0, ())


def parse_quantization(fields: Fields) -> Quantization | None:
    section = fields.section("quantization_config")
    if not section.values:
        return None
    method = section.text("quant_method", "unknown")
    if method == "compressed-tensors":
        _require_channels(section)
        return Quantization(section.texts("ignore"))
    if method == "fp8":
        _require(section, "activation_scheme", "dynamic", "dynamic")
        blocks = section.integers("weight_block_size")
        if len(blocks) != 2 or min(blocks) < 1:
            raise ConfigError(
                f"{section.where}: weight_block_size must be two sizes, got {list(blocks)}; one "
                "scale per tensor is not supported"
            )
        # The output layer is never quantized in this layout.
        return Quantization(
            (*section.texts("modules_to_not_convert"), "lm_head"), (blocks[0], blocks[1])
        )
    raise ConfigError(
        f"{fields.where}: quantization_config ({method}) is not supported; compressed-tensors with "
        "fp8 weights and fp8 are. Use the model's unquantized safetensors, an FP8 checkpoint or a "
        "GGUF file"
    )


def _require_channels(section: Fields) -> None:
    groups = section.section("config_groups")
    if len(groups.values) != 1:
        raise ConfigError(f"{groups.where} must be one group, got {len(groups.values)}")
    group = groups.section(*groups.values)
    weights, inputs = group.section("weights"), group.section("input_activations")
    form = section.values.get("format", "unknown")
    for part, key, default, wanted in (
        (group, "format", form, "float-quantized"),
        (group, "targets", [], ["Linear"]),
        (weights, "type", "int", "float"),
        (weights, "num_bits", 8, 8),
        (weights, "strategy", "tensor", "channel"),
        (weights, "symmetric", True, True),
        (weights, "dynamic", False, False),
        (inputs, "dynamic", False, True),
        (section.section("sparsity_config"), "format", "dense", "dense"),
        (section, "transform_config", {}, {}),
    ):
        _require(part, key, default, wanted)


def _require(fields: Fields, key: str, default: object, wanted: object) -> None:
    found = fields.values.get(key)
    found = default if found is None else found
    if found != wanted:
        raise ConfigError(f"{fields.where}: {key} {found!r} is not supported; {wanted!r} is")
