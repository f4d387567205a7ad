"""What is refused before a process starts, by what a machine has: its memory and its GPUs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_state import TINY

from kvrelay import machine, preflight
from kvrelay.cluster_plan import ClusterConfig
from kvrelay.machine import gpus_here
from kvrelay.preflight import check_start, memory_here, with_model_here
from kvrelay.wire.config import EngineConfig, NodeConfig, RanksConfig
from kvrelay.wire.errors import ConfigError
from tests.commands import output_of

GIB = 1 << 30
BIG = "benchmarks/models/llama-3.1-8b.json"  # 15 GiB of weights in 16 bits, 30 in 32


@pytest.mark.parametrize(
    ("command", "settings", "free", "said"),
    [
        ("serve", {"device": "cuda"}, 1, ""),  # the engine asks its GPU
        ("serve", {}, 31, ""),
        ("up", {}, 31, "2 nodes together need at least 61.83 GiB of memory ("),
        ("up", {"dtype": "bfloat16"}, 31, "and of 64.00 GiB here 31.00 GiB are free"),
        ("serve", {"tensor_parallel_size": 2}, 34, ""),
        ("serve", {"tensor_parallel_size": 8}, 32, "8.00 GiB of KV pool)"),
        ("rank", {"kv_cache_memory_bytes": 20 * GIB}, 64, ""),
        ("rank", {"kv_cache_memory_bytes": 60 * GIB}, 64, "60.00 GiB of KV"),
        ("serve", {"threads": 48}, 31, ""),
        ("rank", {"threads": 49}, 64, "threads must be at most 48 on 3 cores, got 49; 0 takes all"),
    ],
)
def test_what_a_machine_cannot_hold_is_refused_with_the_figures(
    command: str,
    settings: dict[str, Any],
    free: int,
    said: str,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "memory_here", lambda: (64 * GIB, free * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 9})
    settings = {"device": "cpu"} | settings
    engine = EngineConfig(str(repository / BIG), load_format="dummy", **settings)
    config: Any = ClusterConfig(NodeConfig(engine)) if command == "up" else NodeConfig(engine)
    if command == "rank":
        config = RanksConfig(
            replace(
                engine,
                tensor_parallel_size=2,
                tensor_parallel_size_local=1,
                tensor_parallel_address="127.0.0.1:5000",
            )
        )
    if not said:
        check_start(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_start(config)
    assert said in caught.value.message


def test_the_class_llm_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrelay.llm import LLM

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ConfigError, match=r"needs at least 2048\.00 GiB"):
        LLM(str(tmp_path), device="cpu", load_format="dummy", kv_cache_memory_bytes="2T")


def test_a_folder_that_nobody_may_look_into_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "config.json")

    monkeypatch.setattr(preflight, "check_start", refused)
    with pytest.raises(ConfigError, match=r"model '.*' cannot be read: .*Permission denied"):
        with_model_here(NodeConfig(EngineConfig(str(tmp_path))))


def test_what_is_checked_before_a_start_needs_no_torch(repository: Path) -> None:
    code = f"""
import sys
from kvrelay.preflight import check_start
from kvrelay.wire.config import EngineConfig, NodeConfig

check_start(NodeConfig(EngineConfig({BIG!r}, load_format="dummy", device="cuda")))
assert "torch" not in sys.modules
"""
    output_of(sys.executable, "-c", code, cwd=repository)


# --- what cgroups and nvidia-smi say


def cgroup(limit: object, used: int = 0, cache: int = 0) -> dict[str, object]:
    """The files of a cgroup; the kernel can drop `cache` of what is used."""
    stat = f"anon 5\nfile 7\ninactive_file {cache // 2}\nactive_file {cache // 2}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("listed", "limits", "found"),
    [
        pytest.param("", {}, (64, 60), id="no cgroups"),
        pytest.param(
            "0::/a/b.scope\n",
            {"a/b.scope": cgroup("max"), "a": cgroup(8 * GIB, 5 * GIB, 2 * GIB)},
            (8, 5),
            id="the one around it",
        ),
        pytest.param(
            "0::/a/b\n",
            {"a/b": cgroup(4 * GIB, 6 * GIB), "a": cgroup(8 * GIB)},
            (4, 0),
            id="nested",
        ),
        pytest.param(
            "0::/docker/of-the-host\n",
            {"": cgroup(2 * GIB)},
            (2, 2),
            id="a container that sees its host's path",
        ),
        pytest.param("nonsense\n0::/a\n", {"a": {"memory.max": "?"}}, (64, 60), id="other files"),
    ],
)
def test_the_tightest_cgroup_counts(
    listed: str, limits: dict[str, dict[str, object]], found: tuple[int, int], tmp_path: Path
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert memory_here(proc, cgroups) is None
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    (proc / "self" / "cgroup").write_text(listed)
    for path, files in limits.items():
        (cgroups / path).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (cgroups / path / name).write_text(f"{content}\n")
    assert memory_here(proc, cgroups) == (found[0] * GIB, found[1] * GIB)


@pytest.mark.parametrize(
    ("visible", "rows", "found"),
    [
        (None, "0\n1\n", ("0", "1")),
        ("1", "0\n1\n", ("1",)),
        ("GPU-bb, MIG-7", "", ("GPU-bb", "MIG-7")),
        ("-1", "0\n", None),
        (None, "Failed to initialize NVML\n", ()),
    ],
)
def test_the_gpus_are_those_that_are_visible(
    visible: str | None,
    rows: str,
    found: tuple[str, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_DRIVERS", (script,))
    monkeypatch.setattr(machine, "cuda_of_torch", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == found
    script.unlink()
    assert gpus_here() is None
