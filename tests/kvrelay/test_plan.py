"""The plan of a local cluster: flags, ports, threads, GPUs and secrets of each process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.plan import ClusterConfig, Machine, NodeGpus, gpus_of_nodes, plan, reachable, waves
from kvrelay.supervisor import ChildSpec
from kvrelay.wire.config import EngineConfig, TransferConfig
from kvrelay.wire.errors import ConfigError


def planned(config: ClusterConfig, cores: int = 8, gpus: tuple[str, ...] = ()) -> list[ChildSpec]:
    """The plan on a machine with these cores and GPUs, and ports from 9000 on."""
    ports = tuple(range(9000, 9001 + config.prefill + config.decode))
    outside = {
        "HOME": "/home",
        "KVRELAY_API_KEY": "from outside",
        "KVRELAY_CLUSTER_SECRET": "from outside",
    }
    machine = Machine(cores, gpus, ports, outside)
    return plan(config, machine, Path("/logs"), "node-secret")


def test_two_and_two_are_five_processes_that_know_each_other() -> None:
    specs = planned(ClusterConfig(EngineConfig("m"), prefill=2, decode=2))
    assert [spec.name for spec in specs] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "router",
    ]
    assert specs[0].health_url == "http://127.0.0.1:9001/health"
    router = specs[-1].command
    assert "--prefill=http://127.0.0.1:9001" in router
    assert "--prefill=http://127.0.0.1:9002" in router
    assert "--decode=http://127.0.0.1:9004" in router
    assert "--port=9000" in router
    for spec in specs[:4]:
        (told,) = [word for word in spec.command if word.startswith("--kv-events-config=")]
        anywhere = "tcp://127.0.0.1:0"  # free ports, on the loopback
        assert json.loads(told.partition("=")[2]) == {
            "enable_kv_cache_events": True,
            "endpoint": anywhere,
            "replay_endpoint": anywhere,
        }
        assert not [word for word in spec.command if "host" in word and "127.0.0.1" not in word]
    assert specs[2].command[5] == "decode"
    assert specs[2].log == Path("/logs/decode-0.log")


def test_all_nodes_are_told_how_their_model_writes() -> None:
    specs = planned(
        ClusterConfig(EngineConfig("m"), tool_call_parser="hermes", reasoning_parser="qwen3")
    )
    for spec in specs[:2]:
        assert "--tool-call-parser=hermes" in spec.command
        assert "--reasoning-parser=qwen3" in spec.command
    with pytest.raises(
        ConfigError,
        match=r"tool_call_parser 'qwen' is not one of auto, none, openai, .*, json; tool_parser_plugin can add it",
    ):
        ClusterConfig(EngineConfig("m"), tool_call_parser="qwen")
    with pytest.raises(
        ConfigError, match="reasoning_parser 'x' is not one of auto, none, openai_gptoss"
    ):
        ClusterConfig(EngineConfig("m"), reasoning_parser="x")


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(8, 0, 4), (2, 0, 1), (1, 0, 1), (8, 3, 3)]
)
def test_cores_are_shared_out_among_the_engines(cores: int, given: int, threads: int) -> None:
    specs = planned(ClusterConfig(EngineConfig("m", threads=given)), cores=cores)[:2]
    for spec in specs:
        assert f"--threads={threads}" in spec.command
        assert spec.env["OMP_NUM_THREADS"] == str(threads)
        assert spec.env["GOMP_SPINCOUNT"] == "3000"


def test_gpus_go_round_and_none_is_given_to_cpu_nodes() -> None:
    config = ClusterConfig(EngineConfig("m"), prefill=2, decode=1)
    assert [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in planned(config, gpus=("0", "3"))] == [
        "0",
        "3",
        "0",
        None,
    ]
    cpu = ClusterConfig(EngineConfig("m", device="cpu"))
    assert all("CUDA_VISIBLE_DEVICES" not in spec.env for spec in planned(cpu, gpus=("0",)))


def test_tensor_parallel_nodes_get_as_many_gpus_as_they_have_ranks() -> None:
    gpus = ("0", "2", "5", "6", "7")
    assert [each.visible for each in gpus_of_nodes([2, 2, 2], gpus)] == ["0,2", "5,6", "0,2"]
    assert gpus_of_nodes([5], gpus) == [NodeGpus("0,2,5,6,7", 1)]
    with pytest.raises(
        ConfigError,
        match="tensor_parallel_size 4 needs 4 GPUs for each node, and this machine shows 2",
    ):
        gpus_of_nodes([1, 4], ("0", "1"))


def test_roles_may_have_different_numbers_of_ranks() -> None:
    mixed = ClusterConfig(
        EngineConfig("m", tensor_parallel_size=2), decode=2, decode_tensor_parallel_size=1
    )
    specs = planned(mixed, gpus=("0", "1", "2"))[:-1]
    assert ["--tensor-parallel-size=2" in spec.command for spec in specs] == [True, False, False]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "2", "0"]
    assert shares(mixed, ("0", "1", "2")) == ["0.45", None, "0.45"]
    on = [
        [node.name for node in wave] for wave in waves(specs, Machine(8, ("0", "1", "2"), (), {}))
    ]
    assert on == [["prefill-0", "decode-0"], ["decode-1"]]
    cpu = planned(ClusterConfig(EngineConfig("m"), prefill_tensor_parallel_size=2), cores=8)
    assert ["--threads=2" in cpu[0].command, "--threads=4" in cpu[1].command] == [True, True]
    with pytest.raises(
        ConfigError, match="decode_tensor_parallel_size must not be negative, got -1"
    ):
        ClusterConfig(EngineConfig("m"), decode_tensor_parallel_size=-1)


def shares(config: ClusterConfig, gpus: tuple[str, ...]) -> list[str | None]:
    """What each node is told of its share of a GPU's memory."""
    flag = "--gpu-memory-utilization="
    commands = [spec.command for spec in planned(config, gpus=gpus)[:-1]]
    return [
        next((word.removeprefix(flag) for word in words if word.startswith(flag)), None)
        for words in commands
    ]


