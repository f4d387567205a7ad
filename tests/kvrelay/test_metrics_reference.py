"""The reference of metrics: all of them, whole, and vLLM's names among those of nodes."""

from __future__ import annotations

from scripts.reference.metric_families import metrics_reference

# What vLLM's dashboards, the Gateway API's endpoint picker, llm-d and production-stack read of a
# node.
VLLM = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "cpu_cache_usage_perc",
    "cache_config_info",
    "lora_requests_info",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "nixl_bytes_transferred",
    "nixl_num_failed_transfers_total",
    "nixl_num_kv_expired_reqs_total",
]


def test_every_metric_says_what_it_is() -> None:
    facts = metrics_reference()
    assert len({fact.name for fact in facts}) == len(facts) > 100
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
