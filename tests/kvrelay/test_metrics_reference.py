"""The reference of metrics: all of them, whole, and vLLM's names among those of nodes."""

from __future__ import annotations

from scripts.reference.metric_families import metrics_reference

# What vLLM's dashboards read of a node.
VLLM = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
]


def test_every_metric_says_what_it_is() -> None:
    facts = metrics_reference()
    assert len({fact.name for fact in facts}) == len(facts) > 80
    for fact in facts:
        assert fact.about, fact.name
        assert fact.kind in ("counter", "gauge", "histogram"), fact.name
        assert fact.kind != "gauge" or not fact.name.endswith("_total"), fact.name
        assert fact.where in (("router",), ("node",), ("router", "node")), fact.name
        assert fact.name.startswith(("vllm:", "kvrelay_", "process_")), fact.name
        assert fact.name.startswith("kvrelay_router_") <= (fact.where == ("router",)), fact.name


def test_nodes_have_the_names_that_are_scraped_of_vllm() -> None:
    facts = {fact.name: fact for fact in metrics_reference()}
    for name in VLLM:
        assert facts[f"vllm:{name}"].where == ("node",)
        assert {"model_name", "role"} <= set(facts[f"vllm:{name}"].labels)
