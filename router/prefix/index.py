"""An index of what nodes have in their prefix caches, by untokenized prompts. Pure.

For a node that tells KV events, the text leads to the keys of blocks (router/prefix/text_tree.py),
and these to the nodes that hold them. Running requests count, too: what they compute is there for
the next. For other nodes the index goes by what this router has sent there.

Texts are kept as 64-bit hashes by a secret of this process; they cannot be read back.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from kvrelay.router.prefix.text_tree import CHUNK_BYTES, Edge, TextTree
from kvrelay.wire.outputs import PromptBlocks
from kvrelay.wire.step_costs import RunningMean

__all__ = ["HeldBlocks", "Prefix", "PrefixIndex", "Sent"]

MAX_TEXT_BYTES = 512 << 10
"""The text of a prompt that is looked at: 128,000 tokens, in 2 ms. The rest counts as new."""
MAX_BLOCKS = 4_000_000
"""Known blocks: about 100 bytes each, and 330 GPUs with pools of 12,000 blocks of 8 MiB."""
# What is known of nodes that are gone is cleared when there are so many of them.
_GONE_TOGETHER = 64
_SWEEP = 1_000  # keys: 4,000,000 at once would stop all streams for half a second
_CHUNKS = re.compile(rb"(?s).{1,%d}" % CHUNK_BYTES).findall  # three times as fast as slices
_TOKENS_PER_BYTE = 0.25  # English text, until prompts were seen
_PROMPTS_MEAN = 32


Sent = tuple[Edge, int]


class HeldBlocks:
    """A table of which nodes hold which blocks, by key (64 bits of a hash, wire/kv_events.py).

    By block, so that a prompt is looked up for all nodes at once. Nodes are bits of one integer, a
    *mark* each.
    """

    def __init__(self, limit: int = MAX_BLOCKS) -> None:
        self._limit = limit
        self._holders: dict[int, int] = {}
        self._unswept: list[int] = []
        self.sweeping = 0
        """Marks that are being cleared, a piece whenever blocks change."""

    def __len__(self) -> int:
        return len(self._holders)

    def stored(self, mark: int, keys: Iterable[int]) -> None:
        holders = self._holders
        for key in keys:
            holders[key] = holders.get(key, 0) | mark
        while len(holders) > self._limit:
            for key in list(islice(holders, self._limit // 8)):
                del holders[key]
        self._sweep()

    def removed(self, mark: int, keys: Iterable[int]) -> None:
        for key in keys:
            self._clear(key, mark)
        self._sweep()

    def steps(self, keys: Sequence[int], marks: int) -> list[tuple[int, int]]:
        """Return how many of these blocks, from the first on, nodes hold; the most come last."""
        found: list[tuple[int, int]] = []
        for at, key in enumerate(keys):
            left = self._holders.get(key, 0) & marks
            if left != marks:
                if at:
                    found.append((at, marks))
                marks = left
            if not marks:
                return found
        return [*found, (len(keys), marks)] if keys else found

    def forget(self, marks: int) -> None:
        """Begin to clear marks that no node has any more; the table is too large to do it at once."""
        self.sweeping, self._unswept = marks, list(self._holders)

    def _sweep(self) -> None:
        for key in self._unswept[-_SWEEP:]:
            self._clear(key, self.sweeping)
        del self._unswept[-_SWEEP:]
        if not self._unswept:
            self.sweeping = 0

    def _clear(self, key: int, marks: int) -> None:
        left = self._holders.get(key, 0) & ~marks
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)


class Prefix(msgspec.Struct, frozen=True):
    """A prompt as the index knows it; the first of `chunks` also has what else decides its tokens.

    Once a node has tokenized it: the number of `tokens`, and the `keys` of its full blocks.
    """

    chunks: array[int]
    text_bytes: int
    keys: array[int] | None = None
    tokens: int = 0
    block_size: int = 0
    counted: bool = False
    """The text is a list of token ids, and says nothing of how many tokens other texts have."""

    @classmethod
    def of(cls, context: int, text: bytes, ids: int = 0) -> Prefix:
        """Return the prefix of a text; `context` is a hash of other fields that decide its tokens.

        `ids`: the number of token ids, if the prompt came as such.
        """
        chunks = array("q", map(hash, _CHUNKS(text[:MAX_TEXT_BYTES]) or [b""]))
        chunks[0] = hash((context, chunks[0]))
        return cls(chunks, len(text), tokens=ids, counted=ids > 0)

    def known(self, blocks: PromptBlocks, tokens: int) -> Prefix:
        halves = array("Q")
        halves.frombytes(blocks.hashes[: len(blocks.hashes) // 16 * 16])
        return msgspec.structs.replace(
            self, keys=halves[::2], tokens=tokens, block_size=blocks.block_size
        )


class PrefixIndex:
    def __init__(self) -> None:
        self.texts = TextTree()
        self.blocks = HeldBlocks()
        self._marks: dict[str, int] = {}
        # Marks of nodes whose events are believed, and of those that are gone: the latter are
        # cleared together.
        self._trusted = self._gone = 0
        self._block_size = 0  # the last seen
        self._tokens_per_byte = RunningMean(_TOKENS_PER_BYTE, _PROMPTS_MEAN)

    def lookup(self, prefix: Prefix) -> tuple[int, dict[str, int]]:
        """Return a prompt's tokens, an estimate until it is tokenized, and those cached by URL."""
        path = self.texts.path(prefix.chunks)
        keys, block_size, tokens = prefix.keys, prefix.block_size, prefix.tokens
        per_byte = tokens / prefix.text_bytes if tokens else self._tokens_per_byte.value
        if keys is None:
            keys, depth = self.texts.known_keys(path)
            block_size = self._block_size
            tokens = len(keys) * block_size + int(
                max(0, prefix.text_bytes - depth * CHUNK_BYTES) * per_byte
            )
        sent, going = self.texts.steps(path)
        cached: dict[str, int] = {}
        for steps, unit, counts in (
            (self.blocks.steps(keys, self._trusted), block_size, self._trusted),
            (sent, CHUNK_BYTES * per_byte, ~self._trusted),
            (going, CHUNK_BYTES * per_byte, self._trusted),
        ):
            deeper = 0  # whoever is deep in the text has its beginning, too
            for depth, marks in reversed(steps):
                if here := marks & counts & ~deeper:
                    has = min(tokens, int(depth * unit))
                    cached |= {
                        url: max(has, cached.get(url, 0))
                        for url, mark in self._marks.items()
                        if mark & here
                    }
                deeper = marks
        return tokens, cached

    def send(self, prefix: Prefix, url: str) -> Sent:
        """Note that a request with this prompt begins on a node; the result is for `end`."""
        mark = self._mark(url)
        return self.texts.send(prefix.chunks, mark), mark

    def end(self, sent: Sent) -> None:
        self.texts.end(*sent)

    def learn(self, prefix: Prefix) -> None:
        if prefix.keys is None or not (prefix.tokens and prefix.block_size and prefix.text_bytes):
            return
        self._block_size = prefix.block_size
        looked_at = min(prefix.text_bytes, MAX_TEXT_BYTES) * prefix.tokens // prefix.text_bytes
        self.texts.learn(prefix.chunks, prefix.keys[: looked_at // prefix.block_size])

    def counted(self, prefix: Prefix, tokens: int) -> None:
        if tokens and prefix.text_bytes and not prefix.counted:
            self._tokens_per_byte.add(tokens / prefix.text_bytes)

    def stored(self, url: str, keys: Iterable[int]) -> None:
        self.blocks.stored(self._mark(url), keys)

    def removed(self, url: str, keys: Iterable[int]) -> None:
        self.blocks.removed(self._mark(url), keys)

    def trust(self, url: str) -> None:
        self._trusted |= self._mark(url)

    def doubt(self, url: str) -> None:
        """Go by what was sent to a node until it is trusted again."""
        self._trusted &= ~self._mark(url)

    def trusts(self, url: str) -> bool:
        return bool(self._trusted & self._marks.get(url, 0))

    def forget(self, url: str) -> None:
        mark = self._marks.pop(url, 0)
        self._trusted &= ~mark
        self._gone |= mark
        if self._gone.bit_count() >= _GONE_TOGETHER and not self.blocks.sweeping:
            self.blocks.forget(self._gone)
            self.texts.forget(self._gone)
            self._gone = 0

    def _mark(self, url: str) -> int:
        # The lowest bit that is free, or integers would grow for ever.
        mark = self._marks.get(url)
        if mark is None:
            used = sum(self._marks.values()) | self._gone | self.blocks.sweeping
            mark = self._marks[url] = ~used & (used + 1)
        return mark
