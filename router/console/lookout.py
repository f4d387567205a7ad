"""What the console shows, taken from the router: of requests when they are handed over and when they end, of their
tokens once a second, of nodes and queues when somebody looks.

Owns the clock of the console. What is counted and put together is in router/console/recent.py and picture.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client.registry import Collector

from openai_api.routes import version
from openai_api.stages import MOVED
from router.admission.gate import Gate
from router.console.picture import BreakerSeen, FailedPair, NodeSeen, Picture, RolesSeen, WorkerSeen, picture_of
from router.console.recent import Ended, Recent
from router.metrics import Metrics
from router.nodes.models import Models
from router.nodes.node import Node
from router.nodes.pairs import Pairs
from router.nodes.pool import DRAINS, Pool
from router.roles import RoleChanges
from router.shared import Shared
from router.state import of_models
from router.vllm.walk import VllmWalk
from router.walk.handoff import Walk
from router.walk.joined_walk import JoinedWalk

__all__ = ["Lookout"]

_MOST_FAILED_PAIRS = 20


class Lookout:
    """A view of one process, and of what other workers have told it."""

    def __init__(self, pool: Pool, models: Models, pairs: Pairs, gate: Gate, metrics: Metrics, shared: Shared) -> None:
        self._pool, self._models, self._pairs, self._gate = pool, models, pairs, gate
        self._metrics, self._shared = metrics, shared
        self._recent = Recent()
        self._began = time.monotonic()
        self.roles: RoleChanges | None = None
        """In the process that has nodes change theirs."""
        metrics.on_handover = lambda prefill, decode: self._recent.handed_over(time.monotonic(), prefill, decode)

    def flowed(self, now: float, tokens: int) -> None:
        """So many tokens more of answers came."""
        self._recent.flowed(now, tokens)

    def ended(
        self,
        walk: Walk | JoinedWalk | VllmWalk,
        path: str,
        status: int,
        key: str,
        error: str,
        stages_s: dict[str, float],
    ) -> None:
        """A request is over, and its timeline ended. `error` is what a log may say of it."""
        timeline, job, (prefill, decode), recent = walk.timeline, walk.job, walk.nodes, self._recent
        now, first, tokens = timeline.ended, timeline.first_token, walk.output_tokens
        assert now is not None
        ttft_s = None if first is None else first - timeline.arrived
        inter_token_s = timeline.inter_token_s(tokens, walk.answers)
        recent.ended(now, status, ttft_s, inter_token_s, stages_s["total"])
        cached = moved = 0
        if not isinstance(walk, VllmWalk):
            for part in walk.parts:
                cached += part.cached_tokens or 0
                moved += self._moved(now, part.timeline.decode_ms, *part.nodes)
        recent.keep(
            Ended(
                job.id,
                path,
                job.model,
                key,
                status,
                error,
                job.stream,
                timeline.local,
                time.time(),
                ttft_s,
                inter_token_s,
                walk.prompt_tokens,
                cached,
                tokens,
                prefill,
                decode,
                moved,
                stages_s,
                walk.placement,
            )
        )

    def _moved(self, now: float, told_ms: dict[str, float], prefill: str, decode: str) -> int:
        """Note what a decode leg has fetched; its bytes."""
        if "transfer" not in told_ms:
            return 0
        size = int(told_ms.get(MOVED, 0))
        exposed_s = told_ms.get("exposed", 0.0) / 1e3
        self._recent.fetched(now, prefill, decode, size, told_ms["transfer"] / 1e3, exposed_s)
        return size

    def seen(self, since: float) -> WorkerSeen:
        """What this process sees, with the requests that ended after this Unix time."""
        now = time.monotonic()
        workers = self._shared.workers()
        roles = {} if self.roles is None else self.roles.models
        return WorkerSeen(
            0 if workers is None else workers.get("index", 0),
            now - self._began,
            int(_sum(self._metrics.running)),
            self._gate.waiting(),
            int(_sum(self._metrics.waiting_for_room)),
            [_node(node, self._pool, now) for node in (*self._pool.nodes, *self._pool.leaving)],
            self._recent.slots(now),
            self._recent.requests(since),
            {
                "requests": _by(self._metrics.requests, "status"),
                "disaggregated": _by(self._metrics.disaggregated, ""),
                "local_prefills": _by(self._metrics.local_prefills, "reason"),
                "failovers": _by(self._metrics.failovers, "leg"),
                "kv_failures": _by(self._metrics.kv_failures, "cause"),
            },
            [FailedPair(*pair) for pair in self._pairs.met()[1][:_MOST_FAILED_PAIRS]],
            [RolesSeen(name, of.why, of.use, of.changes) for name, of in sorted(roles.items())],
        )

    def picture(self, since: float) -> Picture:
        """Return what all workers see."""
        workers, own = self._shared.workers(), self.seen(since)
        others = self._shared.seen_elsewhere()
        health, models = of_models(self._models)
        return picture_of(
            own,
            others or [own],
            since,
            wanted=1 if workers is None else workers["wanted"],
            health=health,
            models=models,
            version=version(),
            now=time.time(),
            monotonic=time.monotonic(),
        )


def _node(node: Node, pool: Pool, now: float) -> NodeSeen:
    load = node.load
    return NodeSeen(
        node.url,
        node.role.value,
        node.kind.value,
        node.model,
        sorted(node.adapters),
        node.up,
        not node.up and node.reason == DRAINS,
        node.reason,
        round(now - node.since, 3) if node.since else None,
        [source.value for source in pool.members.sources(node.url)] if node.wanted else [],
        len(node.leases),
        node.held_blocks,
        round(node.depth, 3),
        load.running,
        load.waiting,
        load.waiting_tokens,
        load.free_blocks,
        load.total_blocks,
        load.block_size,
        {leg.value: _breaker(breaker.facts(now)) for leg, breaker in node.breakers.items()},
        int(node.up),
        node.flips_to or "",
        round(node.state.prompt_share, 3),
        round(node.state.limit_left, 3),
    )


def _breaker(facts: Mapping[str, str | float | int]) -> BreakerSeen:
    return BreakerSeen(str(facts["state"]), str(facts["reason"]), float(facts["opens_in_s"]))


def _by(counter: Collector, label: str) -> dict[str, float]:
    """The counts of a metric by one of its labels; by none: all as one."""
    counts: dict[str, float] = {}
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                value = sample.labels.get(label, "")
                counts[value] = counts.get(value, 0.0) + sample.value
    return counts


def _sum(gauge: Collector) -> float:
    return sum(sample.value for family in gauge.collect() for sample in family.samples)
