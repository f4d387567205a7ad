"""A node's metrics: what of a request is counted where, and in which role."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.node.metrics import NodeMetrics
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import EngineReady, EngineStats, Timing, TransferStats
from kvrelay.wire.outputs import Finish, Load

INFO = EngineReady("e", "g", "tiny", 320, 1000, 16, 101, 64, [1], 1.0)
P, D = Role.PREFILL, Role.DECODE


def metrics(stats: Any = None, role: Role = D) -> NodeMetrics:
    return NodeMetrics(stats or (lambda: EngineStats(Load())), role, INFO, "tiny", os.getpid)


def samples(ours: NodeMetrics) -> list[Any]:
    families = text_string_to_metric_families(ours.text().decode())
    return [sample for family in families for sample in family.samples]


def values(ours: NodeMetrics) -> dict[str, float]:
    """Sums over all labels but those that tell buckets, reasons and causes apart."""
    found: dict[str, float] = {}
    for sample in samples(ours):
        apart = (sample.labels.get(name) for name in ("le", "finished_reason", "cause"))
        name = " ".join([sample.name, *filter(None, apart)])
        found[name] = found.get(name, 0.0) + sample.value
    return found


def by_role(ours: NodeMetrics, name: str) -> dict[str, float]:
    return {each.labels["role"]: each.value for each in samples(ours) if each.name == name}


def test_a_request_that_fetched_its_kv() -> None:
    ours = metrics()
    ours.observe("vllm:request_prompt_tokens", 200)
    timing = Timing(
        transfer_s=0.03,
        transfer_bytes=192 * 64,
        exposed_s=0.001,
        decode_queue_s=0.002,
        decode_s=0.2,
    )
    ours.count_end(Finish.LENGTH, 0.3, 11, timing, 0.05, not_fetched=False)
    found = values(ours)
    expected = {
        "vllm:request_prompt_tokens_sum": 200,
        "vllm:request_generation_tokens_sum": 11,
        "kvrelay_transfer_seconds_sum": 0.03,
        "vllm:time_to_first_token_seconds_sum": 0.05,
        "vllm:request_success_total length": 1,
        "vllm:request_success_total stop": 0,
    }
    assert {name: found[name] for name in expected} == expected


def test_what_the_engine_reports() -> None:
    load = Load(running=2, waiting=1, free_blocks=25, total_blocks=100)
    stats = [EngineStats(load, prompt_tokens=7, cached_prompt_tokens=2)]
    ours = metrics(lambda: stats[-1])
    assert values(ours)["vllm:prefix_cache_queries_total"] == 9
    stats.append(
        EngineStats(
            load,
            prompt_tokens=9,
            cached_prompt_tokens=2,
            transfers=TransferStats(failures={"PeerLost": 2}),
        )
    )
    found = values(ours)
    expected = {
        "vllm:num_requests_running": 2,
        "vllm:kv_cache_usage_perc": 0.75,
        "vllm:prompt_tokens_total": 9,
        "kvrelay_fetches_failed_total PeerLost": 2,
        "kvrelay_fetches_failed_total LeaseLost": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["process_resident_memory_bytes"] > 1e6
    assert found["kvrelay_engine_process_resident_memory_bytes"] > 1e6


def test_counts_belong_to_the_role_in_which_they_were_counted_and_gauges_to_the_newest() -> None:
    stats = [EngineStats(Load(running=1, total_blocks=10, free_blocks=5), prompt_tokens=100)]
    ours = metrics(lambda: stats[-1], P)
    assert by_role(ours, "kvrelay_node_role") == {"prefill": 1, "decode": 0}
    ours.count_end(Finish.STOP, 2.0, 3, None, not_fetched=False)
    ours.count("kvrelay_node_flips", "done")
    ours.set_role(D)
    assert by_role(ours, "kvrelay_node_role") == {"prefill": 0, "decode": 1}
    assert by_role(ours, "vllm:num_requests_running") == {"decode": 1}
    assert by_role(ours, "vllm:prompt_tokens_total") == {"prefill": 100, "decode": 0}
    stats.append(msgspec.structs.replace(stats[0], prompt_tokens=130))
    ours.count_end(Finish.STOP, 4.0, 3, None, not_fetched=False)
    for _ in range(2):
        assert by_role(ours, "vllm:prompt_tokens_total") == {"prefill": 100, "decode": 30}
        seconds = by_role(ours, "vllm:e2e_request_latency_seconds_sum")
        assert seconds == {"prefill": 2, "decode": 4}
        ours.set_role(P)
        ours.set_role(D)
    ours.set_role(P)
    stats.append(msgspec.structs.replace(stats[0], prompt_tokens=135))
    assert by_role(ours, "vllm:prompt_tokens_total") == {"prefill": 105, "decode": 30}
    lines = [line for line in ours.text().decode().splitlines() if not line.startswith("#")]
    assert len({line.rsplit(" ", 1)[0] for line in lines}) == len(lines)
