"""What the engine process tells of its prefix cache: which blocks are held, and what those of a
prompt are called.

Costs nothing where nobody asks for it, and a message a few times a second where somebody does,
never one per step.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.request import Request
from kvrelay.wire.engine_messages import CacheChanges
from kvrelay.wire.outputs import PromptBlocks

__all__ = ["CacheTeller"]

# Each telling costs a message to every router, and what a router believes may be as old.
_INTERVAL_S = 0.05


class CacheTeller:
    """`told` is called with the changes, and with `texts` also with what is in the blocks. With
    `on` false: never.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        told: Callable[[CacheChanges], None],
        *,
        on: bool,
        texts: bool = False,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._told = told
        self._on = on
        self._due = 0.0
        if on:
            pool.note_changes(texts=texts)

    def turn(self, now: float, *, idle: bool) -> None:
        """Tell what has changed, if it is time to; before the loop goes to sleep it always is."""
        if self._pool.changed and (idle or now >= self._due):
            self._due = now + _INTERVAL_S
            changes = self._pool.changes()
            self._told(
                CacheChanges(
                    changes.stored, list(changes.removed), changes.texts, cleared=changes.cleared
                )
            )

    def blocks_of(self, request: Request) -> PromptBlocks | None:
        """What a router must know to find this prompt in KV events."""
        if not self._on:
            return None
        hashes = request.block_hashes(self._block_size)[: request.prompt_tokens // self._block_size]
        return PromptBlocks(self._block_size, b"".join(hashes))
