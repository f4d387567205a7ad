"""Blocks that belong to no request any more and are not free yet. Pure.

*Held*: their KV is kept under a lease, for a reader. *Unsettled*: a transfer that nobody waits for
may still write to them; they are in quarantine.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.paged_engine.blocks import BlockPool

__all__ = ["KeptBlocks"]


class KeptBlocks:
    """Each goes in once and comes back to the pool once, by the id of the request or probe that had
    them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[str, list[int]] = {}
        self._unsettled: dict[str, list[int]] = {}

    def hold(self, request_id: str, blocks: list[int]) -> None:
        """Keep them until `released`."""
        self._held[request_id] = blocks

    def held(self, request_id: str) -> list[int] | None:
        """The blocks held for this request, in token order."""
        return self._held.get(request_id)

    def held_for(self, call_id: str) -> list[str]:
        """Ids of held requests that are `call_id` or were made for the call of that id (`<call
        id>-<suffix>`).
        """
        return [name for name in self._held if call_id in (name, name.rpartition("-")[0])]

    def released(self, request_id: str) -> None:
        """Nobody will read the blocks held for this request."""
        self._pool.give_back(self._held.pop(request_id, []))

    def quarantine(self, request_id: str, blocks: Sequence[int], shared: int = 0) -> None:
        """A transfer may still write to these blocks, except the first `shared`: untouchable until
        `settled`.
        """
        self._unsettled[request_id] = list(blocks)
        self._pool.quarantine(blocks[shared:])

    def set_aside(self, probe_id: str) -> None:
        """A transfer may still write to the blocks held for this probe: untouchable until
        `settled`.
        """
        self.quarantine(probe_id, self._held.pop(probe_id))

    def settled(self, request_id: str) -> None:
        """No transfer can touch the blocks of a failed or aborted fetch any more."""
        blocks = self._unsettled.pop(request_id, [])
        self._pool.leave_quarantine(blocks)
        self._pool.give_back(blocks)

    @property
    def num_held(self) -> int:
        """Blocks kept under a lease."""
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def blocks(self) -> list[int]:
        """All of them."""
        return [
            block
            for kept in (self._held, self._unsettled)
            for blocks in kept.values()
            for block in blocks
        ]