def test_nodes_on_one_gpu_share_its_memory() -> None:
    config = ClusterConfig(EngineConfig("m"), prefill=2, decode=1)
    assert shares(config, ("0",)) == ["0.3", "0.3", "0.3"]
    assert shares(config, ("0", "1")) == ["0.45", None, "0.45"]
    assert shares(config, ("0", "1", "2")) == [None, None, None]


def test_a_share_that_was_typed_stays() -> None:
    assert shares(ClusterConfig(EngineConfig("m", gpu_memory_utilization=0.4)), ("0",)) == [
        "0.4",
        "0.4",
    ]


def test_nodes_on_one_gpu_start_one_after_the_other() -> None:
    """Each measures what is free."""

    def names(config: ClusterConfig, gpus: tuple[str, ...]) -> list[list[str]]:
        nodes = planned(config, gpus=gpus)[:-1]
        return [[node.name for node in wave] for wave in waves(nodes, Machine(8, gpus, (), {}))]

    config = ClusterConfig(EngineConfig("m"), prefill=2, decode=1)
    assert names(config, ("0", "1")) == [["prefill-0", "prefill-1"], ["decode-0"]]
    assert names(config, ("0",)) == [["prefill-0"], ["prefill-1"], ["decode-0"]]
    assert names(config, ()) == [["prefill-0", "prefill-1", "decode-0"]]


def test_secrets_travel_in_the_environment_only() -> None:
    transfer = TransferConfig(cluster_secret="a cluster-secret")
    specs = planned(
        ClusterConfig(EngineConfig("m", hf_token="hub-secret"), transfer, api_key="client-secret")
    )
    assert not [word for spec in specs for word in spec.command if "secret" in word]
    assert all(spec.env["KVRELAY_NODE_API_KEY"] == "node-secret" for spec in specs)
    assert [spec.env.get("KVRELAY_API_KEY") for spec in specs] == [None, None, "client-secret"]
    secrets = [spec.env.get("KVRELAY_CLUSTER_SECRET") for spec in specs]
    assert secrets == ["a cluster-secret", "a cluster-secret", None]
    assert "secret" not in repr(specs)


@pytest.mark.parametrize(("outside", "taken"), [("from outside", "from outside"), ("", "drawn")])
def test_the_nodes_key_may_come_from_outside(outside: str, taken: str) -> None:
    machine = Machine(8, (), (9000, 9001, 9002), {"KVRELAY_NODE_API_KEY": outside})
    specs = plan(ClusterConfig(EngineConfig("m")), machine, Path("/logs"), "drawn")
    assert [spec.env["KVRELAY_NODE_API_KEY"] for spec in specs] == [taken] * 3


def test_a_router_without_a_key_does_not_inherit_one() -> None:
    assert "KVRELAY_API_KEY" not in planned(ClusterConfig(EngineConfig("m")))[-1].env


def test_nodes_without_a_secret_do_not_inherit_one() -> None:
    assert not any(
        "KVRELAY_CLUSTER_SECRET" in spec.env for spec in planned(ClusterConfig(EngineConfig("m")))
    )


def test_settings_of_the_nodes_are_passed_on() -> None:
    config = ClusterConfig(
        EngineConfig("m", max_model_len=77), served_model_name="smol", request_deadline_s=9.0
    )
    command = planned(config)[0].command
    assert {
        "--model=m",
        "--max-model-len=77",
        "--served-model-name=smol",
        "--request-deadline-s=9.0",
    } <= set(command)


def test_a_wildcard_address_is_reached_on_the_loopback() -> None:
    assert reachable("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert reachable("::", 1) == "http://[::1]:1"
    assert reachable("10.0.0.1", 1) == "http://10.0.0.1:1"
