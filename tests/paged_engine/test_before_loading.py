"""What is refused before a weight is read: from the settings, config.json and the number of GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.paged_engine.before_loading import (
    check_engine,
    choose_device,
    compute_dtype,
    least_weight_bytes,
)
from kvrelay.paged_engine.gpu_runner import GpuBudget
from kvrelay.paged_engine.hf_config import parse_model_config
from kvrelay.paged_engine.sharding import shard_config
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

LLAMA_8B = "benchmarks/models/llama-3.1-8b.json"


@pytest.fixture
def llama(repository: Path) -> str:
    """A config.json: 32 query heads, 8 KV heads, 14,336 MLP columns, 131,072 positions; no weights."""
    return str(repository / LLAMA_8B)


def seen(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_model_len": 131_073},
            "max_model_len 131073 is above the model's own limit of 131072; lower it",
        ),
        (
            {"tensor_parallel_size": 3},
            "32 query heads cannot be shared by 3 ranks; choose a divisor of 32",
        ),
        (
            {"tensor_parallel_size": 8},
            "8 ranks here need 8 GPUs, and this host shows 4; lower tensor_parallel_size, or",
        ),
        ({"dtype": "float32"}, "dtype float32 is not served on a GPU; use bfloat16"),
        (
            {"kv_cache_memory_bytes": 1 << 20},
            "a KV pool of 1048576 bytes holds 0 blocks of 8388608 bytes",
        ),
        (
            {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 4096},
            "Lower max_model_len to at most 448",
        ),
        (
            {"device": "cpu", "kv_cache_dtype": "auto", "max_model_len": 10_000},
            "Lower max_model_len to at most 4080",
        ),
        ({"load_format": "auto"}, "holds no weights; pass its folder"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    settings: dict[str, Any], message: str, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(4, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineConfig(llama, **{"load_format": "dummy", **settings}))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 131_072},
        {"tensor_parallel_size": 4},
        {
            "tensor_parallel_size": 16,
            "tensor_parallel_size_local": 4,
            "tensor_parallel_address": "10.0.0.1:5000",
        },
        {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 448, "kv_cache_dtype": "fp8"},
        {"device": "cpu", "max_model_len": 4080},
    ],
)
def test_settings_that_fit_are_not_refused(
    settings: dict[str, Any], llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(4, monkeypatch)
    check_engine(EngineConfig(llama, load_format="dummy", **settings))


def test_kv_heads_must_divide_the_ranks_or_be_divided(tmp_path: Path, llama: str) -> None:
    values = json.loads(Path(llama).read_text()) | {
        "num_attention_heads": 24,
        "num_key_value_heads": 6,
    }
    (tmp_path / "odd.json").write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match="6 KV heads cannot be shared by 4 ranks; choose a divisor or a multiple"
    ):
        check_engine(
            EngineConfig(
                str(tmp_path / "odd.json"),
                load_format="dummy",
                device="cpu",
                tensor_parallel_size=4,
            )
        )


def test_the_device_is_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(2, monkeypatch)
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    seen(0, monkeypatch)
    assert choose_device("auto", 7) == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch sees no GPU; use --device cpu or install"):
        choose_device("cuda")


def test_the_dtype_follows_from_the_device_and_the_model(llama: str) -> None:
    def dtype(device: str, model_dtype: str, wanted: str = "auto") -> str:
        model = parse_model_config(
            json.loads(Path(llama).read_text()) | {"dtype": model_dtype}, {}, "m", "test"
        )
        return compute_dtype(EngineConfig("m", dtype=wanted), model, device)

    assert dtype("cpu", "bfloat16") == "float32"
    assert dtype("cpu", "bfloat16", "float16") == "float16"
    assert dtype("cuda", "float16") == "float16"
    assert dtype("cuda", "float32") == "bfloat16"
    assert dtype("cuda", "bfloat16", "float16") == "float16"


def test_weights_that_cannot_fit_a_gpu_are_refused(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = parse_model_config(json.loads(Path(llama).read_text()), {}, "m", "test")
    in_16_bits, in_fp8 = (
        least_weight_bytes(whole, 1, dtype="bfloat16", quantize=quantize)
        for quantize in (False, True)
    )
    assert in_16_bits == 2 * 8_030_261_248
    assert in_fp8 == in_16_bits - 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 14_336 * 4096)
    half = least_weight_bytes(shard_config(whole, 2), 2, dtype="bfloat16", quantize=False)
    embedding = 2 * 128_256 * 4096
    assert half - embedding == pytest.approx((in_16_bits - embedding) / 2, rel=1e-3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 30, 24 << 30))
    GpuBudget.measure(torch.device("cuda"), 0.5, in_fp8)
    with pytest.raises(
        ConfigError,
        match=r"14.96 GiB on each GPU, .* allows 12.00 GiB of 24.00 GiB; raise it, use quan",
    ):
        GpuBudget.measure(torch.device("cuda"), 0.5, in_16_bits)
