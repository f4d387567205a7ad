"""Which pairs of a prefill and a decode node have met, and which are to meet next. Pure.

A pair is of two processes: with another generation of either it is another pair. In a large cluster not all pairs meet
beforehand: a node meets so many others, those with the fewest meetings and then the busiest first. Pairs that have not
met work as well; their first hand-over takes longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from router.pool import Node

__all__ = ["AT_ONCE", "PARTNERS", "Meeting", "Outcome", "Pairs"]

AT_ONCE = 4
"""Meetings under way, of all nodes; a node has one at a time."""
PARTNERS = 32
"""How many others a node meets at most."""

_RETRY_S = 60.0
_BUSY_RETRY_S = 1.0

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


@dataclass(slots=True)
class _Known:
    outcome: Outcome | None = None
    """None while it is under way."""
    again_at: float = float("inf")


class Pairs:
    """See the module. Nodes without a generation are no pairs: nobody knows when they begin anew."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Known] = {}

    def due(self, prefill: Sequence[Node], decode: Sequence[Node], now: float) -> list[Meeting]:
        """Meetings to begin now, of nodes that are up. They are under way until `ended`."""
        here = {(node.url, node.generation) for node in (*prefill, *decode)}
        self._known = {
            key: known for key, known in self._known.items() if known.outcome is None or {key[:2], key[2:]} <= here
        }
        busy, partners = set[str](), Counter[str]()
        for key, known in self._known.items():
            if known.outcome is None:
                busy |= {key[0], key[2]}
            if known.again_at > now:
                partners.update((key[0], key[2]))
        begun: list[Meeting] = []
        running = sum(known.outcome is None for known in self._known.values())
        for reader in _in_turn(decode, partners):
            if running + len(begun) >= AT_ONCE:
                break
            if reader.url in busy or partners[reader.url] >= PARTNERS:
                continue
            source = self._source_for(reader, prefill, busy, partners, now)
            if source is not None:
                key = (source.url, source.generation, reader.url, reader.generation)
                self._known[key] = _Known()
                busy |= {source.url, reader.url}
                partners.update((source.url, reader.url))
                begun.append(Meeting(source, reader, key))
        return begun

    def ended(self, meeting: Meeting, outcome: Outcome, now: float) -> None:
        """It is over."""
        retry_s = _BUSY_RETRY_S if outcome.busy else _RETRY_S
        again_at = now + retry_s if outcome.why and not outcome.never else float("inf")
        self._known[meeting.key] = _Known(outcome, again_at)

    def met(self, prefill: Node, decode: Node) -> bool:
        """Whether KV has gone from one to the other."""
        known = self._known.get((prefill.url, prefill.generation, decode.url, decode.generation))
        return known is not None and known.outcome is not None and not known.outcome.why

    def failed(self) -> list[tuple[str, str, str]]:
        """Addresses of pairs whose meeting failed, and why; not of those that cannot be asked."""
        known = ((key, each.outcome) for key, each in self._known.items() if each.outcome is not None)
        return [(key[0], key[2], how.why) for key, how in known if how.why and not (how.busy or how.never)]

    def count(self) -> int:
        """How many have met."""
        return sum(known.outcome is not None and not known.outcome.why for known in self._known.values())

    def _source_for(
        self, reader: Node, prefill: Sequence[Node], busy: set[str], partners: Counter[str], now: float
    ) -> Node | None:
        fit = [
            node
            for node in prefill
            if node.url not in busy and node.model == reader.model and partners[node.url] < PARTNERS
        ]
        for source in _in_turn(fit, partners):
            known = self._known.get((source.url, source.generation, reader.url, reader.generation))
            if known is None or known.again_at <= now:
                return source
        return None


def _in_turn(nodes: Sequence[Node], partners: Counter[str]) -> list[Node]:
    known = [node for node in nodes if node.generation]
    return sorted(known, key=lambda node: (partners[node.url], -node.requests, node.url))
