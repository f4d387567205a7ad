"""Turn Hugging Face's config.json into a ModelConfig. Opens no file.

Defaults are those of transformers, because save_pretrained may leave them out. AutoConfig would add
1.3 s of CPU time to a node's start, and `kvrelay up` reads configs where no torch is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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

_FAMILY_OF = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "OPTForCausalLM": "opt",
}
ARCHITECTURES = tuple(_FAMILY_OF)
_ARCHITECTURE_OF = {family: architecture for architecture, family in _FAMILY_OF.items()}

# A family's names of fields -> Llama's.
_RENAMED = {
    "mixtral": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gemma2": {"hidden_activation": "hidden_act"},
    "gemma3_text": {"hidden_activation": "hidden_act"},
    "opt": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
}
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# For missing fields only: null has its own meaning.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "mixtral": {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
    "gemma2": _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA_DEFAULTS
    | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    "phi3": {"rms_norm_eps": 1e-5},
    "opt": {"activation_function": "relu", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "relu": "relu"}
_ACTIVATION_OF = {"gemma2": "gelu_pytorch_tanh", "gemma3_text": "gelu_pytorch_tanh", "opt": "relu"}


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], name: str, where: str
) -> ModelConfig:
    """Return the model of a config.json and a generation_config.json ({} if none).

    `where` names the file in errors. Raises ConfigError naming what is not supported.
    """
    architecture = _architecture(Fields(raw, where))
    family, fields = _llama_spelling(raw, _FAMILY_OF[architecture], where)
    heads = fields.integer("num_attention_heads")
    max_position = fields.integer("max_position_embeddings")
    rope = _rope_fields(fields)
    partial_rotary_factor = rope.number("partial_rotary_factor", 1.0)
    if partial_rotary_factor != 1.0 and family != "phi3":
        raise ConfigError(
            f"{where}: partial_rotary_factor {partial_rotary_factor} is not supported; 1.0 is"
        )
    scaling = _rope_scaling(
        rope, max_position, fields.integer("original_max_position_embeddings", 0)
    )
    window, full_attention_layers = _windows(fields, family)
    eos = Fields(generation, "generation_config.json").integers("eos_token_id") or fields.integers(
        "eos_token_id"
    )
    return ModelConfig(
        architecture=architecture,
        name=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", fields.integer("hidden_size") // max(heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", 10_000.0),
        rope_scaling=scaling,
        max_position=_extended(scaling, max_position),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        window=window,
        full_attention_layers=full_attention_layers,
        partial_rotary_factor=partial_rotary_factor,
        activation=_activation(fields, family),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch."),
        eos_token_ids=eos,
        quantization=parse_quantization(fields),
        **_differences(fields, family),
    )


def _llama_spelling(raw: Mapping[str, Any], family: str, where: str) -> tuple[str, Fields]:
    if family == "gemma3":
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError(f"{where}: text_config must be an object, got {text!r}")
        raw = {**{key: value for key, value in raw.items() if key != "text_config"}, **text}
        family, where = "gemma3_text", f"{where}: text_config"
    values = {**_DEFAULTS.get(family, {}), **raw}
    for theirs, ours in _RENAMED.get(family, {}).items():
        if theirs in values:
            values[ours] = values.pop(theirs)
    rope = values.get("rope_parameters")
    if family == "gemma3_text" and isinstance(rope, dict) and "full_attention" in rope:
        values["rope_parameters"] = rope["full_attention"]
        local = Fields(
            rope.get("sliding_attention") or {}, f"{where}: rope_parameters.sliding_attention"
        )
        if (kind := local.text("rope_type", "default")) != "default":
            raise ConfigError(f"{local.where}: rope_type {kind!r} is not supported; default is")
        values["rope_local_base_freq"] = local.number("rope_theta", values["rope_local_base_freq"])
    return family, Fields(values, where)


def _differences(fields: Fields, family: str) -> dict[str, Any]:
    biased = family in ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text") and fields.flag(
        "attention_bias", False
    )
    values: dict[str, Any] = {
        "qkv_bias": biased or family == "qwen2",
        "o_bias": biased,
        "mlp_bias": family == "llama" and fields.flag("mlp_bias", False),
        "qk_norm": family in ("qwen3", "qwen3_moe", "gemma3_text"),
    }
    if family in ("mixtral", "qwen3_moe"):
        values["moe"] = _experts(fields, family)
    if family in ("gemma2", "gemma3_text"):
        values |= _gemma(fields)
    if family == "gemma3_text":
        values["local_rope_theta"] = fields.number("rope_local_base_freq")
    if family == "opt":
        values |= _opt(fields)
    return values


def _experts(fields: Fields, family: str) -> MixtureOfExperts | None:
    experts = fields.integer("num_experts")
    per_token = fields.integer("num_experts_per_tok")
    if family == "mixtral":
        return MixtureOfExperts(experts, per_token, fields.integer("intermediate_size"), True, ())
    if not experts:
        return None
    every, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    layers = range(fields.integer("num_hidden_layers"))
    return MixtureOfExperts(
        experts=experts,
        per_token=per_token,
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % every),
    )


def _gemma(fields: Fields) -> dict[str, Any]:
    if fields.flag("use_bidirectional_attention", False):
        raise ConfigError(
            f"{fields.where}: use_bidirectional_attention true is not supported; false is"
        )
    return {
        "norm": "rms_plus_one",
        "norm_places": "around",
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "query_pre_attn_scalar": fields.number("query_pre_attn_scalar"),
        "attention_softcap": fields.number_or_none("attn_logit_softcapping"),
        "logit_softcap": fields.number_or_none("final_logit_softcapping"),
    }


def _opt(fields: Fields) -> dict[str, Any]:
    hidden = fields.integer("hidden_size")
    if fields.integer("word_embed_proj_dim", hidden) != hidden:
        raise ConfigError(
            f"{fields.where}: word_embed_proj_dim {fields.values['word_embed_proj_dim']} is not "
            f"supported; hidden_size ({hidden}) is"
        )
    for key, wanted in (
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
    ):
        if fields.flag(key, wanted) is not wanted:
            raise ConfigError(f"{fields.where}: {key} {not wanted} is not supported; {wanted} is")
    bias = fields.flag("enable_bias", True)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "learned_positions": True,
        "norm": "layer",
        "norm_places": "before" if fields.flag("do_layer_norm_before", True) else "after",
    }


def _architecture(fields: Fields) -> str:
    named = fields.values.get("architectures")
    if isinstance(named, list) and named:
        architecture = str(named[0])
    else:
        model_type = fields.text("model_type")
        architecture = _ARCHITECTURE_OF.get(model_type, model_type)
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{fields.where}: architecture {architecture!r} is not supported; "
            f"{', '.join(ARCHITECTURES)} are"
        )
    return architecture


def _activation(fields: Fields, family: str) -> str:
    wanted = _ACTIVATION_OF.get(family, "silu")
    activation = fields.text("hidden_act", wanted)
    if activation != wanted:
        theirs = {ours: theirs for theirs, ours in _RENAMED.get(family, {}).items()}.get(
            "hidden_act", "hidden_act"
        )
        raise ConfigError(f"{fields.where}: {theirs} {activation!r} is not supported; {wanted} is")
    return _ACTIVATIONS[activation]


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
    if kind == "dynamic":
        original = max_position  # as transformers
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
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number_or_none("attention_factor"),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        short_factors=rope.numbers("short_factor") if longrope else (),
        long_factors=rope.numbers("long_factor") if longrope else (),
    )


def _extended(scaling: RopeScaling | None, max_position: int) -> int:
    if scaling is None or scaling.kind not in ("dynamic", "yarn"):
        return max_position
    return max(max_position, round(scaling.original_max_position * scaling.factor))


def _windows(fields: Fields, family: str) -> tuple[int, tuple[int, ...]]:
    if family in ("llama", "opt"):
        return 0, ()
    if family in ("qwen2", "qwen3", "qwen3_moe") and not fields.flag("use_sliding_window", False):
        return 0, ()
    window = fields.integer("sliding_window", 0)  # null turns it off
    layers = range(fields.integer("num_hidden_layers"))
    full = [layer for layer in layers if not _slides(fields, family, layer)]
    kinds = fields.values.get("layer_types")
    if kinds:
        if not isinstance(kinds, list) or len(kinds) != len(layers):
            raise ConfigError(
                f"{fields.where}: layer_types must name the kinds of {len(layers)} layers, got "
                f"{kinds!r}"
            )
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise ConfigError(
                    f"{fields.where}: layer_types {kind!r} is not supported; sliding_attention "
                    f"and full_attention are"
                )
        full = [layer for layer in layers if kinds[layer] == "full_attention"]
    return (window, tuple(full)) if window and len(full) < len(layers) else (0, ())


def _slides(fields: Fields, family: str, layer: int) -> bool:
    if family in ("qwen2", "qwen3"):
        return layer >= fields.integer("max_window_layers", 28)
    if family == "gemma2":
        return layer % 2 == 0
    if family == "gemma3_text":
        return (layer + 1) % fields.integer("sliding_window_pattern") != 0
    return True


_FORMATS = ("float-quantized", "naive-quantized")


def parse_quantization(fields: Fields) -> Quantization | None:
    """Return what a config.json says of fp8 weights, if anything. Raises ConfigError."""
    key = "compression_config" if fields.has("compression_config") else "quantization_config"
    section = fields.section(key)
    if not section.values:
        return None
    method = section.text("quant_method", "unknown")
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if method == "fp8":
        return _fp8(section)
    raise ConfigError(
        f"{fields.where}: {key} ({method}) is not supported; compressed-tensors with fp8 weights "
        "and fp8 are. Use the model's unquantized safetensors, an FP8 checkpoint or a GGUF file"
    )


def _fp8(section: Fields) -> Quantization:
    blocks = section.integers("weight_block_size")
    if len(blocks) not in (0, 2) or any(size < 1 for size in blocks):
        raise ConfigError(
            f"{section.where}: weight_block_size must be two sizes, got {list(blocks)}"
        )
    activations = section.text("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise ConfigError(
            f"{section.where}: activation_scheme {activations!r} is not supported; dynamic and "
            f"static are"
        )
    return Quantization(
        scales="block" if blocks else "tensor",
        activations=activations,
        targets=("Linear",),
        # Never quantized in this layout.
        ignored=(
            *section.texts("ignored_layers"),
            *section.texts("modules_to_not_convert"),
            "lm_head",
        ),
        block=(blocks[0], blocks[1]) if blocks else (0, 0),
    )


def _compressed_tensors(section: Fields) -> Quantization:
    if (
        section.section("sparsity_config").text("format", "dense") != "dense"
        or section.section("transform_config").values
    ):
        raise ConfigError(
            f"{section.where}: sparsity_config and transform_config are not supported"
        )
    groups = section.section("config_groups")
    found = [
        _group(groups.section(name), section.text("format", "unknown")) for name in groups.values
    ]
    if not found:
        raise ConfigError(f"{section.where} has no config_groups")
    targets = tuple(target for group in found for target in group.targets)
    if len({replace(group, targets=()) for group in found}) > 1:
        raise ConfigError(
            f"{section.where}: config_groups that differ are not supported; one kind of fp8 weights is"
        )
    return replace(found[0], targets=targets, ignored=section.texts("ignore"))


def _group(group: Fields, form: str) -> Quantization:
    weights, inputs = group.section("weights"), group.section("input_activations")
    form = group.text("format", form)
    kind = f"{form} {weights.text('type', 'int')}{weights.integer('num_bits', 8)}"
    if kind not in [f"{known} float8" for known in _FORMATS]:
        raise ConfigError(
            f"{group.where}: {kind} weights are not supported; {_FORMATS[0]} float8 is"
        )
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise ConfigError(
            f"{weights.where}: strategy {strategy!r} is not supported; tensor, channel and block "
            f"are"
        )
    if not weights.flag("symmetric", True) or weights.flag("dynamic", False):
        raise ConfigError(
            f"{weights.where}: only symmetric, static scales of weights are supported"
        )
    blocks = weights.integers("block_structure") if strategy == "block" else (0, 0)
    if len(blocks) != 2 or (strategy == "block" and min(blocks) < 1):
        raise ConfigError(f"{weights.where}: block_structure must be two sizes, got {list(blocks)}")
    return Quantization(
        scales=strategy,
        activations=("dynamic" if inputs.flag("dynamic", False) else "static")
        if inputs.values
        else "none",
        targets=group.texts("targets"),
        ignored=(),
        block=(blocks[0], blocks[1]),
    )
