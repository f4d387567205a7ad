"""How much KV room a decode node has left for new requests, in blocks. Pure.

A node reports its free blocks; what our own legs there will still take is reserved: what each was reckoned to need in
all (prompt and expected output), less what it had when the node reported. All sums are kept as they change, so asking
costs nothing however many legs there are.
"""

from __future__ import annotations

from router.policies.policy import Ask, NodeView
from wire.config import Role

__all__ = ["Credit", "Reservation", "blocks_of", "likely_kv_tokens"]


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that so many tokens fill or begin."""
    return -(-tokens // block_size)


def likely_kv_tokens(ask: Ask, node: NodeView) -> int:
    """Of KV that a leg will need there in all. What the node has cached counts: it is among its free blocks."""
    prompt = max(ask.tokens, ask.kv_tokens)
    return prompt + (round(node.rates.output_tokens(ask.output_tokens)) if ask.role is Role.DECODE else 0)


class Reservation:
    """One leg's blocks on one node: what it will need, and what it has by now."""

    __slots__ = ("blocks", "held")

    def __init__(self, blocks: int = 0) -> None:
        self.blocks = blocks
        self.held = 0


class Credit:
    """Of one decode node."""

    def __init__(self) -> None:
        self._reserved = 0
        self._held = 0
        self._counted = 0  # of what is held, that which the last report's free blocks lack

    def reserve(self, blocks: int) -> Reservation:
        """A leg goes there that will need so many."""
        self._reserved += blocks
        return Reservation(blocks)

    def holds(self, leg: Reservation, blocks: int) -> None:
        """The node has shown that the leg has so many blocks by now; never fewer than before."""
        more = blocks - leg.held
        if more <= 0:
            return
        leg.held = blocks
        self._held += more
        if blocks > leg.blocks:  # longer than expected
            self._reserved += blocks - leg.blocks
            leg.blocks = blocks

    def give_back(self, leg: Reservation) -> None:
        """The leg has ended."""
        self._reserved -= leg.blocks
        self._held -= leg.held
        # A little too much if it has grown since the report: the node seems fuller until the next one.
        self._counted = max(0, self._counted - leg.held)

    def reported(self) -> None:
        """The node has just told its free blocks."""
        self._counted = self._held

    def left(self, free_blocks: int) -> int:
        """Of the blocks that the node last reported as free, those that nobody is reckoned to need. May be negative."""
        return free_blocks - max(0, self._reserved - self._counted)
