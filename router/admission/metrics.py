"""The metrics of admission: waiting, refusals, and requests and tokens by the names of keys.

Names come from the configuration and reasons from the code, so no client can make a new series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvrelay.openai_api.fast_metrics import FastCounter, FastGauge

__all__ = ["AdmissionMetrics"]

_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class AdmissionMetrics:
    """A part of the router's metrics, in its registry."""

    def __init__(
        self, registry: CollectorRegistry, keys: Iterable[str], models: Callable[[], Iterable[str]]
    ) -> None:
        about = "Requests that wait to begin."
        self.waiting = FastGauge(
            "kvrelay_router_queue_waiting", about, registry, "model_name", models
        )
        self._wait = Histogram(
            "kvrelay_router_queue_wait_seconds",
            "Time in the router's queue, of those that waited and began.",
            buckets=_WAIT_S,
            registry=registry,
        )
        self._admitted = FastCounter(
            "kvrelay_router_admitted",
            "Requests that began, at once or out of the queue.",
            registry,
            ["how"],
        )
        self._refused = Counter(
            "kvrelay_router_refused",
            "Requests that never began, by reason.",
            ["reason"],
            registry=registry,
        )
        self._requests = FastCounter(
            "kvrelay_router_key_requests",
            "Requests by API key: begun or refused.",
            registry,
            ["key", "outcome"],
        )
        self.tokens = FastCounter(
            "kvrelay_router_key_tokens",
            "Tokens by API key: of prompts and of answers.",
            registry,
            ["key", "kind"],
        )
        for reason in (
            "queue_full",
            "displaced",
            "deadline",
            "ttft",
            "ttft_never",
            "ttft_passed",
            "tpot_never",
        ):
            self._refused.labels(reason)
        for how in ("at_once", "queued"):
            self._admitted.add(0, how)
        for key in keys:
            self._requests.add(0, key, "begun")
            self.tokens.add(0, key, "prompt")
            self.tokens.add(0, key, "output")

    def admitted(self, key: str, waited_s: float | None = None) -> None:
        """Count a request that begins, at once or after a wait."""
        self._requests.add(1, key, "begun")
        if waited_s is None:
            self._admitted.add(1, "at_once")
        else:
            self._admitted.add(1, "queued")
            self._wait.observe(waited_s)

    def refused(self, key: str, reason: str) -> None:
        """Count a request that will not begin."""
        self._refused.labels(reason).inc()
        self._requests.add(1, key, "refused")
