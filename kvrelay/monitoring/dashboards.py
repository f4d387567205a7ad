"""The dashboards: the cluster at a glance, the hand-over from prefill to decode, and what clients were promised."""

from __future__ import annotations

from kvrelay.monitoring.panels import Dashboard, Panel, Query, Row, mean, quantiles, rate, ratio, share_within
from kvrelay.monitoring.targets import AVAILABLE, FIRST_TOKEN_S, IN_TIME, NEXT_TOKEN_S

__all__ = ["DASHBOARDS"]

# Each router sees all nodes, so the largest of what they say and not the sum.
_UP = "max by (node, role, model_name) (kvrelay_router_node_up)"
_ALL = rate("kvrelay_router_requests_total")
_BROKEN = rate('kvrelay_router_requests_total{status=~"5.."}')

_TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests by status",
            (Query(rate("kvrelay_router_requests_total", "status"), "{{status}}"),),
            "reqps",
            "Finished requests; 499: the client went away.",
            stacked=True,
        ),
        Panel(
            "Requests by model",
            (Query(rate("kvrelay_router_requests_total", "model_name"), "{{model_name}}"),),
            "reqps",
            "No name: refused before it was known.",
            stacked=True,
        ),
        Panel(
            "Requests under way",
            (
                Query("sum(kvrelay_router_requests_running)", "answered"),
                Query("sum(kvrelay_router_queue_waiting)", "waiting to begin"),
                Query("sum(kvrelay_router_waiting_for_room)", "waiting for KV room"),
            ),
        ),
        Panel(
            "Tokens",
            (
                Query(rate("vllm:prompt_tokens_total", "role"), "prompt, {{role}}"),
                Query(rate("vllm:generation_tokens_total", "role"), "generated, {{role}}"),
            ),
            "cps",
            "Tokens per second, where they were computed.",
        ),
        Panel(
            "Tokens of answers, by model",
            (Query(rate("kvrelay_router_output_tokens_total", "model_name"), "{{model_name}}"),),
            "cps",
            "Counted every second, while they come.",
            stacked=True,
        ),
        Panel(
            "Where prompts are computed",
            (
                Query(rate("kvrelay_router_disaggregated_total"), "prefill node"),
                Query(rate("kvrelay_router_local_prefills_total", "reason"), "decode node: {{reason}}"),
            ),
            "reqps",
            "A cluster that has stopped disaggregating is seen here.",
        ),
    ),
)
_NODES = Row(
    "Nodes",
    (
        Panel("Nodes up", (Query(f"sum by (role, model_name) ({_UP})", "{{role}} {{model_name}}"),)),
        Panel(
            "Roles of nodes",
            (Query("sum by (role) (kvrelay_node_role)", "{{role}}"),),
            about="As they are now. A step is a node that has changed its role.",
        ),
        Panel(
            "Depth that the router's choice sees",
            (Query("max by (node, role) (kvrelay_router_queue_depth)", "{{role}} {{node}}"),),
        ),
        Panel(
            "Requests in engines",
            (
                Query("sum by (role, instance) (vllm:num_requests_running)", "{{role}} {{instance}} running"),
                Query("sum by (role, instance) (vllm:num_requests_waiting)", "{{role}} {{instance}} waiting"),
            ),
        ),
        Panel(
            "KV in use",
            (Query("max by (role, instance) (vllm:kv_cache_usage_perc)", "{{role}} {{instance}}"),),
            "percentunit",
            limit=0.95,
        ),
        Panel(
            "Breakers",
            (Query("max by (node, leg) (kvrelay_router_breaker_state)", "{{leg}} {{node}}"),),
            about="0 takes legs, 1 is tried, 2 takes none.",
        ),
        Panel(
            "Legs that went on elsewhere",
            (
                Query(rate("kvrelay_failovers_total", "leg"), "{{leg}} broke"),
                Query(rate("kvrelay_router_full_nodes_total", "leg"), "{{leg}} node was full"),
                Query(rate("kvrelay_router_retries_refused_total"), "not tried again: too many are"),
            ),
            "reqps",
        ),
    ),
)
_ENGINES = Row(
    "Engines",
    (
        Panel(
            "Time of a step",
            (
                Query(
                    ratio("kvrelay_engine_step_seconds_total", "kvrelay_engine_steps_total", "role", "instance"),
                    "{{role}} {{instance}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Tokens of a step",
            (Query(mean("vllm:iteration_tokens_total", "role", "instance"), "{{role}} {{instance}}"),),
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            (
                Query(
                    ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "role"),
                    "{{role}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Preemptions",
            (Query(rate("vllm:num_preemptions_total", "role", "instance"), "{{role}} {{instance}}"),),
            "cps",
        ),
        Panel(
            "Proposed tokens that came true",
            (
                Query(
                    ratio("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
                    "share",
                ),
            ),
            "percentunit",
            "Nothing without --speculative-config.",
        ),
    ),
)
_PROCESSES = Row(
    "Processes",
    (
        Panel(
            "CPU",
            (
                Query(rate("process_cpu_seconds_total", "job", "instance"), "{{job}} {{instance}}"),
                Query(rate("kvrelay_engine_process_cpu_seconds_total", "job", "instance"), "{{instance}} engine"),
            ),
            "percentunit",
            "1 is one core.",
        ),
        Panel(
            "Memory",
            (
                Query("sum by (job, instance) (process_resident_memory_bytes)", "{{job}} {{instance}}"),
                Query("sum by (instance) (kvrelay_engine_process_resident_memory_bytes)", "{{instance}} engine"),
            ),
            "bytes",
        ),
        Panel(
            "Processes of routers that were replaced",
            (
                Query(rate("kvrelay_router_worker_restarts_total", "instance"), "{{instance}}"),
                Query(rate("kvrelay_router_worker_hung_total", "instance"), "{{instance}}, did not answer"),
            ),
            "cps",
            "Nothing without --workers.",
        ),
        Panel(
            "Open files and connections",
            (Query("sum by (job, instance) (process_open_fds)", "{{job}} {{instance}}"),),
        ),
    ),
)

_MOVED = Row(
    "KV on its way",
    (
        Panel(
            "KV fetched",
            (Query(rate("kvrelay_fetched_bytes_total", "instance"), "{{instance}}"),),
            "Bps",
        ),
        Panel(
            "Speed of a fetch",
            (
                Query(
                    ratio("kvrelay_fetched_bytes_total", "kvrelay_fetch_seconds_total", "instance"),
                    "{{instance}}",
                ),
            ),
            "Bps",
            "Bytes per second in which KV was waited for, prompts computed.",
        ),
        Panel(
            "Time of a transfer", quantiles("kvrelay_transfer_seconds"), "s", "Beside the prefill for the most part."
        ),
        Panel(
            "Exposed part of a transfer",
            quantiles("kvrelay_transfer_exposed_seconds"),
            "s",
            "What a client waits for: after the prompt was computed.",
        ),
        Panel(
            "News of the KV",
            quantiles("kvrelay_router_stage_seconds", where='stage="announce"'),
            "s",
            "From token 1 at the router until the decode node knows that the KV is complete.",
        ),
        Panel("Wait on the decode node", quantiles("kvrelay_decode_queue_seconds"), "s"),
        Panel("First decode step", quantiles("kvrelay_first_step_seconds"), "s"),
    ),
)
_LEASES = Row(
    "Leases and blocks",
    (
        Panel(
            "Leases",
            (
                Query(rate("kvrelay_leases_granted_total"), "granted"),
                Query(rate("kvrelay_leases_released_total"), "released"),
                Query(rate("kvrelay_leases_expired_total"), "expired: nobody fetched it"),
            ),
            "cps",
        ),
        Panel(
            "Blocks kept for others",
            (
                Query("sum by (role, instance) (kvrelay_blocks_held)", "{{role}} {{instance}} held"),
                Query("sum by (role, instance) (kvrelay_blocks_quarantined)", "{{role}} {{instance}} quarantined"),
            ),
        ),
        Panel(
            "Free blocks",
            (
                Query(
                    "sum by (role, instance) (kvrelay_blocks_free) / sum by (role, instance) (kvrelay_blocks)",
                    "{{role}} {{instance}}",
                ),
            ),
            "percentunit",
        ),
    ),
)
_FAULTS = Row(
    "What did not work",
    (
        Panel("Fetches that failed", (Query(rate("kvrelay_fetches_failed_total", "cause"), "{{cause}}"),), "cps"),
        Panel(
            "What became of them",
            (
                Query(rate("kvrelay_fetch_retries_total"), "read again"),
                Query(rate("kvrelay_fetch_kept_blocks_total"), "blocks kept"),
                Query(rate("kvrelay_recomputed_prompts_total"), "prompts computed again"),
                Query(rate("kvrelay_requests_not_loaded_total"), "requests ended with an error"),
                Query(rate("kvrelay_router_rebuilt_kv_total"), "made again by a prefill node"),
            ),
            "cps",
        ),
        Panel(
            "KV that did not come, as the router heard",
            (Query(rate("kvrelay_router_kv_failures_total", "cause"), "{{cause}}"),),
            "cps",
        ),
        Panel(
            "Fetched blocks that were checked",
            (
                Query(rate("kvrelay_fetch_checked_blocks_total"), "compared with their source"),
                Query(rate("kvrelay_fetch_wrong_blocks_total"), "of these wrong"),
                Query(rate("kvrelay_fetch_unchecked_blocks_total"), "drawn, but the source tells no checksums"),
            ),
            "cps",
            "As many as --kv-checksums draws. One wrong block is one too many.",
        ),
        Panel(
            "KV given back", (Query(rate("kvrelay_router_releases_total", "told"), "node was told: {{told}}"),), "cps"
        ),
        Panel(
            "Pairs of nodes that met",
            (Query(rate("kvrelay_router_meetings_total", "outcome"), "{{outcome}}"),),
            "cps",
        ),
    ),
)

_PROMISES = Row(
    "Promises",
    (
        Panel(
            "Requests that did not end with a 5xx",
            (Query(f"1 - (({_BROKEN}) or vector(0)) / ({_ALL})", "share"),),
            "percentunit",
            limit=AVAILABLE,
            good="above",
        ),
        Panel(
            f"First tokens within {FIRST_TOKEN_S:g} s",
            (
                Query(
                    share_within("kvrelay_router_time_to_first_token_seconds", FIRST_TOKEN_S, "model_name"),
                    "{{model_name}}",
                ),
            ),
            "percentunit",
            limit=IN_TIME,
            good="above",
        ),
        Panel(
            f"Requests with at most {NEXT_TOKEN_S:g} s between tokens",
            (
                Query(
                    share_within("kvrelay_router_inter_token_latency_seconds", NEXT_TOKEN_S, "model_name"),
                    "{{model_name}}",
                ),
            ),
            "percentunit",
            limit=IN_TIME,
            good="above",
        ),
    ),
)
_LATENCIES = Row(
    "Latencies, by the router's clock",
    (
        Panel(
            "First token", quantiles("kvrelay_router_time_to_first_token_seconds"), "s", "From arrival.", FIRST_TOKEN_S
        ),
        Panel(
            "Between tokens",
            quantiles("kvrelay_router_inter_token_latency_seconds"),
            "s",
            "Mean of each request.",
            NEXT_TOKEN_S,
        ),
        Panel(
            "First token, by model",
            quantiles("kvrelay_router_time_to_first_token_seconds", "model_name", of=(0.9,)),
            "s",
            limit=FIRST_TOKEN_S,
        ),
        Panel("Whole answer", quantiles("kvrelay_router_e2e_request_latency_seconds"), "s"),
        Panel(
            "Mean time of each stage",
            (Query(mean("kvrelay_router_stage_seconds", "stage"), "{{stage}}"),),
            "s",
            "Of the requests that went through it.",
        ),
        Panel("First token, by node", quantiles("vllm:time_to_first_token_seconds", "role", of=(0.99,)), "s"),
        Panel("Between tokens, by node", quantiles("vllm:inter_token_latency_seconds", "role", of=(0.99,)), "s"),
    ),
)
_ENTRY = Row(
    "At the door",
    (
        Panel("Refused, by reason", (Query(rate("kvrelay_router_refused_total", "reason"), "{{reason}}"),), "reqps"),
        Panel("Begun", (Query(rate("kvrelay_router_admitted_total", "how"), "{{how}}"),), "reqps", stacked=True),
        Panel("Wait of those that waited", quantiles("kvrelay_router_queue_wait_seconds"), "s"),
        Panel(
            "Requests by API key",
            (Query(rate("kvrelay_router_key_requests_total", "key", "outcome"), "{{key}} {{outcome}}"),),
            "reqps",
        ),
        Panel(
            "Tokens by API key",
            (Query(rate("kvrelay_router_key_tokens_total", "key", "kind"), "{{key}} {{kind}}"),),
            "cps",
        ),
        Panel(
            "Prompt tokens cached: estimate and report",
            (Query(rate("kvrelay_router_cached_prompt_tokens_total", "by"), "{{by}}"),),
            "cps",
            "If the two part, the router's prefix index is wrong.",
        ),
    ),
)

DASHBOARDS = (
    Dashboard(
        "kvrelay-cluster",
        "kvrelay: cluster",
        "Traffic, nodes, engines, processes.",
        (_TRAFFIC, _NODES, _ENGINES, _PROCESSES),
    ),
    Dashboard("kvrelay-handover", "kvrelay: hand-over", "KV from prefill to decode nodes.", (_MOVED, _LEASES, _FAULTS)),
    Dashboard(
        "kvrelay-slo",
        "kvrelay: service levels",
        "What clients were promised, and got.",
        (_PROMISES, _LATENCIES, _ENTRY),
    ),
)
