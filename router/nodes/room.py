"""Who waits for room on a decode node, in which order. Pure: the nodes tell their room, nobody looks at a clock.

In the order of priority, then of arrival. Nobody overtakes: nodes that an earlier one could use are not given to a
later one that would fit, or a long prompt would wait for ever. One whose nodes no earlier one wants is not held up.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from router.nodes.credit import blocks_of, likely_kv_tokens
from router.nodes.node import Node
from router.policies.policy import Ask

__all__ = ["RoomQueue", "Waiter", "has_room", "with_room"]

_LOOKED_AT = 64


def has_room(node: Node, ask: Ask) -> bool:
    """Whether the leg's KV finds room beside what the node's other legs are reckoned to need.

    An idle node has what it has, and one that says nothing of its KV is asked."""
    load = node.load
    if not load.block_size or not node.requests:
        return True
    return node.credit.left(load.free_blocks) >= min(
        blocks_of(likely_kv_tokens(ask, node), load.block_size), load.total_blocks
    )


def with_room(ask: Ask, nodes: Sequence[Node], choose: Callable[[Ask, Sequence[Node]], tuple[Node, Ask]]) -> list[Node]:
    """Those that have room; of many nodes only the one that would be chosen, if it has any: a look at each would take
    longer than all else."""
    if len(nodes) > _LOOKED_AT and has_room(chosen := choose(ask, nodes)[0], ask):
        return [chosen]
    return [node for node in nodes if has_room(node, ask)]


@dataclass(eq=False, slots=True)
class Waiter:
    """One leg."""

    ask: Ask
    candidates: Callable[[], Sequence[Node]]
    """The nodes that may take it now, whatever room they have."""
    grant: Callable[[Sequence[Node]], None]
    """Told once those of them that have room; must take its place on one before it returns."""
    order: tuple[int, int] = field(default=(0, 0))


class RoomQueue:
    """Of all decode nodes."""

    def __init__(self) -> None:
        self._waiting: list[Waiter] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiting)

    def add(self, waiter: Waiter) -> None:
        """Wait from now on; `turn` may be next."""
        self._arrivals += 1
        waiter.order = (waiter.ask.priority, self._arrivals)
        bisect.insort(self._waiting, waiter, key=lambda each: each.order)

    def drop(self, waiter: Waiter) -> None:
        """It waits no more; unknown ones are ignored."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def turn(self, nodes: Collection[Node]) -> None:
        """Give room to whom it is due. `nodes`: all that there are."""
        wanted: set[Node] = set()
        for waiter in list(self._waiting):
            if len(wanted) >= len(nodes):
                return
            free = [node for node in waiter.candidates() if node not in wanted]
            roomy = [node for node in free if has_room(node, waiter.ask)]
            if roomy:
                self._waiting.remove(waiter)
                waiter.grant(roomy)
            else:
                wanted.update(free)
