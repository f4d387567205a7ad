"""The plan of a local cluster: flags, ports, threads, GPUs and secrets of each process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.plan import ClusterConfig, Machine, plan, reachable
from kvrelay.supervisor import ChildSpec
from wire.config import EngineConfig


def planned(config: ClusterConfig, cores: int = 8, gpus: tuple[str, ...] = ()) -> list[ChildSpec]:
    """The plan on a machine with these cores and GPUs, and ports from 9000 on."""
    ports = tuple(range(9000, 9001 + config.prefill + config.decode))
    machine = Machine(cores, gpus, ports, {"HOME": "/home", "KVRELAY_API_KEY": "from outside"})
    return plan(config, machine, Path("/logs"), "node-secret")


def test_two_and_two_are_five_processes_that_know_each_other() -> None:
    specs = planned(ClusterConfig(EngineConfig("m"), prefill=2, decode=2))
    assert [spec.name for spec in specs] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "router"]
    assert specs[0].health_url == "http://127.0.0.1:9001/health"
    router = specs[-1].command
    assert "--prefill=http://127.0.0.1:9001" in router
    assert "--prefill=http://127.0.0.1:9002" in router
    assert "--decode=http://127.0.0.1:9004" in router
    assert "--port=9000" in router
    assert specs[2].command[5] == "decode"
    assert specs[2].log == Path("/logs/decode-0.log")


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(8, 0, (4, 8)), (2, 0, (1, 2)), (1, 0, (1, 1)), (8, 3, (3, 3))]
)
def test_cores_are_shared_out_among_the_engines(cores: int, given: int, threads: tuple[int, int]) -> None:
    """A prefill node has its share; a decode node may also use those of a prefill node that rests."""
    specs = planned(ClusterConfig(EngineConfig("m", threads=given)), cores=cores)[:2]
    for spec, count in zip(specs, threads, strict=True):
        assert f"--threads={count}" in spec.command
        assert spec.env["OMP_NUM_THREADS"] == str(count)
        assert spec.env["GOMP_SPINCOUNT"] == "3000"


def test_gpus_go_round_and_none_is_given_to_cpu_nodes() -> None:
    config = ClusterConfig(EngineConfig("m"), prefill=2, decode=1)
    assert [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in planned(config, gpus=("0", "3"))] == ["0", "3", "0", None]
    cpu = ClusterConfig(EngineConfig("m", device="cpu"))
    assert all("CUDA_VISIBLE_DEVICES" not in spec.env for spec in planned(cpu, gpus=("0",)))


def test_secrets_travel_in_the_environment_only() -> None:
    specs = planned(ClusterConfig(EngineConfig("m"), api_key="client-secret"))
    assert not [word for spec in specs for word in spec.command if "secret" in word]
    assert all(spec.env["KVRELAY_NODE_API_KEY"] == "node-secret" for spec in specs)
    assert [spec.env.get("KVRELAY_API_KEY") for spec in specs] == [None, None, "client-secret"]


def test_a_router_without_a_key_does_not_inherit_one() -> None:
    assert "KVRELAY_API_KEY" not in planned(ClusterConfig(EngineConfig("m")))[-1].env


def test_settings_of_the_nodes_are_passed_on() -> None:
    config = ClusterConfig(EngineConfig("m", max_model_len=77), served_model_name="smol", request_deadline_s=9.0)
    command = planned(config)[0].command
    assert {"--model=m", "--max-model-len=77", "--served-model-name=smol", "--request-deadline-s=9.0"} <= set(command)


def test_a_wildcard_address_is_reached_on_the_loopback() -> None:
    assert reachable("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert reachable("::", 1) == "http://[::1]:1"
    assert reachable("10.0.0.1", 1) == "http://10.0.0.1:1"
