"""Names and shapes of a model's tensors, ours and those of checkpoints. Never imports torch.

A *weight* has Llama's name, one per projection; a *tensor* of a checkpoint is one or several.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.wire.errors import ConfigError

__all__ = [
    "check_names",
    "quantized_weights",
    "stored_weights",
    "tensor_shapes",
    "weight_shapes",
]

# Llama's spelling -> a checkpoint's. Names that become one are stacked.
_SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "MixtralForCausalLM": (
        (".mlp.router.", ".block_sparse_moe.gate."),
        (".mlp.experts.", ".block_sparse_moe.experts."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
    "Qwen3MoeForCausalLM": ((".mlp.router.", ".mlp.gate."),),
    "Gemma3ForConditionalGeneration": (("model.", "language_model.model."),),
    "Phi3ForCausalLM": (
        (".q_proj.", ".qkv_proj."),
        (".k_proj.", ".qkv_proj."),
        (".v_proj.", ".qkv_proj."),
        (".gate_proj.", ".gate_up_proj."),
        (".up_proj.", ".gate_up_proj."),
    ),
}
# Beside the text model that we serve.
_OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.")


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return our name and shape of every weight, in the order of the forward pass.

    Linear weights are [out, in]; one that stays fp8 is followed by its weight_scale [out].
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {
            f"model.layers.{index}.{name}": shape
            for name, shape in _layer_shapes(config, index).items()
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    quantization = config.quantization
    if quantization is None:
        return shapes
    kept, both = {name for name in quantized_weights(config) if quantization.keeps(name)}, {}
    for name, shape in shapes.items():
        both[name] = shape
        if _stored_name(config, name) in kept:
            both[f"{name}_scale"] = shape[:1]
    return both


def quantized_weights(config: ModelConfig) -> set[str]:
    quantization = config.quantization
    if quantization is None:
        return set()
    return {
        name
        for name, shape in tensor_shapes(replace(config, quantization=None)).items()
        if len(shape) == 2
        and "embed" not in name
        and quantization.covers(name.removesuffix(".weight"))
    }


def _layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    hidden, experts = config.hidden_size, config.layer_experts(index)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.o_bias),
    }
    mlps = {"mlp": config.intermediate_size}
    if experts is not None:
        linears["mlp.router"] = (experts.experts, hidden, False)
        mlps = {
            f"mlp.experts.{expert}": experts.intermediate_size for expert in range(experts.experts)
        }
    for mlp, inner in mlps.items():
        linears[f"{mlp}.gate_proj"] = (inner, hidden, config.mlp_bias)
        linears[f"{mlp}.up_proj"] = (inner, hidden, config.mlp_bias)
        linears[f"{mlp}.down_proj"] = (hidden, inner, config.mlp_bias)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.gemma_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in norms}
    if config.qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def stored_weights(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    stored: dict[str, tuple[str, ...]] = {}
    for ours in weight_shapes(config):
        theirs = _stored_name(config, ours)
        stored[theirs] = (*stored.get(theirs, ()), ours)
    return stored


def _stored_name(config: ModelConfig, ours: str) -> str:
    for piece, spelling in _SPELLINGS.get(config.architecture, ()):
        ours = ours.replace(piece, spelling, 1)
    return ours


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = weight_shapes(config)
    return {
        theirs: (sum(shapes[name][0] for name in ours), *shapes[ours[0]][1:])
        for theirs, ours in stored_weights(config).items()
    }


def check_names(found: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Raise ConfigError unless a checkpoint holds exactly the wanted tensors.

    An unknown bias or scale that is left out would give wrong answers.
    """
    have, want = set(found), set(wanted)
    if any(name.startswith("language_model.") for name in want):
        have = {name for name in have if not name.startswith(_OTHER_MODALITIES)}
    for what, names in (("lacks", want - have), ("holds unknown", have - want)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(
                f"{where} {what} tensor {min(names)}{more}; is its config the right one?"
            )
