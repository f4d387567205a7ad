"""The plan of a local cluster: flags, ports, threads, GPUs and secrets of each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster_plan import (
    ClusterConfig,
    Machine,
    plan,
    reachable,
    waves,
)
from kvrelay.settings import build
from kvrelay.supervisor import ChildSpec
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig


def cluster(**settings: Any) -> ClusterConfig:
    return build(ClusterConfig, {"model": "m"} | settings)


def planned(cores: int = 8, gpus: tuple[str, ...] = (), **settings: Any) -> list[ChildSpec]:
    """The plan on a machine with these cores and GPUs, and ports from 9000 on."""
    config = cluster(**settings)
    ports = tuple(range(9000, 9001 + config.prefill + config.decode))
    secrets = ("API_KEY", "ADMIN_KEY", "NODE_API_KEY", "CLUSTER_SECRET")
    outside = {"HOME": "/home"} | {f"KVRELAY_{name}": "from outside" for name in secrets}
    return plan(config, Machine(cores, gpus, ports, outside), Path("/logs"))


def shares(gpus: tuple[str, ...], **settings: Any) -> list[str | None]:
    """What each node is told of its share of a GPU's memory."""
    flag = "--gpu-memory-utilization="
    return [
        next((word.removeprefix(flag) for word in spec.command if word.startswith(flag)), None)
        for spec in planned(gpus=gpus, **settings)[:-1]
    ]


def test_two_and_two_are_five_processes_that_know_each_other() -> None:
    specs = planned(prefill=2, decode=2)
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "router"]
    assert [spec.name for spec in specs] == names
    assert specs[0].health_url == "http://127.0.0.1:9001/health"
    assert specs[2].command[5] == "decode"
    assert specs[2].log == Path("/logs/decode-0.log")
    ports = {"--prefill=http://127.0.0.1:9001", "--prefill=http://127.0.0.1:9002"}
    assert {"--decode=http://127.0.0.1:9004", "--port=9000", *ports} <= set(specs[-1].command)
    for spec in specs[:4]:
        assert not [word for word in spec.command if "host" in word and "127.0.0.1" not in word]


def test_settings_go_to_those_who_have_them() -> None:
    *nodes, router = planned(
        max_model_len=77,
        served_model_name="smol",
        tool_call_parser="hermes",
        host="0.0.0.0",
        tpot_target_ms=50.0,
        alias=("a=smol",),
        root_path="/llm",
        otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces",
        request_deadline_s=9.0,
    )
    both = {
        "--request-deadline-s=9.0",
        "--otlp-traces-endpoint=http://127.0.0.1:4318/v1/traces",
    }
    of_nodes = {"--max-model-len=77", "--served-model-name=smol", "--tool-call-parser=hermes"}
    of_router = {"--host=0.0.0.0", "--tpot-target-ms=50.0", "--alias=a=smol", "--root-path=/llm"}
    for node in nodes:
        assert both | of_nodes <= set(node.command)
        assert not of_router & set(node.command)
    assert both | of_router <= set(router.command)
    assert not of_nodes & set(router.command)


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(8, 0, 4), (2, 0, 1), (1, 0, 1), (8, 3, 3)]
)
def test_cores_are_shared_out_among_the_engines(cores: int, given: int, threads: int) -> None:
    for spec in planned(cores, threads=given)[:2]:
        assert f"--threads={threads}" in spec.command
        assert spec.env["OMP_NUM_THREADS"] == str(threads)
        assert spec.env["GOMP_SPINCOUNT"] == "3000"


def test_tensor_parallel_nodes_get_as_many_gpus_as_they_have_ranks() -> None:
    def visible(gpus: tuple[str, ...], **settings: int) -> list[str]:
        return [spec.env["CUDA_VISIBLE_DEVICES"] for spec in planned(gpus=gpus, **settings)[:-1]]

    gpus = ("0", "2", "5", "6", "7")
    assert visible(gpus, tensor_parallel_size=2, prefill=2) == ["0,2", "5,6", "0,2"]
    assert visible(gpus, tensor_parallel_size=5) == ["0,2,5,6,7"] * 2
    with pytest.raises(ConfigError, match="4 needs 4 GPUs for each node, and this machine shows 2"):
        visible(("0", "1"), decode_tensor_parallel_size=4)


def test_nodes_on_one_gpu_share_its_memory_unless_a_share_was_typed() -> None:
    assert shares(("0",), prefill=2) == ["0.3", "0.3", "0.3"]
    assert shares(("0", "1"), prefill=2) == ["0.45", None, "0.45"]
    assert shares(("0", "1", "2"), prefill=2) == [None, None, None]
    assert shares(("0",), gpu_memory_utilization=0.4) == ["0.4", "0.4"]


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        (("0", "1"), [["prefill-0", "prefill-1"], ["decode-0"]]),
        (("0",), [["prefill-0"], ["prefill-1"], ["decode-0"]]),
        ((), [["prefill-0", "prefill-1", "decode-0"]]),
    ],
)
def test_nodes_on_one_gpu_start_one_after_the_other(
    gpus: tuple[str, ...], names: list[list[str]]
) -> None:
    nodes = planned(gpus=gpus, prefill=2)[:-1]
    found = [[node.name for node in wave] for wave in waves(nodes, Machine(8, gpus, (), {}))]
    assert found == names


def test_secrets_travel_in_the_environment_only_and_to_those_who_need_them() -> None:
    given = {"api_key": "client-secret", "admin_key": "admin-secret", "node_api_key": "node-secret"}
    specs = planned(hf_token="hub-secret", cluster_secret="a cluster-secret", **given)
    assert not [word for spec in specs for word in spec.command if "secret" in word]
    assert "secret" not in repr(specs)

    def told(name: str) -> list[str | None]:
        return [spec.env.get(f"KVRELAY_{name}") for spec in specs]

    assert told("NODE_API_KEY") == ["node-secret"] * 3
    assert told("API_KEY") == [None, None, "client-secret"]
    assert told("ADMIN_KEY") == [None, None, "admin-secret"]
    assert told("CLUSTER_SECRET") == ["a cluster-secret", "a cluster-secret", None]


def test_no_secret_is_inherited() -> None:
    assert "from outside" not in {value for spec in planned() for value in spec.env.values()}


def test_a_wildcard_address_is_reached_on_the_loopback() -> None:
    def url(host: str, **more: str) -> str:
        return reachable(RouterConfig(host=host, port=1, **more))  # type: ignore[arg-type]

    assert url("0.0.0.0") == "http://127.0.0.1:1"
    assert url("::") == "http://[::1]:1"
    assert url("10.0.0.1", ssl_certfile="cert.pem") == "https://10.0.0.1:1"
