"""Names the blocks of vLLM nodes by their content. Pure.

Each vLLM node hashes with a seed of its own, so the same block has another name on every node, and
no prompt leads to either. But its events say which tokens a block has and which block is before it.
A key made of these is the same for all nodes, and can be made of any prompt whose tokens are known.
Keys are 64 bits of a hash by a secret of this process: the tokens cannot be read back.

What else decides KV counts, too, as far as events tell it: the adapter's name, the salt, a block's
images. Older versions tell neither (adapters by numbers of their own): their blocks with adapters
are left out, and those with a salt are taken for blocks without.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from kvrelay.wire.kv_events import BlockRemoved, BlockStored, key_of

__all__ = ["BlockContents", "keys_of_prompt"]

LIMIT = 1_000_000
"""Blocks of one node that are told apart: about 120 bytes each."""
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_TOKEN_BYTES = 8


def keys_of_prompt(
    tokens: Sequence[int], block_size: int, adapter: str = "", salt: str = ""
) -> array[int]:
    """Return the keys of the full blocks of a prompt; without an adapter, for the model itself."""
    extras = [[salt]] if salt else []
    return array("Q", _chain(_first(adapter), _blocks(tokens, block_size), extras))


class BlockContents:
    """A table of one node's blocks, by the node's names for them."""

    def __init__(self, *, whole: bool) -> None:
        """`whole`: the node tells of all that it holds from now on."""
        self.tells_prompts = True
        """The node's answers tell the tokens of prompts; else no prompt leads to these keys."""
        self.block_size = 0
        """0 until some blocks are told of."""
        self.aliases: Collection[str] = ()
        """Further names of the node's model, which are no adapters."""
        self._whole = whole
        self._keys: dict[int, int] = {}
        # A block that two requests have computed at the same time is there twice, and is told so.
        self._copies: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def whole(self) -> bool:
        """Return whether a block that is not known here is not on the node."""
        return self._whole and self.tells_prompts

    def stored(self, event: BlockStored) -> list[int]:
        """Return the keys of new blocks; none of a chain whose beginning is not known."""
        keys: list[int] = []
        for name, key in zip(map(key_of, event.block_hashes), self._keys_in(event), strict=False):
            if name in self._keys:
                self._copies[name] = self._copies.get(name, 1) + 1
            elif len(self._keys) >= LIMIT:
                self._whole = False
                break
            else:
                self._keys[name] = key
            keys.append(self._keys[name])
        return keys

    def removed(self, event: BlockRemoved) -> list[int]:
        """Return the keys of blocks that are not there any more."""
        gone: list[int] = []
        for name in map(key_of, event.block_hashes):
            copies = self._copies.pop(name, 1) - 1
            if copies > 1:
                self._copies[name] = copies
            elif not copies and (key := self._keys.pop(name, None)) is not None:
                gone.append(key)
        return gone

    def clear(self, *, whole: bool) -> None:
        """Forget all blocks; not `whole`: the node may hold some."""
        self._keys.clear()
        self._copies.clear()
        self._whole = whole

    def _keys_in(self, event: BlockStored) -> Iterable[int]:
        adapter, before = event.lora_name or "", None
        blocks = _blocks(event.token_ids, event.block_size)
        if blocks and len(event.token_ids) == len(event.block_hashes) * event.block_size:
            if event.parent_block_hash is not None:
                before = self._keys.get(key_of(event.parent_block_hash))
            elif adapter or event.lora_id is None:
                before = _first(adapter)
        if before is None:
            self._whole = False
            return ()
        self.block_size = event.block_size
        extras = [
            [each for each in extra if each != adapter] if isinstance(extra, list) else []
            for extra in (event.extra_keys if isinstance(event.extra_keys, list) else [])
        ]
        return _chain(before, blocks, extras)


def _blocks(tokens: Sequence[int], block_size: int) -> list[bytes]:
    try:
        packed, size = array("q", tokens).tobytes(), block_size * _TOKEN_BYTES
    except OverflowError:
        return []
    ends = range(size, len(packed) + 1, size) if size > 0 else ()
    return [packed[end - size : end] for end in ends]


def _first(adapter: str) -> int:
    return hash(("", adapter)) & _MASK


def _chain(before: int, blocks: Sequence[bytes], extras: Sequence[Sequence[Any]]) -> Iterator[int]:
    """Yield the keys of blocks that follow each other; `extras`: what else counts for the first."""
    for at, block in enumerate(blocks):
        extra = extras[at] if at < len(extras) else ()
        before = hash((before, block, msgspec.msgpack.encode(extra) if extra else b"")) & _MASK
        yield before
