"""Config types: what they refuse, and that a refusal names the value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.wire.config import (
    EngineConfig,
    NodeConfig,
    RanksConfig,
    SpeculativeConfig,
    TransferConfig,
)
from kvrelay.wire.config_checks import is_loopback
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"gpu_memory_utilization": 0.0},
            "gpu_memory_utilization must be above 0.0, got 0",
        ),
        (
            {"gpu_memory_utilization": 90.0},
            "gpu_memory_utilization must be at most 1.0, got 90",
        ),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes must be at least 0, got -1"),
        ({"kv_cache_dtype": "fp16"}, "kv_cache_dtype 'fp16' is not one of auto, fp8"),
        ({"quantization": "int4"}, "quantization 'int4' is not one of empty, fp8"),
        (
            {"override_generation_config": {"temperature": "x"}},
            "override_generation_config: temperature is of a wrong type",
        ),
        (
            {"override_generation_config": {"top_p": 1.5}},
            "override_generation_config: top_p must be at most 1.0",
        ),
        ({"block_size": 128}, "block_size 128 is not one of 0, 16, 32, 64"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_size_local": 3},
            "tensor_parallel_size_local must be between 0 and",
        ),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_size_local": 1},
            "ranks on other hosts need tensor_parallel_address",
        ),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_address": "10.0.0.1"},
            "must be host:port, got '10.0.0.1'",
        ),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_address": "host:0"},
            "must be host:port, got 'host:0'",
        ),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_address": "tcp://host:1"},
            "must be host:port",
        ),
    ],
)
def test_an_engine_refuses(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig("m", **given)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"num_speculative_tokens": 33},
            "num_speculative_tokens of speculative_config must be at most 32, got 33",
        ),
        ({"num_speculative_tokens": 0}, "must be at least 1, got 0; leave the config out for none"),
        (
            {"num_speculative_tokens": 2, "method": "eagle"},
            "method 'eagle' of speculative_config is not one of ngram",
        ),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_min": 5},
            "prompt_lookup_min 5 of speculative_config is above prompt_lookup_max 4",
        ),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 0}, "must be at least 1, got 0"),
    ],
)
def test_proposals_that_cannot_be_made_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**given)
    assert said in caught.value.message


def test_a_token_is_not_shown() -> None:
    transfer = TransferConfig(cluster_secret="the cluster's secret")
    assert "the" not in repr(NodeConfig(EngineConfig("m", hf_token="the token"), transfer=transfer))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"cluster_secret": "fifteen letters"},
            "cluster_secret must have at least 16 characters, got 15; draw one",
        ),
        (
            {"kv_host": "10.0.0.1"},
            "without cluster_secret kv_host must be a loopback address, got '10.0.0.1'; set the",
        ),
        ({"kv_host": "node-1"}, "set the same KVRELAY_CLUSTER_SECRET on all nodes"),
        ({"kv_host": "0.0.0.0"}, "must be a loopback address"),
        (
            {"kv_port": 70000, "cluster_secret": "sixteen letters!"},
            "kv_port must be at most 65535, got 70000",
        ),
    ],
)
def test_a_hand_over_refuses_and_never_names_the_secret(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferConfig(**given)
    assert said in caught.value.message
    assert "letters" not in caught.value.message


def test_a_secret_opens_every_address_and_none_is_needed_on_the_loopback() -> None:
    assert (
        TransferConfig(kv_host="10.0.0.1", cluster_secret="sixteen letters!").kv_host == "10.0.0.1"
    )
    for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1"):
        assert TransferConfig(kv_host=host).cluster_secret == ""
    assert not any(map(is_loopback, ("", "::", "10.0.0.1", "127.0.0.1.example.org", "2130706433")))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel_size": 4}, "name rank 0's host:port with tensor_parallel_address"),
        (
            {"tensor_parallel_size": 4, "tensor_parallel_address": "h:1"},
            "say with tensor_parallel_size_local how many",
        ),
        (
            {
                "tensor_parallel_size": 4,
                "tensor_parallel_address": "h:1",
                "tensor_parallel_size_local": 2,
                "machine": 2,
            },
            "machine 2 begins with rank 4, and its 2 ranks must be among 1 to 3",
        ),
    ],
)
def test_ranks_elsewhere_must_know_their_place(given: dict[str, Any], said: str) -> None:
    place = {"machine": given.pop("machine")} if "machine" in given else {}
    with pytest.raises(ConfigError) as caught:
        RanksConfig(EngineConfig("m", **given), **place)
    assert said in caught.value.message


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match="decode_policy 'fastest' is not one of least_queue, prefix, price"
    ):
        RouterConfig(decode_policy="fastest")
