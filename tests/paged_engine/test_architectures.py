"""All architectures against transformers and against themselves
in other batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import SAMPLED, drain, make, output, prompt, submit
from safetensors.torch import load_file, save_file
from tiny_models import DIFFERENCES, make_tiny

from kvrelay.paged_engine.decoder import split_fused
from kvrelay.paged_engine.model_config import MixtureOfExperts, ModelConfig, RopeScaling
from kvrelay.paged_engine.model_files import read_model_config, read_tensors
from kvrelay.paged_engine.model_tensors import tensor_shapes, weight_shapes
from kvrelay.paged_engine.request import Chunk, Request
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.sampling import SamplingParams

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{architecture: (architecture, {}) for architecture in DIFFERENCES},
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3-moe-plain-weights": (
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
    ),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "gemma3-with-images": ("Gemma3ForConditionalGeneration", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "opt": ("OPTForCausalLM", {}),
    "opt-norm-after": ("OPTForCausalLM", {"do_layer_norm_before": False}),
    "qwen3-mixed-windows": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    architecture, overrides = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_tiny(architecture, folder, **overrides)


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_logits_of_all_positions_equal_transformers_in_any_chunks(tiny) -> None:
    folder, model = tiny
    engine = make(folder, max_num_batched_tokens=256)
    tokens = prompt(150)
    theirs = logits_of(model, tokens)
    req = Request.from_submit(Submit("r", tokens, SamplingParams(1, seed=0)), 0.0)
    req.blocks = engine.scheduler.pool.allocate(10) or []
    ends = [1, 2, 3, 17, 40, 64, 65, 129, 150]
    for start, end in zip([0, *ends], ends, strict=False):
        ours = engine._runner.run([Chunk(req, start, end - start, True)])[0][0]
        assert float((ours - theirs[end - 1]).abs().max()) < 1e-3
        whole = engine._runner.run([Chunk(req, 0, end, True)])[0][0]
        assert torch.equal(ours, whole), "bits depend on how the prompt was cut"


def test_greedy_text_equals_transformers_through_chunks_and_batches(tiny) -> None:
    folder, model = tiny
    engine = make(folder, max_num_batched_tokens=40)
    prompts = [prompt(length, seed=length) for length in (1, 16, 17, 70, 129)]
    requests = [submit(engine, f"r{i}", tokens) for i, tokens in enumerate(prompts)]
    drain(engine)
    for req, tokens in zip(requests, prompts, strict=True):
        theirs = logits_of(model, req.token_ids)[len(tokens) - 1 : -1].argmax(-1)
        assert output(req) == theirs.tolist()


def test_tokens_do_not_depend_on_batch_chunks_or_cache(tiny) -> None:
    folder, _ = tiny
    prompts = [prompt(length, seed=length) for length in (3, 40, 90, 33)]

    def run(alone: bool, **options: Any) -> list[list[Any]]:
        engine, requests = make(folder, **options), []
        for i, tokens in enumerate(prompts):
            requests.append(
                submit(engine, f"{i}", tokens, seed=i, max_tokens=10, logprobs=2, **SAMPLED)
            )
            if alone:
                drain(engine)
        drain(engine)
        return [[*output(r), *(x.logprob for x in r.new_logprobs)] for r in requests]

    reference = run(alone=True)
    assert run(alone=False) == reference
    assert run(alone=False, max_num_batched_tokens=19, enable_prefix_caching=False) == reference


# --- what config.json says


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
    "vocab_size": 256,
}


def config_of(folder: Path, architecture: str, **values: Any) -> ModelConfig:
    (folder / "config.json").write_text(
        json.dumps({"architectures": [architecture], **SIZES, **values})
    )
    return read_model_config(str(folder))


@pytest.mark.parametrize("name", MODELS)
def test_all_tensors_of_a_checkpoint_are_wanted_and_an_odd_one_is_refused(
    tmp_path: Path, name: str
) -> None:
    architecture, overrides = MODELS[name]
    make_tiny(architecture, tmp_path, **overrides)
    config = read_model_config(str(tmp_path))
    assert config.architecture == architecture
    weights = dict(split_fused(config, read_tensors(str(tmp_path), config)))
    assert {ours: tuple(weight.shape) for ours, weight in weights.items()} == weight_shapes(config)
    stored = load_file(tmp_path / "model.safetensors")
    odd = f"{min(tensor_shapes(config)).rpartition('.')[0]}.odd"
    save_file({**stored, odd: torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"holds unknown tensor {odd}"):
        dict(read_tensors(str(tmp_path), config))


def test_mixtral_takes_its_defaults_and_has_experts_everywhere(tmp_path: Path) -> None:
    config = config_of(tmp_path, "MixtralForCausalLM", num_attention_heads=8)
    assert (config.num_kv_heads, config.rope_theta) == (8, 1e6)
    assert (config.rms_norm_eps, config.window) == (1e-5, 0)
    assert config.moe == MixtureOfExperts(8, 2, 96, renormalize=True, dense_layers=())
    assert config_of(
        tmp_path, "MixtralForCausalLM", num_key_value_heads=4, sliding_window=9
    ).windows == (9,)


def test_qwen3_moe_has_experts_where_its_steps_and_lists_say(tmp_path: Path) -> None:
    def dense(**values: Any) -> tuple[int, ...]:
        config = config_of(tmp_path, "Qwen3MoeForCausalLM", **values)
        assert config.qk_norm
        assert config.moe is not None
        assert (config.moe.experts, config.moe.per_token, config.moe.intermediate_size) == (
            128,
            8,
            768,
        )
        assert [config.layer_experts(i) is None for i in range(12)] == [
            i in config.moe.dense_layers for i in range(12)
        ]
        return config.moe.dense_layers

    assert dense() == ()
    assert dense(mlp_only_layers=[1, 5]) == (1, 5)
    assert dense(decoder_sparse_step=3, mlp_only_layers=[2]) == (0, 1, 2, 3, 4, 6, 7, 9, 10)
    assert config_of(tmp_path, "Qwen3MoeForCausalLM", num_experts=0).moe is None
    assert config_of(tmp_path, "Qwen3MoeForCausalLM", norm_topk_prob=True).moe == MixtureOfExperts(
        128, 8, 768, True, ()
    )


def test_gemma2_alternates_and_null_turns_a_soft_cap_off(tmp_path: Path) -> None:
    config = config_of(tmp_path, "Gemma2ForCausalLM", hidden_act="gelu_pytorch_tanh")
    assert [config.layer_window(layer) for layer in range(4)] == [4096, 0, 4096, 0]
    assert (config.norm, config.norm_places, config.activation) == (
        "rms_plus_one",
        "around",
        "gelu_tanh",
    )
    assert (config.embedding_scale, config.attention_scale, config.head_dim) == (8.0, 1 / 16, 256)
    assert (config.attention_softcap, config.logit_softcap, config.tie_embeddings) == (
        50.0,
        30.0,
        True,
    )
    assert (
        config_of(tmp_path, "Gemma2ForCausalLM", attn_logit_softcapping=None).attention_softcap
        is None
    )


def test_gemma3_is_read_as_the_hub_spells_it(tmp_path: Path) -> None:
    """Checkpoints of 2025: what is not the default's, inside of text_config, with rope_scaling in
    the old spelling.
    """
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(str(tmp_path))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (
        8,
        4,
        256,
        262_208,
    )
    assert (config.rope_theta, config.local_rope_theta, config.max_position) == (1e6, 1e4, 131_072)
    assert config.rope_scaling == RopeScaling("linear", 8.0, 1.0, 1.0, 131_072)
    assert config.full_attention_layers == (5, 11, 17, 23, 29)
    assert (config.windows, config.dtype, config.eos_token_ids) == ((0, 1024), "bfloat16", (1, 106))
    assert (config.qk_norm, config.attention_softcap, config.logit_softcap) == (True, None, None)
    assert "language_model.model.layers.33.self_attn.q_norm.weight" in tensor_shapes(config)


def test_phi3_rotates_part_of_a_head_and_opt_none(tmp_path: Path) -> None:
    phi = config_of(tmp_path, "Phi3ForCausalLM", partial_rotary_factor=0.75, sliding_window=2047)
    assert (phi.rotary_dim, phi.windows, phi.rms_norm_eps) == (12, (2047,), 1e-5)
    assert tensor_shapes(phi)["model.layers.0.self_attn.qkv_proj.weight"] == (192, 64)
    opt = config_of(tmp_path, "OPTForCausalLM", ffn_dim=128, intermediate_size=1)
    assert (opt.intermediate_size, opt.norm, opt.norm_places, opt.gated) == (
        128,
        "layer",
        "before",
        False,
    )
    assert (opt.learned_positions, opt.tie_embeddings, opt.qkv_bias, opt.mlp_bias) == (
        True,
        True,
        True,
        True,
    )
    assert tensor_shapes(opt)["model.decoder.embed_positions.weight"] == (514, 64)


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        (
            "OPTForCausalLM",
            {"ffn_dim": 96, "word_embed_proj_dim": 32},
            r"word_embed_proj_dim 32 .* hidden_size \(64\)",
        ),
        (
            "OPTForCausalLM",
            {"ffn_dim": 96, "_remove_final_layer_norm": True},
            "_remove_final_layer_norm True",
        ),
        (
            "OPTForCausalLM",
            {"ffn_dim": 96, "layer_norm_elementwise_affine": False},
            "elementwise_affine False",
        ),
        (
            "OPTForCausalLM",
            {"activation_function": "gelu"},
            "activation_function 'gelu' is not supported; relu is",
        ),
        (
            "Gemma2ForCausalLM",
            {"hidden_activation": "gelu"},
            "hidden_activation 'gelu' .*; gelu_pytorch_tanh is",
        ),
        (
            "Gemma2ForCausalLM",
            {"attn_logit_softcapping": 0},
            "attention_softcap must be positive, got 0",
        ),
        (
            "Gemma3ForCausalLM",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention true",
        ),
        ("Gemma3ForConditionalGeneration", {}, "text_config must be an object, got None"),
        (
            "Gemma3ForCausalLM",
            {
                "rope_parameters": {
                    "full_attention": {},
                    "sliding_attention": {"rope_type": "linear", "factor": 2},
                }
            },
            "sliding_attention: rope_type 'linear' is not supported",
        ),
        ("Qwen3MoeForCausalLM", {"num_experts": 4}, "to 8 of 4 experts"),
        (
            "Phi3ForCausalLM",
            {"partial_rotary_factor": 0.7},
            "partial_rotary_factor 0.7 rotates 11 of 16",
        ),
        (
            "MixtralForCausalLM",
            {"hidden_act": "gelu", "num_key_value_heads": 4},
            "hidden_act 'gelu'",
        ),
    ],
)
def test_what_these_architectures_do_not_have_is_refused_by_name(
    tmp_path: Path, architecture: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, architecture, **values)
