"""The console's state, taken from the router, and its clock.

Requests are noted at their hand-over and their end, tokens once a second, nodes and queues when
somebody looks.
"""

from __future__ import annotations

import time

from prometheus_client.registry import Collector

from kvrelay.openai_api.routes import version
from kvrelay.openai_api.stages import MOVED
from kvrelay.router.console.snapshot import Snapshot, snapshot_of
from kvrelay.router.membership.warm_up import WarmUps
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.models import Models
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.recent_requests import Edge, EndedRequest, RecentRequests
from kvrelay.router.relay import Run
from kvrelay.router.roles import RoleChanger
from kvrelay.router.shared import Shared
from kvrelay.router.state import RoleStatus, WorkerStatus, failed_pairs, model_health, node_statuses

__all__ = ["ConsoleState"]


class ConsoleState:
    """A process's state for the console, with what other workers reported."""

    def __init__(
        self, pool: Pool, models: Models, warm_ups: WarmUps, metrics: Metrics, shared: Shared
    ) -> None:
        self._pool, self._models, self._warm_ups = pool, models, warm_ups
        self._metrics, self._shared = metrics, shared
        self.recent = RecentRequests()
        self._began = time.monotonic()
        self.roles: RoleChanger | None = None
        """Set in the process that changes the roles of nodes."""
        metrics.on_handover = lambda prefill, decode: self.recent.add_edge(
            time.monotonic(), Edge(prefill, decode, 1)
        )

    def add(
        self,
        run: Run,
        path: str,
        status: int,
        key: str,
        error: str,
        stages_s: dict[str, float],
        now: float,
    ) -> EndedRequest:
        """Note a request that has ended; `error` is what a log may say of it."""
        timeline, job, (prefill, decode) = run.timeline, run.job, run.nodes
        first, tokens = timeline.first_token, run.output_tokens
        cached = fetched = 0
        for part in run.parts:
            cached += part.cached_tokens or 0
            told_ms = part.timeline.decode_ms
            if "transfer" in told_ms:
                size = int(told_ms.get(MOVED, 0))
                took_s, exposed_s = told_ms["transfer"] / 1e3, told_ms.get("exposed", 0.0) / 1e3
                self.recent.add_edge(now, Edge(*part.nodes, 0, 1, size, took_s, exposed_s))
                fetched += size
        request = EndedRequest(
            id=job.id,
            path=path,
            model=job.model,
            key=key,
            status=status,
            error=error,
            stream=job.stream,
            local=timeline.local,
            ended=time.time(),
            ttft_s=None if first is None else first - timeline.arrived,
            inter_token_s=timeline.inter_token_s(tokens, run.answers),
            prompt_tokens=run.prompt_tokens,
            cached_tokens=cached,
            output_tokens=tokens,
            prefill=prefill,
            decode=decode,
            kv_bytes=fetched,
            stages_s=stages_s,
            placed=run.placement,
        )
        self.recent.add(now, request)
        return request

    def status(self) -> WorkerStatus:
        """Return what this process sees."""
        now = time.monotonic()
        roles = {} if self.roles is None else self.roles.models
        return WorkerStatus(
            self._shared.index,
            now - self._began,
            int(sum(self._metrics.running.read().values())),
            int(sum(self._metrics.admission.waiting.read().values())),
            int(sum(self._metrics.waiting_for_room.read().values())),
            node_statuses(self._pool, now),
            self.recent.slots(now),
            list(self.recent.requests),
            self.recent.edges(now),
            {
                "requests": _by(self._metrics.requests, "status"),
                "disaggregated": _by(self._metrics.disaggregated, ""),
                "local_prefills": _by(self._metrics.local_prefills, "reason"),
                "failovers": _by(self._metrics.failovers, "leg"),
                "kv_failures": _by(self._metrics.kv_failures, "cause"),
            },
            failed_pairs(self._warm_ups.pairs()),
            [
                RoleStatus(name, each.why, each.use, each.changes)
                for name, each in sorted(roles.items())
            ],
        )

    def snapshot(self, since: float) -> Snapshot:
        """Return what all workers see, with the requests that ended after the Unix time `since`."""
        workers, own = self._shared.workers(), self.status()
        health, models = model_health(self._models)
        return snapshot_of(
            own,
            self._shared.other_workers() or [own],
            since,
            wanted=1 if workers is None else workers["wanted"],
            health=health,
            models=models,
            version=version(),
            now=time.time(),
            monotonic=time.monotonic(),
        )


def _by(counter: Collector, label: str) -> dict[str, float]:
    counts: dict[str, float] = {}
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                value = sample.labels.get(label, "")
                counts[value] = counts.get(value, 0.0) + sample.value
    return counts
