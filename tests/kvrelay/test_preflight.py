"""What is refused before a process starts, by what a machine has: its GPUs and its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay import machine, preflight
from kvrelay.cluster_plan import ClusterConfig
from kvrelay.machine import Gpu, gpus_here
from kvrelay.preflight import Host, Memory, NotNow, check_start, with_model_here
from kvrelay.wire.config import EngineConfig, NodeConfig, RanksConfig
from kvrelay.wire.errors import ConfigError

GIB = 1 << 30
BIG = "benchmarks/models/llama-3.1-8b.json"  # 15 GiB of weights in 16 bits, 30 in 32
TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 1024,
}  # fmt: skip


def gpus(*totals: int, free: float = 1.0) -> Host:
    """A machine with GPUs of so many GiB and much memory."""
    found = tuple(
        Gpu(str(index), size * GIB, int(size * free * GIB)) for index, size in enumerate(totals)
    )
    return Host(found, [Memory("this machine", 512 * GIB, 500 * GIB)])


def cpu(total: int, free: int) -> Host:
    """A machine without a GPU."""
    return Host(None, [Memory("this machine", total * GIB, free * GIB)])


@pytest.fixture
def big(repository: Path) -> EngineConfig:
    """An engine of an 8B model, without weights."""
    return EngineConfig(str(repository / BIG), load_format="dummy")


CASES: list[tuple[str, dict[str, Any], Host, type[ConfigError] | None, str]] = [
    ("serve", {}, gpus(80), None, ""),
    ("serve", {"device": "cpu"}, gpus(80), None, ""),
    ("serve", {"override_generation_config": {"temperature": 0.5}}, gpus(80), None, ""),
    (
        "serve",
        {"device": "cuda"},
        cpu(64, 64),
        ConfigError,
        "device cuda was asked for, but torch can use no GPU here",
    ),
    ("serve", {"device": "cuda"}, Host((), []), None, ""),  # nobody says which there are
    ("serve", {}, Host((Gpu("MIG-1"),), []), None, ""),
    (
        "serve",
        {},
        gpus(16),
        ConfigError,
        "needs at least 15.97 GiB of its GPU (14.96 GiB of weights, 0.02 GiB of KV",
    ),
    ("serve", {"quantization": "fp8"}, gpus(16), None, ""),
    (
        "serve",
        {"kv_cache_memory_bytes": 80 * GIB},
        gpus(80),
        ConfigError,
        "may have 80.00 GiB of 80.00 GiB; lower kv_cache_m",
    ),
    ("serve", {"max_model_len": 131_072}, gpus(24), ConfigError, "16.01 GiB of KV pool"),
    ("serve", {"max_model_len": 131_072}, gpus(80), None, ""),
    (
        "serve",
        {},
        gpus(80, free=0.5),
        NotNow,
        "gives 72.00 GiB of GPU 0 to nodes, and only 40.00 GiB of its 80.00 GiB",
    ),
    ("serve", {"tensor_parallel_size": 2}, gpus(16, 16), None, ""),
    (
        "serve",
        {"tensor_parallel_size": 2},
        gpus(80),
        ConfigError,
        "tensor_parallel_size 2 needs 2 GPUs for each node",
    ),
    ("up", {}, gpus(80), None, ""),
    (
        "up",
        {"kv_cache_memory_bytes": 30 * GIB},
        gpus(80),
        ConfigError,
        "GPU 0 need at least 91.92 GiB together, and it has",
    ),
    ("up", {"kv_cache_memory_bytes": 30 * GIB}, gpus(80, 80), None, ""),
    (
        "up",
        {"gpu_memory_utilization": 0.8},
        gpus(80),
        ConfigError,
        "gives 128.00 GiB of GPU 0 to nodes, and only 80.00",
    ),
    ("serve", {"device": "cpu"}, cpu(32, 31), None, ""),
    (
        "up",
        {"device": "cpu"},
        cpu(32, 31),
        ConfigError,
        "2 nodes together need at least 61.83 GiB of memory (59.83 GiB",
    ),
    (
        "up",
        {"device": "cpu", "dtype": "bfloat16"},
        cpu(31, 31),
        ConfigError,
        "2 nodes together need at least 31.92 GiB",
    ),
    (
        "up",
        {"device": "cpu", "dtype": "bfloat16"},
        cpu(40, 31),
        NotNow,
        "this machine's 40.00 GiB only 31.00 GiB are",
    ),
    ("serve", {"device": "cpu", "tensor_parallel_size": 2}, cpu(34, 34), None, ""),
    (
        "serve",
        {"device": "cpu", "tensor_parallel_size": 8},
        cpu(32, 32),
        ConfigError,
        "8.00 GiB of KV pool)",
    ),
    ("rank", {"device": "cpu", "kv_cache_memory_bytes": 20 * GIB}, cpu(64, 64), None, ""),
    (
        "rank",
        {"device": "cpu", "kv_cache_memory_bytes": 60 * GIB},
        cpu(64, 64),
        ConfigError,
        "60.00 GiB of KV pool), and this",
    ),
]


@pytest.mark.parametrize(("command", "settings", "here", "refusal", "said"), CASES)
def test_what_a_machine_cannot_hold_is_refused_with_the_figures(
    command: str,
    settings: dict[str, Any],
    here: Host,
    refusal: type[ConfigError] | None,
    said: str,
    big: EngineConfig,
) -> None:
    engine = replace(big, **settings)
    config: Any
    if command == "rank":
        two = replace(
            engine,
            tensor_parallel_size=2,
            tensor_parallel_size_local=1,
            tensor_parallel_address="127.0.0.1:5000",
        )
        config = RanksConfig(two)
    else:
        config = ClusterConfig(NodeConfig(engine)) if command == "up" else NodeConfig(engine)
    if refusal is None:
        check_start(config, here)
        return
    with pytest.raises(ConfigError) as caught:
        check_start(config, here)
    assert type(caught.value) is refusal
    assert said in caught.value.message


def test_the_class_llm_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrelay.llm import LLM

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(preflight, "host", lambda: cpu(16, 16))
    with pytest.raises(
        ConfigError, match=r"needs at least 2048.00 GiB .* this machine has 16.00 GiB"
    ):
        LLM(str(tmp_path), load_format="dummy", kv_cache_memory_bytes="2T")


def test_a_folder_that_nobody_may_look_into_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "config.json")

    monkeypatch.setattr(preflight, "check_start", refused)
    with pytest.raises(ConfigError, match=r"model '.*' cannot be read: .*Permission denied"):
        with_model_here(NodeConfig(EngineConfig(str(tmp_path))))


# --- what nvidia-smi says

ROWS = "0, GPU-aaaa, 1024, 80000\n1, GPU-bbbb, 0, 81024\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver, a CUDA build of torch and a stand-in for nvidia-smi, which prints a
    file.
    """
    rows = tmp_path / "rows"
    rows.write_text(ROWS)
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nexec cat {rows}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_DRIVERS", (rows,))
    monkeypatch.setattr(machine, "cuda_of_torch", lambda: "13.0")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return rows


