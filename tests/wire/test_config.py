"""Config types: what they refuse, and that a refusal names the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvrelay.wire.config import (
    CacheConfig,
    EngineConfig,
    NodeConfig,
    RanksConfig,
    SpeculativeConfig,
    TransferConfig,
)
from kvrelay.wire.config_checks import is_loopback
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.router_config import RouterConfig

engine, store = partial(EngineConfig, "m"), partial(CacheConfig, kv_host_memory=1 << 20)
node = partial(NodeConfig, engine())


def ranks(**given: Any) -> RanksConfig:
    return RanksConfig(EngineConfig("m", tensor_parallel_size=4, **given), machine=2)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (
            engine,
            {"gpu_memory_utilization": 0.0},
            "gpu_memory_utilization must be above 0.0, got 0",
        ),
        (
            engine,
            {"gpu_memory_utilization": 90.0},
            "gpu_memory_utilization must be at most 1.0, got 90",
        ),
        (engine, {"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes must be at least 0, got -1"),
        (engine, {"kv_cache_dtype": "fp16"}, "kv_cache_dtype 'fp16' is not one of auto, fp8"),
        (engine, {"quantization": "int4"}, "quantization 'int4' is not one of empty, fp8"),
        (
            engine,
            {"override_generation_config": {"temperature": "x"}},
            "override_generation_config: temperature is of a wrong type",
        ),
        (
            engine,
            {"override_generation_config": {"top_p": 1.5}},
            "override_generation_config: top_p must be at most 1.0",
        ),
        (engine, {"block_size": 128}, "block_size 128 is not one of 0, 16, 32, 64"),
        (engine, {"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        (
            engine,
            {"tensor_parallel_size": 2, "tensor_parallel_size_local": 3},
            "tensor_parallel_size_local must be between 0 and",
        ),
        (
            engine,
            {"tensor_parallel_size": 2, "tensor_parallel_size_local": 1},
            "ranks on other hosts need tensor_parallel_address",
        ),
        (
            engine,
            {"tensor_parallel_size": 2, "tensor_parallel_address": "10.0.0.1"},
            "must be host:port, got '10.0.0.1'",
        ),
        (
            engine,
            {"tensor_parallel_size": 2, "tensor_parallel_address": "host:0"},
            "must be host:port, got 'host:0'",
        ),
        (
            engine,
            {"tensor_parallel_size": 2, "tensor_parallel_address": "tcp://host:1"},
            "must be host:port",
        ),
        (
            SpeculativeConfig,
            {"num_speculative_tokens": 33},
            "num_speculative_tokens of speculative_config must be at most 32, got 33",
        ),
        (
            SpeculativeConfig,
            {"num_speculative_tokens": 0},
            "must be at least 1, got 0; leave the config out for none",
        ),
        (
            SpeculativeConfig,
            {"num_speculative_tokens": 2, "method": "eagle"},
            "method 'eagle' of speculative_config is not one of ngram",
        ),
        (
            SpeculativeConfig,
            {"num_speculative_tokens": 2, "prompt_lookup_min": 5},
            "prompt_lookup_min 5 of speculative_config is above prompt_lookup_max 4",
        ),
        (
            SpeculativeConfig,
            {"num_speculative_tokens": 2, "prompt_lookup_min": 0},
            "must be at least 1, got 0",
        ),
        (
            TransferConfig,
            {"cluster_secret": "fifteen letters"},
            "cluster_secret must have at least 16 characters, got 15; generate one",
        ),
        (
            TransferConfig,
            {"kv_host": "10.0.0.1"},
            "without cluster_secret kv_host must be a loopback address, got '10.0.0.1'; set the",
        ),
        (TransferConfig, {"kv_host": "node-1"}, "set the same KVRELAY_CLUSTER_SECRET on all nodes"),
        (TransferConfig, {"kv_host": "0.0.0.0"}, "must be a loopback address"),
        (
            TransferConfig,
            {"kv_port": 70000, "cluster_secret": "sixteen letters!"},
            "kv_port must be at most 65535, got 70000",
        ),
        (TransferConfig, {"kv_checksums": float("nan")}, "must be at least 0.0, got nan"),
        (TransferConfig, {"kv_checksums": 1.1}, "kv_checksums must be at most 1.0, got 1.1"),
        (engine, {"enable_lora": True, "lora_modules": ("a",)}, "name=path"),
        (
            engine,
            {"enable_lora": True, "lora_modules": ('{"name": "a"}',)},
            "JSON with name and path",
        ),
        (engine, {"enable_lora": True, "lora_modules": ("a=x", "a=y")}, "names a twice"),
        (
            engine,
            {"enable_lora": True, "lora_modules": ("a=x", "b=y"), "max_loras": 1},
            "2 adapters and max_loras is 1",
        ),
        (engine, {"max_lora_rank": 1000}, "at most 512"),
        (engine, {"lora_modules": ("a=x",)}, "needs enable_lora"),
        (engine, {"allow_runtime_lora": True}, "needs enable_lora"),
        (engine, {"enable_lora": True, "max_loras": -1}, "be at least 0"),
        (
            store,
            {"kv_store": "gs://bucket/x"},
            "must be a folder or s3://BUCKET/PREFIX, got 'gs://bucket/x'",
        ),
        (store, {"kv_store": "s3:///x"}, "must be a folder or s3://BUCKET/PREFIX"),
        (
            store,
            {"kv_store": "s3://bucket", "kv_store_size": 9},
            "leave it out for a bucket, whose lifecycle rules delete what is old",
        ),
        (
            store,
            {"kv_store": "/folder"},
            "kv_store_size is 0 with kv_store '/folder': a folder needs it",
        ),
        (store, {"kv_store_size": 9}, "kv_store_size is 9 with kv_store ''"),
        (store, {"kv_store": "s3://bucket", "kv_host_memory": 0}, "kv_store needs kv_host_memory"),
        (ranks, {}, "name rank 0's host:port with tensor_parallel_address"),
        (ranks, {"tensor_parallel_address": "h:1"}, "set tensor_parallel_size_local to the number"),
        (
            ranks,
            {"tensor_parallel_address": "h:1", "tensor_parallel_size_local": 2},
            "machine 2 begins with rank 4, and its 2 ranks must be among 1 to 3",
        ),
        (
            RouterConfig,
            {"decode_policy": "fastest"},
            "decode_policy 'fastest' is not one of least_queue, prefix, price",
        ),
        (RouterConfig, {"least_prefill": -1}, "least_prefill must be at least 0, got -1"),
        (RouterConfig, {"least_decode": 0}, "least_decode must be at least 1, got 0"),
        (RouterConfig, {"kubernetes_namespace": "serving"}, "kubernetes_selector"),
        (
            RouterConfig,
            {"kubernetes_selector": "app=kvrelay", "kubernetes_namespace": "../nodes"},
            "namespace",
        ),
        (RouterConfig, {"node_ssl_keyfile": "k"}, "node_ssl_keyfile needs node_ssl_certfile"),
        (node, {"ssl_certfile": "c", "ssl_ca_certs": "a"}, "ssl_ca_certs is for clients"),
    ],
)
def test_what_cannot_work_is_refused_and_no_secret_is_named(
    kind: Callable[..., object], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**given)
    assert said in caught.value.message
    assert "letters" not in caught.value.message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"root_path": "llm"}, "root_path must begin with /"),
        ({"root_path": "/llm/"}, "root_path must begin with /"),
        ({"root_path": "/"}, "root_path must begin with /"),
        ({"allowed_origins": ("chat.example",)}, "allowed_origins must be"),
        ({"allowed_origins": ("https://chat.example/",)}, "without a path"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "name the origins"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile needs ssl_certfile"),
        (
            {"ssl_cert_reqs": 3, "ssl_certfile": "c", "ssl_ca_certs": "a"},
            "ssl_cert_reqs 3 is not one of 0, 1, 2",
        ),
        ({"ssl_cert_reqs": 2, "ssl_ca_certs": "a"}, "ssl_cert_reqs 2 needs ssl_certfile"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "c"}, "ssl_cert_reqs 2 needs .* ssl_ca_certs"),
    ],
)
def test_what_neither_a_router_nor_a_node_can_have_is_refused(
    given: dict[str, Any], said: str
) -> None:
    for kind in (RouterConfig, node):
        with pytest.raises(ConfigError, match=said):
            kind(**given)


def test_a_token_is_not_shown() -> None:
    transfer = TransferConfig(cluster_secret="the cluster's secret")
    assert "the" not in repr(NodeConfig(EngineConfig("m", hf_token="the token"), transfer=transfer))


def test_a_secret_opens_every_address_and_none_is_needed_on_the_loopback() -> None:
    assert (
        TransferConfig(kv_host="10.0.0.1", cluster_secret="sixteen letters!").kv_host == "10.0.0.1"
    )
    for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1"):
        assert TransferConfig(kv_host=host).cluster_secret == ""
    assert not any(map(is_loopback, ("", "::", "10.0.0.1", "127.0.0.1.example.org", "2130706433")))
