"""A node's metrics: what of a leg is counted where."""

from __future__ import annotations

import os

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.node.metrics import NodeMetrics
from kvrelay.wire.config import EngineConfig, NodeConfig, Role, SpeculativeConfig
from kvrelay.wire.engine_messages import STEP_TOKENS, EngineReady, EngineStats, Timing
from kvrelay.wire.outputs import Finish, Load

INFO = EngineReady("e", "g", "tiny", 320, 1000, 16, 101, 64, [1], "", 0, 1.0)


def metrics(stats: EngineStats | None = None, role: Role = Role.DECODE) -> NodeMetrics:
    config = NodeConfig(EngineConfig("tiny", speculative_config=SpeculativeConfig(2)), role)
    return NodeMetrics(lambda: stats or EngineStats(Load()), config, INFO, "tiny", os.getpid)


def values(of: NodeMetrics) -> dict[str, float]:
    """Sums over all labels but those that tell buckets, reasons and places apart."""
    told: dict[str, float] = {}
    for family in text_string_to_metric_families(of.text().decode()):
        for sample in family.samples:
            apart = [
                sample.labels[name]
                for name in ("le", "finished_reason", "position")
                if name in sample.labels
            ]
            name = " ".join([sample.name, *apart])
            told[name] = told.get(name, 0.0) + sample.value
    return told


def test_a_leg_that_fetched_its_kv() -> None:
    ours = metrics()
    ours.count_submit(200, 12, 1, fetches=True)
    ours.observe_first_token(0.05)
    ours.observe_next_tokens(0.02)
    timing = Timing(
        transfer_s=0.03,
        transfer_bytes=192 * 64,
        exposed_s=0.001,
        decode_queue_s=0.002,
        decode_s=0.2,
    )
    ours.count_end(Finish.LENGTH, 0.3, 11, timing, not_fetched=False)
    told = values(ours)
    assert told["vllm:request_prompt_tokens_sum"] == 200
    assert told["vllm:request_generation_tokens_sum"] == 11
    assert (
        told["vllm:request_params_max_tokens_sum"]
        == told["vllm:request_max_num_generation_tokens_sum"]
        == 12
    )
    assert told["vllm:external_prefix_cache_queries_total"] == 200
    assert told["vllm:external_prefix_cache_hits_total"] == 192
    assert told["vllm:nixl_bytes_transferred_sum"] == 192 * 64
    assert told["vllm:nixl_xfer_time_seconds_sum"] == told["kvrelay_transfer_seconds_sum"] == 0.03
    assert (
        told["vllm:time_per_output_token_seconds_sum"]
        == told["vllm:inter_token_latency_seconds_sum"]
        == 0.02
    )
    assert told["vllm:request_time_per_output_token_seconds_sum"] == 0.02
    assert told["vllm:request_success_total length"] == 1
    assert told["vllm:request_success_total stop"] == 0


def test_what_the_engine_reports() -> None:
    sizes = [0] * (len(STEP_TOKENS) + 1)
    sizes[0], sizes[2], sizes[-1] = 3, 4, 1
    load = Load(running=2, waiting=1, free_blocks=25, total_blocks=100)
    told = values(
        metrics(
            EngineStats(
                load, step_sizes=sizes, step_tokens=99, accepted_at=[5, 2], accepted_tokens=7
            )
        )
    )
    assert told["vllm:num_requests_running"] == 2
    assert told["vllm:kv_cache_usage_perc"] == told["vllm:gpu_cache_usage_perc"] == 0.75
    assert told["vllm:iteration_tokens_total_bucket 1.0"] == 3
    assert told["vllm:iteration_tokens_total_bucket 16.0"] == 7
    assert (told["vllm:iteration_tokens_total_count"], told["vllm:iteration_tokens_total_sum"]) == (
        8,
        99,
    )
    assert told["vllm:spec_decode_num_accepted_tokens_per_pos_total 0"] == 5
    assert told["vllm:cache_config_info"] == 1
    assert told["process_resident_memory_bytes"] > 1e6
    assert told["kvrelay_engine_process_resident_memory_bytes"] > 1e6


def test_buckets_of_lengths_end_at_the_longest() -> None:
    told = values(metrics())
    bounds = [
        name.split()[1] for name in told if name.startswith("vllm:request_prompt_tokens_bucket ")
    ]
    assert bounds == [
        "1.0",
        "2.0",
        "5.0",
        "10.0",
        "20.0",
        "50.0",
        "100.0",
        "200.0",
        "500.0",
        "1000.0",
        "+Inf",
    ]
