"""What is measured of admission: waiting, refusals by reason, and each key's requests and tokens, by its name.

Names come from the configuration and reasons from the code, so no client can make a new series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from openai_api.tallies import Level, Tally

__all__ = ["AdmissionMetrics"]

_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class AdmissionMetrics:
    """All of them, in the router's registry."""

    def __init__(
        self, registry: CollectorRegistry, keys: Iterable[str], models: Callable[[], Iterable[str]] = tuple
    ) -> None:
        about = "Requests that wait to begin."
        self.waiting = Level("kvrelay_router_queue_waiting", about, registry, "model_name", models)
        self._wait = Histogram(
            "kvrelay_router_queue_wait_seconds",
            "Time in the router's queue, of those that waited and began.",
            buckets=_WAIT_S,
            registry=registry,
        )
        self._admitted = Tally(
            "kvrelay_router_admitted", "Requests that began, at once or out of the queue.", registry, ["how"]
        )
        self._refused = Counter(
            "kvrelay_router_refused", "Requests that never began, by reason.", ["reason"], registry=registry
        )
        self._requests = Tally(
            "kvrelay_router_key_requests", "Requests by API key: begun or refused.", registry, ["key", "outcome"]
        )
        self._tokens = Tally(
            "kvrelay_router_key_tokens", "Tokens by API key: of prompts and of answers.", registry, ["key", "kind"]
        )
        for reason in ("queue_full", "displaced", "deadline", "ttft", "ttft_never", "ttft_passed", "tpot_never"):
            self._refused.labels(reason)
        for how in ("at_once", "queued"):
            self._admitted.add(0, how)
        for key in keys:
            self._requests.add(0, key, "begun")
            self._tokens.add(0, key, "prompt")
            self._tokens.add(0, key, "output")

    def admitted(self, key: str, how: str, waited_s: float = 0.0) -> None:
        """A request began: `how` is at_once or queued."""
        self._admitted.add(1, how)
        self._requests.add(1, key, "begun")
        if how == "queued":
            self._wait.observe(waited_s)

    def refused(self, key: str, reason: str) -> None:
        """A request will not begin."""
        self._refused.labels(reason).inc()
        self._requests.add(1, key, "refused")

    def ended(self, key: str, prompt_tokens: int) -> None:
        """A request that began is over."""
        self._tokens.add(prompt_tokens, key, "prompt")

    def flowed(self, key: str, tokens: int) -> None:
        """So many more of an answer have come."""
        self._tokens.add(tokens, key, "output")
