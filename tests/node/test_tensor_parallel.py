"""An engine whose model is shared by several rank processes gives the tokens and logits of one
alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.local_cluster import free_ports
from kvrelay.node import ranks as rank_processes
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent.parent / "paged_engine"))
from tiny_adapters import make_adapter
from tiny_models import make_tiny

ENGINE = [sys.executable, str(Path(__file__).with_name("engine_run.py"))]
CLI = [sys.executable, "-m", "kvrelay.cli"]
Result = dict[str, Any]


def start(
    command: list[str],
    config: dict[str, Any],
    repository: Path,
    variables: dict[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    defaults = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    paths = (str(repository), os.environ.get("PYTHONPATH", ""))
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})},
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(defaults | config))
    child.stdin.close()
    child.stdin = None
    return child


def result(child: subprocess.Popen[str], seconds: float = 120) -> Result:
    out, err = child.communicate(timeout=seconds)
    assert child.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def equal(ours: Result, alone: Result) -> bool:
    for name, values in alone["logprobs"].items():
        assert ours["logprobs"][name] == pytest.approx(values, abs=1e-4)
    return bool(ours["tokens"] == alone["tokens"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Four query heads share two KV heads, so that four ranks hold each KV head twice."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("Qwen2ForCausalLM", folder, vocab_size=255)
    return folder


@pytest.fixture(scope="module")
def alone(tiny, repository) -> Result:
    return result(start(ENGINE, {"model": str(tiny)}, repository))


@pytest.fixture(scope="module")
def with_adapters(tiny, repository, tmp_path_factory) -> tuple[Result, Result]:
    """An engine's config with two adapters, and what it gives without ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    lora = [
        f"{name}={make_adapter(folder / name, tiny, seed=seed)}"
        for seed, name in enumerate(("one", "two"))
    ]
    config = {"model": str(tiny), "enable_lora": True, "lora_modules": lora}
    return config, result(start(ENGINE, config, repository))


def test_ranks_of_one_host_equal_one_alone(tiny, alone, repository):
    config = {"model": str(tiny), "tensor_parallel_size": 2}
    assert equal(result(start(ENGINE, config, repository)), alone)


