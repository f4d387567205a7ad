"""What is measured of admission: waiting, refusals by reason, and each key's requests and tokens, by its name.

Names come from the configuration and reasons from the code, so no client can make a new series.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["AdmissionMetrics"]

_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class AdmissionMetrics:
    """All of them, in the router's registry."""

    def __init__(self, registry: CollectorRegistry, keys: Iterable[str]) -> None:
        self.waiting = Gauge("kvrelay_router_queue_waiting", "Requests that wait to begin.", registry=registry)
        self._wait = Histogram(
            "kvrelay_router_queue_wait_seconds",
            "Time in the router's queue, of those that waited and began.",
            buckets=_WAIT_S,
            registry=registry,
        )
        self._admitted = Counter(
            "kvrelay_router_admitted", "Requests that began, at once or out of the queue.", ["how"], registry=registry
        )
        self._refused = Counter(
            "kvrelay_router_refused", "Requests that never began, by reason.", ["reason"], registry=registry
        )
        self._requests = Counter(
            "kvrelay_router_key_requests",
            "Requests by API key: begun or refused.",
            ["key", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "kvrelay_router_key_tokens",
            "Tokens by API key: of prompts and of answers.",
            ["key", "kind"],
            registry=registry,
        )
        self._begun = {key: self._requests.labels(key, "begun") for key in keys}
        self._of_key = {key: (self._tokens.labels(key, "prompt"), self._tokens.labels(key, "output")) for key in keys}
        self._how = {how: self._admitted.labels(how) for how in ("at_once", "queued")}

    def admitted(self, key: str, how: str, waited_s: float = 0.0) -> None:
        """A request began: `how` is at_once or queued."""
        self._how[how].inc()
        self._begun[key].inc()
        if how == "queued":
            self._wait.observe(waited_s)

    def refused(self, key: str, reason: str) -> None:
        """A request will not begin."""
        self._refused.labels(reason).inc()
        self._requests.labels(key, "refused").inc()

    def ended(self, key: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request that began is over."""
        prompt, output = self._of_key[key]
        prompt.inc(prompt_tokens)
        output.inc(output_tokens)
