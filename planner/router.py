"""The router of a simulation: the real pool, placement and prefix index, over simulated nodes.

Times are milliseconds.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from kvrelay.planner.engine import Engine
from kvrelay.planner.seat import PlacementHints, Source
from kvrelay.planner.setting import Setting, Stream
from kvrelay.router.nodes.node import HealthReport, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.prefix.index import CHUNK_BYTES, Prefix
from kvrelay.router.request.job import Job, Slo
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery, Placer
from kvrelay.wire.config import Role
from kvrelay.wire.kv_events import CPU, GPU, STORAGE
from kvrelay.wire.ladder import Found
from kvrelay.wire.router_config import Policy, RouterConfig
from kvrelay.wire.transfer import Fingerprint, KvFacts

__all__ = ["MODEL", "Router"]

MODEL = "simulated"
_FINGERPRINT = Fingerprint(
    1, "simulated", "bfloat16", 1, kv_heads=1, head_dim=1, layers=1, window=0, tp_size=1
)
_KV = KvFacts(_FINGERPRINT, planes=("simulated",), port=1, compares=True)
_JOB = Job(
    id="", path="", model=MODEL, stream=True, seed=0, created=0, max_tokens=0, prompt_tokens=0,
    counted=True, wants_stages=False, include_usage=False, choices=1, prompt_only=False,
    fields={},
)  # fmt: skip


class Router:
    """A router over simulated nodes, of which the first ones are prefill nodes at first."""

    def __init__(self, setting: Setting, engines: Sequence[Engine]) -> None:
        self._engines = {f"http://node-{at}": engine for at, engine in enumerate(engines)}
        urls = [*self._engines]
        self.pool = Pool(urls[: setting.prefill], urls[setting.prefill :])
        policy, rng = cast(Policy, setting.policy), random.Random(f"router 0 {setting.seed}")
        config = RouterConfig(
            prefill_policy=policy, decode_policy=policy, strict_roles=setting.strict_roles
        )
        self.placer = Placer(config, self.pool, rng)
        self._told = setting.targets
        self._block_size = setting.block_size if setting.prefixes else 0
        for node in self.pool.nodes:
            self.poll(node, node.role, 0.0)

    def engine(self, node: Node) -> Engine:
        return self._engines[node.url]

    def targets(self, stream: Stream) -> Slo:
        told = stream.targets or self._told
        return Slo() if told is None else Slo(told.ttft_ms / 1e3, told.tpot_ms / 1e3)

    def wanted(self, stream: Stream) -> PlacementQuery:
        targets = self.targets(stream)
        job = replace(_JOB, id=f"{stream.number}", session_id=stream.session, targets=targets)
        return self.placer.wanted(job, self._prefix(stream), stream.prompt)

    def told(self, placed: PlacementLeases) -> PlacementHints:
        wanted, placement = placed.wanted, placed.placement
        _, had, url = placement.prompt
        expected = max(1, round(wanted.output))
        spilled = max(1, wanted.tokens - had) if placement.spills else 0
        sources: tuple[Source, ...] = ()
        if url in self._engines:
            reader, holder = (self._engines[each] for each in (placement.prefill, url))
            sources = reader.pulls.named(holder, wanted.cached.get(url, 0), had)
        return PlacementHints(wanted.tpot_ms, expected, spilled, sources)

    def rungs(self, stream: Stream, placed: PlacementLeases) -> dict[str, int]:
        prefix = placed.wanted.prefix
        if prefix is None:
            return {}
        found = Found(stream.cached - sum(stream.read.values()), **stream.read, asked=stream.prompt)
        node = (placed.prefill or placed.decode).node
        return self.placer.rungs(placed, node, prefix, stream.prompt, found)

    def answered(self, stream: Stream) -> None:
        self.placer.answered(MODEL, stream.output)

    def poll(self, node: Node, role: Role, now: float) -> None:
        """Have a health check of a node succeed, which says that it has this role."""
        engine = self.engine(node)
        load, card = engine.load(now), engine.card
        if node.up:
            node.note_load(load)
            return
        report = HealthReport(
            role, MODEL, load=load, generation="1", kv=_KV, flips=1, costs=card.costs,
            max_gap_ms=card.max_gap_ms,
        )  # fmt: skip
        self.pool.note_report(node, report, now / 1e3, now / 1e3)
        if self._block_size:
            for medium in (GPU, CPU, STORAGE):
                self.pool.prefixes.changed(node.url, (), medium=medium)

    def _prefix(self, stream: Stream) -> Prefix | None:
        # A block stands for a chunk of text, too; its name is known before it is tokenized.
        if not self._block_size:
            return None
        chunks = array("q", stream.blocks or (0,))
        size = len(chunks) * CHUNK_BYTES
        return Prefix(chunks, size, array("Q", stream.blocks), stream.prompt, self._block_size)