def test_ranks_share_adapters(with_adapters, alone, repository):
    """Each pair of these ranks holds one KV head; r0 has no adapter."""
    config, given = with_adapters
    assert given["logprobs"]["r0"] == pytest.approx(alone["logprobs"]["r0"], abs=1e-4)
    assert given["tokens"][2] != alone["tokens"][2]
    shared = result(start(ENGINE, config | {"tensor_parallel_size": 4}, repository))
    assert equal(shared, given)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 32}, "block_size is 0 here and 32 on rank 0"),
        ({"enable_lora": True, "lora_modules": ["a=adapter"]}, "lora_modules a=adapter is"),
    ],
)
def test_ranks_that_differ_end_and_say_so(settings, words, tiny, repository, tmp_path):
    """They were told different things, or find other files at the same path."""
    for seed, host in enumerate(("one", "two")):
        make_adapter(tmp_path / host / "adapter", tiny, seed=seed)
    shared = {
        "model": str(tiny),
        "tensor_parallel_size": 2,
        "tensor_parallel_address": f"127.0.0.1:{free_ports(1)[0]}",
        "tensor_parallel_size_local": 1,
    }
    first = start(ENGINE, shared | settings, repository, folder=tmp_path / "one")
    if "lora_modules" in settings:
        shared |= settings | {"lora_modules": settings["lora_modules"][0]}
    second = start([*CLI, "rank", *flags(shared)], {}, repository, folder=tmp_path / "two")
    errors = [child.communicate(timeout=120)[1] for child in (first, second)]
    assert all(child.returncode for child in (first, second))
    assert all("the ranks differ" in error for error in errors)
    assert words in errors[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"tensor_parallel_size": 3},
            "4 query heads cannot be shared by 3 ranks; choose a divisor of 4",
        ),
        (
            {"max_model_len": 1000},
            "max_model_len 1000 is above the model's own limit of 512; lower it",
        ),
        (
            {"tensor_parallel_address": "192.0.2.7:5000"},
            "'192.0.2.7:5000' is not of this host, where rank 0 runs",
        ),
        (
            {"tensor_parallel_address": "127.0.0.1:{taken}"},
            "port {taken} is taken; choose another one",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_ranks_are_started(settings, words, tiny, monkeypatch):
    monkeypatch.setattr(
        rank_processes, "_start", lambda place: pytest.fail(f"rank {place.rank} is started")
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = str(listener.getsockname()[1])
        settings = {
            name: value.replace("{taken}", taken) if isinstance(value, str) else value
            for name, value in settings.items()
        }
        config = EngineConfig(
            **{"model": str(tiny), "device": "cpu", "tensor_parallel_size": 2} | settings
        )
        with pytest.raises(ConfigError, match=re.escape(words.replace("{taken}", taken))):
            rank_processes.join_as_rank_0(config)


def test_what_cannot_work_is_one_sentence_on_the_command_line(tiny, repository):
    ranks = ["--tensor-parallel-size=2", "--tensor-parallel-size-local=1"]
    nowhere = "--tensor-parallel-address=no-such-host.invalid:5000"
    command = [*CLI, "rank", nowhere, f"--model={tiny}", "--cpu", *ranks]
    child = start(command, {}, repository)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 2
    (line,) = err.splitlines()
    assert "'no-such-host.invalid:5000' cannot be reached" in line


ON_GPU = {
    "device": "cuda",
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.1,
}
COLD = 400.0  # seconds: every rank compiles every kernel


@pytest.fixture(scope="module")
def tiny_for_gpus(tmp_path_factory) -> Path:
    """Eight query heads share two KV heads of 64."""
    folder = tmp_path_factory.mktemp("tiny-gpu")
    make_tiny(
        "Qwen2ForCausalLM",
        folder,
        head_dim=64,
        hidden_size=512,
        num_attention_heads=8,
        vocab_size=255,
    )
    return folder


@pytest.fixture(scope="module")
def alone_on_gpu(tiny_for_gpus, repository) -> Result:
    config = {"model": str(tiny_for_gpus)} | ON_GPU
    return result(start(ENGINE, config, repository), COLD)


def near(ours: Result, alone: Result) -> bool:
    """Of bf16: the first token's log-probability; the later tokens may part at near-ties.

    Not those of r1, which may say one word only: so a rank that is not told of masks is heard."""
    for name, values in alone["logprobs"].items():
        assert ours["logprobs"][name][0] == pytest.approx(values[0], abs=0.05)
    assert ours["tokens"][1] == alone["tokens"][1] == [77] * 12
    assert ours["logprobs"]["r1"] == pytest.approx(alone["logprobs"]["r1"], abs=0.1)
    return [len(tokens) for tokens in ours["tokens"]] == [len(tokens) for tokens in alone["tokens"]]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_hosts_that_share_gpus_equal_one_alone(
    ranks, tiny_for_gpus, alone_on_gpu, repository
):
    """NCCL refuses two ranks on one GPU of a host, so that each rank says that it is a host of its
    own.

    They then meet over sockets, as hosts do, and any number of ranks can be tried with one GPU.
    """

    def host(rank: int) -> dict[str, str]:
        return {
            "NCCL_HOSTID": f"host-{rank}",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": str(rank % torch.cuda.device_count()),
        }

    config: dict[str, Any] = ON_GPU | {
        "model": str(tiny_for_gpus),
        "tensor_parallel_size": ranks,
        "tensor_parallel_size_local": 1,
        "tensor_parallel_address": f"127.0.0.1:{free_ports(1)[0]}",
    }
    first = start(ENGINE, config, repository, host(0))
    others = [
        start(
            [*CLI, "rank", *flags(config, rank)],
            {},
            repository,
            host(rank),
        )
        for rank in range(1, ranks)
    ]
    assert near(result(first, COLD), alone_on_gpu)
    for child in others:
        child.communicate(timeout=120)
        assert child.returncode == 0


def test_a_lost_rank_ends_the_engine(tiny, repository):
    config = {"model": str(tiny), "tensor_parallel_size": 2}
    child = start([*ENGINE, "--forever"], config, repository)
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    (rank,) = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(rank), signal.SIGKILL)
    child.communicate(timeout=120)
    assert child.returncode == 1


def flags(config: dict[str, Any], machine: int = 1) -> list[str]:
    """`kvrelay rank` with what rank 0 was told."""
    values = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1} | config
    values |= {"tensor_parallel_size_local": 1, "machine": machine}
    words = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    return [
        word
        for flag, value in words.items()
        for word in ((flag,) if value is True else (flag, str(value)))
    ]


def test_ranks_of_two_hosts_equal_one_alone(tiny, alone, repository):
    """Two network namespaces joined by a cable: nothing but the address of rank 0 leads from one to
    the other.
    """
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("making network namespaces needs root and the ip command")
    name = f"kvr{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", f"{name}a"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.decode().strip()}")
    try:
        for words in (
            f"netns add {name}b",
            f"link add {name}0 netns {name}a type veth peer name {name}1 netns {name}b",
            f"-n {name}a addr add 10.77.0.1/24 dev {name}0",
            f"-n {name}b addr add 10.77.0.2/24 dev {name}1",
            f"-n {name}a link set lo up",
            f"-n {name}b link set lo up",
            f"-n {name}a link set {name}0 up",
            f"-n {name}b link set {name}1 up",
        ):
            subprocess.run(["ip", *words.split()], check=True, capture_output=True)
        config = {
            "model": str(tiny),
            "tensor_parallel_size": 2,
            "tensor_parallel_address": "10.77.0.1:29517",
        }

        def inside(which: str, *command: str) -> list[str]:
            return ["ip", "netns", "exec", f"{name}{which}", *command]

        first = start(inside("a", *ENGINE), config | {"tensor_parallel_size_local": 1}, repository)
        second = start(inside("b", *CLI, "rank", *flags(config)), {}, repository)
        assert equal(result(first), alone)
        second.communicate(timeout=120)
        assert second.returncode == 0
    finally:
        for which in "ab":
            subprocess.run(
                ["ip", "netns", "del", f"{name}{which}"], check=False, capture_output=True
            )
