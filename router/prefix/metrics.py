"""The metrics of the prefix index and of the KV events that feed it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvrelay.router.prefix.index import PrefixIndex

__all__ = ["PrefixMetrics"]

_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class PrefixMetrics:
    """A part of the router's metrics; `cached_tokens` shows whether the index is right."""

    def __init__(self, registry: CollectorRegistry, index: PrefixIndex) -> None:
        self.batches = Counter(
            "kvrelay_router_kv_event_batches",
            "Batches of KV events that were taken.",
            registry=registry,
        )
        self.event_blocks = Counter(
            "kvrelay_router_kv_event_blocks",
            "Blocks that these told of, stored or removed.",
            registry=registry,
        )
        self.gaps = Counter(
            "kvrelay_router_kv_event_gaps", "KV events were seen to be lost.", registry=registry
        )
        self.replays = Counter(
            "kvrelay_router_kv_event_replays",
            "KV events were asked for again.",
            ["outcome"],
            registry=registry,
        )
        self.snapshots = Counter(
            "kvrelay_router_kv_event_snapshots",
            "A node told all that it holds, because it has not kept the events that were lost.",
            registry=registry,
        )
        self.doubted = Gauge(
            "kvrelay_router_kv_event_doubted_nodes",
            "Nodes whose KV events are not to be had, or not complete: the choice goes by what "
            "was sent there.",
            registry=registry,
        )
        self.cached_tokens = Counter(
            "kvrelay_router_cached_prompt_tokens",
            "Tokens of prompts in prefix caches of prefill nodes: the estimate at the choice, and "
            "the node's report.",
            ["by"],
            registry=registry,
        )
        self.cached_tokens_error = Histogram(
            "kvrelay_router_cached_prompt_tokens_error",
            "Difference of the two kvrelay_router_cached_prompt_tokens_total, one observation per "
            "prefill leg.",
            buckets=_TOKENS,
            registry=registry,
        )
        for name, about, size in (
            ("texts", "Branches of prompts that the prefix index knows.", lambda: len(index.texts)),
            ("text_bytes", "Memory that these take, about.", lambda: index.texts.size_bytes),
            ("blocks", "Blocks of KV that nodes are known to hold.", lambda: len(index.blocks)),
        ):
            Gauge(f"kvrelay_router_prefix_{name}", about, registry=registry).set_function(size)

    def cached(self, estimate: int, report: int) -> None:
        self.cached_tokens.labels("estimate").inc(estimate)
        self.cached_tokens.labels("report").inc(report)
        self.cached_tokens_error.observe(abs(estimate - report))