A, B = Gpu("0", 81024 << 20, 80000 << 20), Gpu("1", 81024 << 20, 81024 << 20)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, (A, B)),
        ("1", (B,)),
        ("GPU-bb, 0", (replace(B, name="GPU-bb"), A)),
        ("MIG-77", (Gpu("MIG-77"),)),
        ("", None),
        ("-1", None),
    ],
)
def test_the_gpus_are_those_that_are_visible(
    visible: str | None,
    found: tuple[Gpu, ...] | None,
    driver: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == found


def test_unlike_gpus_have_sizes_only_where_cuda_counts_as_nvidia_smi_does(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.write_text("0, GPU-aaaa, 0, 8000\n1, GPU-bbbb, 0, 80000\n")
    assert gpus_here() == (Gpu("0"), Gpu("1"))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert gpus_here() == (Gpu("0", 8000 << 20, 8000 << 20), Gpu("1", 80000 << 20, 80000 << 20))


@pytest.mark.parametrize("rows", ["", "Failed to initialize NVML\n", "0, GPU-aaaa, [N/A], [N/A]\n"])
def test_an_nvidia_smi_that_does_not_say_hides_no_gpu(rows: str, driver: Path) -> None:
    driver.write_text(rows)
    assert all(not gpu.total_bytes for gpu in gpus_here() or ())
    assert gpus_here() is not None


def test_without_a_driver_or_a_cuda_build_of_torch_there_is_none(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cuda_of_torch", lambda: None)
    assert gpus_here() is None
    monkeypatch.setattr(machine, "cuda_of_torch", lambda: "13.0")
    driver.unlink()
    assert gpus_here() is None


def test_what_is_checked_before_a_start_needs_no_torch(big: EngineConfig, repository: Path) -> None:
    code = """
import sys
from kvrelay.preflight import Host, check_start
from kvrelay.wire.config import EngineConfig, NodeConfig

check_start(NodeConfig(EngineConfig(sys.argv[1], load_format="dummy")), Host(None, []))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, big.model], check=True, cwd=repository, timeout=60)
