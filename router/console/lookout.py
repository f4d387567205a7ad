"""What the console shows, taken from the router: of requests when they are handed over and when
they end, of their tokens once a second, of nodes and queues when somebody looks.

Owns the clock of the console. What is counted and put together is in router/console/recent.py and
picture.py.
"""

from __future__ import annotations

import time

from prometheus_client.registry import Collector

from kvrelay.openai_api.routes import version
from kvrelay.openai_api.stages import MOVED
from kvrelay.router.console.picture import Picture, RolesSeen, WorkerSeen, picture_of
from kvrelay.router.console.recent import Edge, Ended, Recent
from kvrelay.router.membership.warm_up import WarmUps
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.models import Models
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.relay import Run
from kvrelay.router.roles import RoleChanges
from kvrelay.router.shared import Shared
from kvrelay.router.state import failed_pairs, nodes_of, of_models

__all__ = ["Lookout"]


class Lookout:
    """A view of one process, and of what other workers have told it."""

    def __init__(
        self, pool: Pool, models: Models, warm_ups: WarmUps, metrics: Metrics, shared: Shared
    ) -> None:
        self._pool, self._models, self._warm_ups = pool, models, warm_ups
        self._metrics, self._shared = metrics, shared
        self.recent = Recent()
        self._began = time.monotonic()
        self.roles: RoleChanges | None = None
        """In the process that has nodes change theirs."""
        metrics.on_handover = lambda prefill, decode: self.recent.moved(
            time.monotonic(), Edge(prefill, decode, 1)
        )

    def ended(
        self,
        run: Run,
        path: str,
        status: int,
        key: str,
        error: str,
        stages_s: dict[str, float],
        now: float,
    ) -> Ended:
        """Note a request that is over, and return what is kept of it. `error` is what a log may say
        of it.
        """
        timeline, job, (prefill, decode) = run.timeline, run.job, run.nodes
        first, tokens = timeline.first_token, run.output_tokens
        cached = fetched = 0
        for part in run.parts:
            cached += part.cached_tokens or 0
            told_ms = part.timeline.decode_ms
            if "transfer" in told_ms:
                size = int(told_ms.get(MOVED, 0))
                took_s, exposed_s = told_ms["transfer"] / 1e3, told_ms.get("exposed", 0.0) / 1e3
                self.recent.moved(now, Edge(*part.nodes, 0, 1, size, took_s, exposed_s))
                fetched += size
        request = Ended(
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
        self.recent.ended(now, request)
        return request

    def seen(self) -> WorkerSeen:
        """Return what this process sees."""
        now = time.monotonic()
        roles = {} if self.roles is None else self.roles.models
        return WorkerSeen(
            self._shared.index,
            now - self._began,
            int(sum(self._metrics.running.read().values())),
            int(sum(self._metrics.admission.waiting.read().values())),
            int(sum(self._metrics.waiting_for_room.read().values())),
            nodes_of(self._pool, now),
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
            [RolesSeen(name, of.why, of.use, of.changes) for name, of in sorted(roles.items())],
        )

    def picture(self, since: float) -> Picture:
        """Return what all workers see."""
        workers, own = self._shared.workers(), self.seen()
        health, models = of_models(self._models)
        return picture_of(
            own,
            self._shared.seen_elsewhere() or [own],
            since,
            wanted=1 if workers is None else workers["wanted"],
            health=health,
            models=models,
            version=version(),
            now=time.time(),
            monotonic=time.monotonic(),
        )


def _by(counter: Collector, label: str) -> dict[str, float]:
    """Return the counts of a metric by one of its labels; by none: all as one."""
    counts: dict[str, float] = {}
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                value = sample.labels.get(label, "")
                counts[value] = counts.get(value, 0.0) + sample.value
    return counts
