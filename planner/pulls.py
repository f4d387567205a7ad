"""Pulls of a simulated node: cached KV that it reads instead of computing, as node/pulls.py does.

From the node that the router names, or from its own host memory and files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvrelay.planner.block_cache import BlockCache
from kvrelay.planner.rate_card import TIERS
from kvrelay.planner.seat import Lease, Seat, Source
from kvrelay.wire.kv_events import CPU, GPU, STORAGE

if TYPE_CHECKING:
    from kvrelay.planner.engine import Engine

__all__ = ["Pulls"]

_LEASE_MS = 10_000.0
"""The default transfer_deadline_s of a node."""


class Pulls:
    """A node's reads; `below` has the tokens of each tier, by its name on the rate card."""

    def __init__(self, node: Engine, below: Mapping[str, int], *, peers: bool) -> None:
        self._node, card = node, node.card
        self.below = [
            BlockCache(below.get(name, 0), node.cache.block_size) for name in TIERS if below
        ]
        pull_ms = card.pull_ms if peers else (0.0, 0.0)
        host_ms, store_ms = (card.tier_ms(name) if below else (0.0, 0.0) for name in TIERS)
        names = ("pull_ms", "pull_token_ms", "host_ms", "host_token_ms", "store_token_ms")
        self.announced = dict(zip(names, (*pull_ms, *host_ms, store_ms[1]), strict=True))
        self._own = [
            Source(tuple(self.below[:count]), *host_ms, store_ms[1])
            for count in range(1, len(self.below) + 1)
        ]

    def news(self) -> Iterator[tuple[str, Collection[int], Collection[int]]]:
        """Yield what came and went in each medium; what came in the pool is kept below, too."""
        stored, removed = self._node.cache.news()
        yield GPU, stored, removed
        for medium, cache in zip((CPU, STORAGE), self.below, strict=False):
            cache.keep([*stored])
            yield medium, *cache.news()

    def used(self, names: Sequence[int]) -> None:
        for cache in self.below:
            cache.keep(names)

    def named(self, holder: Engine, in_pool: int, tokens: int) -> tuple[Source, ...]:
        """Return a holder of so many tokens of a prompt as a source: its pool, its host memory."""
        once_ms, token_ms = self.announced["pull_ms"], self.announced["pull_token_ms"]
        host_ms = max(token_ms, self.announced["host_token_ms"])
        return tuple(
            Source((cache,), once_ms, each_ms, rung="peer", told=told)
            for cache, each_ms, told in zip(
                (holder.cache, *holder.pulls.below),
                (token_ms, host_ms),
                (in_pool, tokens),
                strict=False,
            )
            if told
        )

    def begin(self, seat: Seat, named: list[Source], now: float) -> None:
        """Ask for what saves a waiting request the most time, if anything does."""
        names, first = self._names(seat), self._first(seat)
        saved = []
        for source in (*named, *self._own):
            told = source.told // self._node.cache.block_size - first
            counts = (
                [told] if source.told else [len(each) for _, each in source.found(names[first:])]
            )
            if (more := min(sum(counts), len(names) - first)) > 0:
                saved.append((self._saved_ms(source, first, more, sum(counts[1:])), source))
        saved.sort(key=lambda each: each[0])
        # One more ask if this fails.
        seat.sources = [source for ms, source in saved[-2:] if ms > 0]
        self._ask(seat, now)

    def _names(self, seat: Seat) -> tuple[int, ...]:
        return seat.stream.blocks[: (seat.known - 1) // self._node.cache.block_size]

    def _first(self, seat: Seat) -> int:
        return self._node.cached(seat) // self._node.cache.block_size

    def _saved_ms(self, source: Source, first: int, blocks: int, stored: int) -> float:
        size = self._node.cache.block_size
        computed_ms = self._node.costs.chunk_ms(blocks * size, first * size)
        return computed_ms - source.once_ms - source.ms(blocks * size, stored * size)

    def _ask(self, seat: Seat, now: float) -> None:
        seat.came = now
        if seat.sources:
            source = seat.sources.pop()
            seat.came = math.inf  # others pass it
            self._node.later(now + source.once_ms, partial(self._answered, seat, source))

    def _answered(self, seat: Seat, source: Source, now: float) -> None:
        node, first = self._node, self._first(seat)
        found = source.found(self._names(seat)[first:])
        count = sum(len(names) for _, names in found)
        if count:
            held = [(cache, cache.take(names, 0)) for cache, names in found]
            seat.lease = lease = Lease(source, held, first + count)
            seat.came = now
            node.have_left(seat, seat.known - lease.reached * node.cache.block_size)
            node.later(now + _LEASE_MS, partial(self._give_up, seat, lease))
        else:
            self._ask(seat, now)
        node.wake(now)

    def _give_up(self, seat: Seat, lease: Lease, now: float) -> None:
        if seat.lease is lease and not seat.begun:  # two nodes might wait for each other's blocks
            seat.let_go()
            self._node.wake(now)

    def reads(self, seat: Seat, now: float) -> bool:
        """Begin to read what a request has a lease of; return False if all of it is here."""
        assert seat.lease is not None
        node, lease, size = self._node, seat.lease, self._node.cache.block_size
        start = (seat.known - seat.left) // size
        if lease.reached <= start:
            seat.let_go()
            return False
        seat.came = math.inf
        stored = min(lease.reached - start, sum(len(names) for _, names in lease.held[1:]))
        took = lease.source.ms((lease.reached - start) * size, stored * size)
        node.later(now + took, partial(self._read, seat, lease, start, stored))
        return True

    def _read(self, seat: Seat, lease: Lease, start: int, stored: int, now: float) -> None:
        node, stream = self._node, seat.stream
        seat.let_go()
        seat.came, size = now, node.cache.block_size
        node.cache.ready(stream.blocks[start : lease.reached])
        node.have_left(seat, seat.known - lease.reached * size)
        node.note_pulled(seat, (lease.reached - start) * size, start * size)
        if stream.first < 0:
            stream.cached = lease.reached * size
            first = (lease.reached - start - stored) * size
            stream.read = {lease.source.rung: first, "store": stored * size}
        node.wake(now)
