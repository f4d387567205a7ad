"""The hit ladder: what became of each token of a prompt that a cache could have had. Pure.

Blocks are chained, so what is found of a prompt is its beginning, and each further rung begins where
the one before it ends. A history has the names of blocks as KV events tell them, of one node or of
all.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import accumulate, islice
from typing import Generic, NamedTuple, TypeVar

import msgspec

from kvrelay.wire.kv_events import CPU, GPU, STORAGE

__all__ = ["RUNGS", "Depths", "Found", "History", "ladder", "place_of", "places_of"]

RUNGS = (
    *("gpu", "host", "store", "peer"),
    *("failed", "stale", "evicted", "placement", "capacity", "forgotten", "new"),
)
"""Where tokens were found, why others were not, and those that no cache could have had."""
MOST_GONE = 500_000
"""Evicted blocks that a history remembers, about 100 bytes each: 8 million tokens."""
_MOST_AT_ONCE = 100_000  # of a node that leaves: 50 ms
_OLDER = 1 << 20
_EVICTIONS = 3  # of one block: several nodes may evict it at once
_Name = TypeVar("_Name", bound=Hashable)
_Test = Callable[[_Name], bool]


class Found(msgspec.Struct, frozen=True, array_like=True):
    """A node's report on a prompt: tokens found in its pool, in the tiers below, and elsewhere."""

    gpu: int = 0
    host: int = 0
    store: int = 0
    peer: int = 0
    failed: int = 0
    """Tokens behind those, of which the KV was promised and did not come in time."""
    asked: int = 0
    """Another node or a tier was asked for KV up to this token; 0: none was."""

    @property
    def tokens(self) -> int:
        return self.gpu + self.host + self.store + self.peer


class Depths(NamedTuple):
    """A measure of how far, in tokens from the first on, something is true of a prompt's blocks."""

    kept: int = 0
    """The node that was to have them has not told since that they are gone."""
    held: int = 0
    """The node that was to have them told that it holds them."""
    anywhere: int = 0
    """Some node told that it holds them."""
    seen: int = 0
    """Some node told so once, as far as the history goes back."""
    older: int = 0
    """Some node told so, however long ago."""


def place_of(node: str, medium: str) -> str:
    return f"{node} {medium}"


def places_of(nodes: Iterable[str]) -> list[str]:
    return [place_of(node, medium) for node in nodes for medium in (GPU, CPU, STORAGE)]


def ladder(tokens: int, found: Found, depths: Depths) -> dict[str, int]:
    """Return a prompt's tokens by rung; all of RUNGS, in order, and `tokens` in all."""
    reached, possible = found.tokens, max(found.tokens, *depths[:-1])
    ends = [
        *accumulate((found.gpu, found.host, found.store, found.peer)),
        min(reached + found.failed, possible),
        *depths,
        tokens,
    ]
    rungs, at = {}, 0
    for rung, end in zip(RUNGS, ends, strict=True):
        at, begin = max(at, min(end, tokens)), at
        rungs[rung] = at - begin
    return rungs


class History(Generic[_Name]):
    """A history of which blocks nodes hold, since when, and of blocks that they had once."""

    def __init__(self, most_gone: int = MOST_GONE) -> None:
        self.held: dict[str, dict[_Name, float]] = {}
        """Since when, by node."""
        self._gone: dict[_Name, tuple[tuple[float, str], ...]] = {}
        """When and where, by names; the newest evictions last, and of each the newest first."""
        self._most_gone = most_gone
        self._older = array("q", [-1]) * _OLDER  # each takes the place of another; no hash is -1

    def changed(
        self,
        node: str,
        stored: Iterable[_Name],
        removed: Iterable[_Name],
        at: float,
        *,
        cleared: bool = False,
    ) -> dict[_Name, float]:
        """Follow an event of a node's cache, the first one `cleared`; return what it holds."""
        held, stored = self.held.setdefault(node, {}), dict.fromkeys(stored, at)
        if cleared:
            self._forget(held, at, node)
            held.clear()
        # A node tells of blocks that are new there: what it had was evicted in between.
        gone = [*removed, *filter(held.__contains__, stored)]
        for name in gone:
            held.pop(name, None)
        held |= stored
        self._forget(gone, at, node)
        return held

    def left(self, node: str) -> None:
        """Note that a node's blocks are not known any more."""
        self._forget(self.held.pop(node, ()), -math.inf, node)

    def _forget(self, names: Iterable[_Name], at: float, node: str) -> None:
        gone, newest = self._gone, ((at, node),)
        for name in islice(names, _MOST_AT_ONCE):
            gone[name] = newest + gone.pop(name, ())[: _EVICTIONS - 1]
        if len(gone) > self._most_gone:  # an eighth at once: to find the oldest takes long
            for name in list(islice(gone, len(gone) - self._most_gone * 7 // 8)):
                del gone[name]
                self._older[hash(name) % _OLDER] = hash(name)

    def ladder(
        self,
        tokens: int,
        found: Found,
        names: Sequence[_Name],
        block_size: int,
        at: float,
        nodes: Collection[str],
        them: Collection[str],
    ) -> dict[str, int]:
        """Return the ladder of a prompt that `nodes`, chosen among `them` at a time, were to have.

        `names` are of its full blocks. Those stored after that time do not count.
        """
        # A prompt's last token is computed, so its last block may not be cached.
        most = min(len(names), (tokens - 1) // block_size)
        end = max(0, min(most, found.tokens // block_size))
        gone, older, head = self._gone, self._older, names[end:most][:1]

        def having(among: Collection[str]) -> list[_Test[_Name]]:
            # What one medium lacks may lie in the next: all of a node that has the first.
            places = [
                (node.rpartition(" ")[0], self.held[node]) for node in self.held.keys() & among
            ]
            has = {url for url, place in places if head and head[0] in place}
            return [holds(place) for url, place in places if url in has]

        def holds(place: dict[_Name, float]) -> _Test[_Name]:
            return lambda name: place.get(name, math.inf) <= at

        def gone_since(among: Collection[str]) -> _Test[_Name]:
            return lambda name: any(
                when > at and node in among for when, node in gone.get(name, ())
            )

        def is_older(name: _Name) -> bool:
            return older[hash(name) % _OLDER] == hash(name)

        mine, theirs, known = having(nodes), having(them), gone.__contains__
        depths = []
        for tests in (  # each goes on where the one before it ends
            mine,
            [*mine, gone_since(nodes)],
            [*theirs, gone_since(set(them))],
            [*theirs, known],
            [*theirs, known, is_older],
        ):
            end = _end_of_any(tests, names, end, most)
            depths.append(end * block_size)
        return ladder(tokens, found, Depths(*depths))


def _end_of_any(tests: Iterable[_Test[_Name]], names: Sequence[_Name], at: int, most: int) -> int:
    """Return where the names end, from `at` on, of each of which some test is true."""
    begin = -1
    while at > begin:  # one test's run after another's: among 100 nodes most tests fail
        begin = at
        for test in tests:
            while at < most and test(names[at]):
                at += 1
    return at
