"""Which pairs of a prefill and a decode node have met, and which are to meet next. Pure.

A pair is of two processes: with another generation of either it is another pair. In a large cluster not all pairs meet
beforehand: a node meets so many others, those with the fewest meetings and then the busiest first. Pairs that have not
met work as well; their first hand-over takes longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from router.nodes.node import Node
from wire.config import Role

__all__ = ["AT_ONCE", "PARTNERS", "Meeting", "Met", "Outcome", "Pairs"]

AT_ONCE = 4
"""Meetings under way, of all nodes; a node has one at a time."""
PARTNERS = 32
"""How many others a node meets at most."""

_RETRY_S = 60.0
_BUSY_RETRY_S = 1.0

Met = tuple[int, list[tuple[str, str, str]]]
"""How many pairs have met, and those that could not, with their addresses and why."""
_Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Meeting:
    """One to be arranged, by what the nodes are now."""

    prefill: Node
    decode: Node
    key: _Key


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a meeting went. `why` it failed; empty: both have met. `busy`: soon again. `never`: they cannot be asked."""

    why: str = ""
    busy: bool = False
    never: bool = False


class Pairs:
    """See the module. Nodes without a generation are no pairs: nobody knows when they begin anew."""

    def __init__(self) -> None:
        self._under_way: set[_Key] = set()
        self._outcomes: dict[_Key, Outcome] = {}
        self._again: dict[_Key, float] = {}
        """When what has failed is tried again."""
        self._partners: Counter[str] = Counter()
        """By URL, in how many of `_under_way` and `_outcomes` a node is."""
        self._here: set[tuple[Role, str, str]] = set()
        """By role: a node that changes its own meets all others of the role that it had before."""

    def due(self, prefill: Sequence[Node], decode: Sequence[Node], now: float) -> list[Meeting]:
        """Meetings to begin now, of nodes that are up. They are under way until `ended`."""
        here = {(Role.PREFILL, node.url, node.generation) for node in prefill}
        here |= {(Role.DECODE, node.url, node.generation) for node in decode}
        if here != self._here:
            self._here = here
            for key in [key for key in self._outcomes if not self._both_here(key)]:
                self._forget(key)
        for key in [key for key, again_at in self._again.items() if again_at <= now]:
            self._forget(key)
        busy = {url for key in self._under_way for url in (key[0], key[2])}
        sources = Counter(node.model for node in prefill if node.generation)
        begun: list[Meeting] = []
        for reader in self._in_turn(decode):
            if len(self._under_way) >= AT_ONCE:
                break
            if reader.url in busy or self._partners[reader.url] >= min(PARTNERS, sources[reader.model]):
                continue
            source = self._source_for(reader, prefill, busy)
            if source is not None:
                key = _key(source, reader)
                self._under_way.add(key)
                self._partners.update((source.url, reader.url))
                busy |= {source.url, reader.url}
                begun.append(Meeting(source, reader, key))
        return begun

    def ended(self, meeting: Meeting, outcome: Outcome, now: float) -> None:
        """It is over."""
        self._under_way.discard(meeting.key)
        self._outcomes[meeting.key] = outcome
        if outcome.why and not outcome.never:
            self._again[meeting.key] = now + (_BUSY_RETRY_S if outcome.busy else _RETRY_S)
        if not self._both_here(meeting.key):
            self._forget(meeting.key)

    def met(self) -> Met:
        """Say who has met; those that were busy or cannot be asked are on neither side."""
        outcomes = self._outcomes.items()
        apart = [(key[0], key[2], how.why) for key, how in outcomes if how.why and not (how.busy or how.never)]
        return sum(not how.why for _, how in outcomes), apart

    def _both_here(self, key: _Key) -> bool:
        return {(Role.PREFILL, *key[:2]), (Role.DECODE, *key[2:])} <= self._here

    def _source_for(self, reader: Node, prefill: Sequence[Node], busy: set[str]) -> Node | None:
        fit = [
            node
            for node in prefill
            if node.url not in busy and node.model == reader.model and self._partners[node.url] < PARTNERS
        ]
        return next((node for node in self._in_turn(fit) if _key(node, reader) not in self._outcomes), None)

    def _in_turn(self, nodes: Sequence[Node]) -> list[Node]:
        known = [node for node in nodes if node.generation]
        return sorted(known, key=lambda node: (self._partners[node.url], -node.depth, node.url))

    def _forget(self, key: _Key) -> None:
        del self._outcomes[key]
        self._again.pop(key, None)
        self._partners.subtract((key[0], key[2]))


def _key(prefill: Node, decode: Node) -> _Key:
    return prefill.url, prefill.generation, decode.url, decode.generation
