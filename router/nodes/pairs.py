"""Which pairs of a prefill and a decode node have met, and which are to meet next. Pure.

A pair is of two processes: with another generation of either it is another pair. In a large cluster
not all pairs meet beforehand: a node meets so many others, those with the fewest meetings and then
the busiest first. Pairs that have not met work as well; their first hand-over takes longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from kvrelay.router.nodes.node import Node

__all__ = ["PARTNERS", "Meeting", "Met", "Outcome", "Pairs"]

PARTNERS = 32
"""How many others a node meets at most."""

_AGAIN_S = {"failed": 60.0, "busy": 1.0}

Met = tuple[int, list[tuple[str, str, str, float]]]
"""How many pairs have met, and those that could not: their addresses, why, and when they are asked
again.
"""
_Side = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An end of a meeting, and why it went wrong. `busy`: soon again. `never`: they cannot be
    asked.
    """

    how: Literal["met", "failed", "busy", "never"]
    why: str = ""


@dataclass(eq=False, slots=True)
class Meeting:
    """A meeting of two nodes."""

    prefill: Node
    decode: Node
    outcome: Outcome | None = None
    """None while it is under way."""
    again_at: float = inf


class Pairs:
    """A record of pairs that meet or have met. Nodes without a generation are none: who knows when
    they begin anew?
    """

    def __init__(self) -> None:
        self._meetings: dict[tuple[_Side, _Side], Meeting] = {}

    def begin(self, prefill: Sequence[Node], decode: Sequence[Node], now: float) -> Meeting | None:
        """Return a meeting to begin now, of nodes that are up, if any is due. It is under way until
        `ended`.
        """
        sources, readers = ({_side(node) for node in nodes} for nodes in (prefill, decode))
        self._meetings = {
            (source, reader): each
            for (source, reader), each in self._meetings.items()
            if each.outcome is None
            or (now < each.again_at and source in sources and reader in readers)
        }
        partners: Counter[str] = Counter()
        busy: set[str] = set()
        for (source, reader), each in self._meetings.items():
            urls = source[0], reader[0]
            partners.update(urls)
            if each.outcome is None:
                busy.update(urls)

        def in_turn(nodes: Sequence[Node]) -> list[Node]:
            free = [
                node
                for node in nodes
                if node.generation and node.url not in busy and partners[node.url] < PARTNERS
            ]
            return sorted(free, key=lambda node: (partners[node.url], -node.depth, node.url))

        free_sources = in_turn(prefill)
        for reader_node in in_turn(decode):
            for source_node in free_sources:
                key = _side(source_node), _side(reader_node)
                if source_node.model == reader_node.model and key not in self._meetings:
                    meeting = self._meetings[key] = Meeting(source_node, reader_node)
                    return meeting
        return None

    def ended(self, meeting: Meeting, outcome: Outcome, now: float) -> None:
        """Note how it went. A pair that has failed or was busy meets again after a while."""
        meeting.outcome = outcome
        meeting.again_at = now + _AGAIN_S.get(outcome.how, inf)

    def met(self) -> Met:
        """Say who has met; those that were busy or cannot be asked are on neither side."""
        over = [
            (each, each.outcome) for each in self._meetings.values() if each.outcome is not None
        ]
        apart = [
            (each.prefill.url, each.decode.url, end.why, each.again_at)
            for each, end in over
            if end.how == "failed"
        ]
        return sum(end.how == "met" for _, end in over), apart


def _side(node: Node) -> _Side:
    return node.url, node.generation
