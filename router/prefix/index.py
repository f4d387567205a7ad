"""How much of a prompt each node has in its prefix cache, before anybody has tokenized it. Pure.

Of a node that tells KV events it is what the events say: the text leads to the keys of blocks
(router/prefix/text_tree.py), as nodes have called them when they were sent such texts, and these to
the nodes that hold them (router/prefix/held_blocks.py). vLLM's nodes call the same block otherwise
each, so theirs are called by their content (router/prefix/contents.py), and texts lead to these
apart from those of our nodes. Requests that are under way count too: what they compute is there for
whoever comes next. Of a node whose events are not to be had, or not in order, or begin too late, it
is what this router has sent there.

Texts are kept as 64-bit hashes of their chunks, by a secret of this process; they cannot be read
back.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

import msgspec

from kvrelay.router.prefix.contents import BlockContents
from kvrelay.router.prefix.held_blocks import HeldBlocks
from kvrelay.router.prefix.text_tree import CHUNK_BYTES, Edge, TextTree
from kvrelay.wire.means import RunningMean
from kvrelay.wire.outputs import PromptBlocks

__all__ = ["Prefix", "PrefixIndex", "Sent"]

MAX_TEXT_BYTES = 512 << 10
"""Of a prompt that are looked at: 128,000 tokens, in 2 ms. What is behind counts as new."""
# What is forgotten of nodes that are gone is cleared when there are so many of them.
_GONE_TOGETHER = 64
_CHUNKS = re.compile(rb"(?s).{1,%d}" % CHUNK_BYTES).findall  # three times as fast as slices
_TOKENS_PER_BYTE = 0.25  # English text, until prompts were seen
_PROMPTS_MEAN = 32


Sent = tuple[Edge, int]
"""A leg under way: where its text ends, and its node's mark."""


class Prefix(msgspec.Struct, frozen=True):
    """A prompt as the index knows it. In the first of `chunks` is also what decides its tokens
    beside the text.

    Once a node has tokenized it: `tokens` of them, and `keys` of the full blocks of `block_size`
    each. `by_content`: keys are those of router/prefix/contents.py, not nodes' own names.
    """

    chunks: array[int]
    text_bytes: int
    keys: array[int] | None = None
    tokens: int = 0
    block_size: int = 0
    by_content: bool = False
    counted: bool = False
    """The text is a list of token ids: it says nothing of how long other texts are in tokens."""

    @classmethod
    def of(cls, context: int, text: bytes, ids: int = 0) -> Prefix:
        """Make one. `context`: a hash of the fields beside the text that decide its tokens. `ids`:
        its token ids.
        """
        chunks = array("q", map(hash, _CHUNKS(text[:MAX_TEXT_BYTES]) or [b""]))
        chunks[0] = hash((context, chunks[0]))
        return cls(chunks, len(text), tokens=ids, counted=ids > 0)

    def known(self, blocks: PromptBlocks, tokens: int) -> Prefix:
        """Return the same prompt, of which a node has said what its blocks are called."""
        halves = array("Q")
        halves.frombytes(blocks.hashes[: len(blocks.hashes) // 16 * 16])
        return self.called(halves[::2], tokens, blocks.block_size)

    def called(self, keys: array[int], tokens: int, block_size: int) -> Prefix:
        """Return the same prompt, the keys of whose blocks are known otherwise."""
        return msgspec.structs.replace(self, keys=keys, tokens=tokens, block_size=block_size)

    def for_contents(self) -> Prefix:
        """Return the same prompt, for nodes whose blocks are called by their content."""
        chunks = self.chunks[:]
        chunks[0] = hash(("content", chunks[0]))
        return msgspec.structs.replace(self, chunks=chunks, by_content=True)


class PrefixIndex:
    """A record of all nodes, by URL; those it has not heard of have nothing."""

    def __init__(self) -> None:
        self.texts = TextTree()
        self.blocks = HeldBlocks()
        self.contents: dict[str, BlockContents] = {}
        """Of the nodes whose blocks are called by it, by URL."""
        self._marks: dict[str, int] = {}
        self._trusted = 0
        """The marks of nodes whose events are believed."""
        self._unsure = 0
        """Of nodes that may hold more than was told of them."""
        self._gone = 0
        """Of nodes that are no more; they are cleared together."""
        self._block_size = {False: 0, True: 0}
        """As last seen, by whether blocks are called by their content."""
        self._tokens_per_byte = RunningMean(_TOKENS_PER_BYTE, _PROMPTS_MEAN)

    # --- requests
    # ------------------------------------------------------------------------------------------------

    def lookup(self, prefix: Prefix) -> tuple[int, dict[str, int]]:
        """Return how many tokens a prompt has, and how many of these each node has that has some,
        by URL.

        The first is an estimate until the prompt is tokenized.
        """
        path = self.texts.path(prefix.chunks)
        keys, block_size, tokens = prefix.keys, prefix.block_size, prefix.tokens
        per_byte = tokens / prefix.text_bytes if tokens else self._tokens_per_byte.value
        if keys is None:
            keys, depth = self.texts.known_keys(path)
            block_size = self._block_size[prefix.by_content]
            tokens = len(keys) * block_size + int(
                max(0, prefix.text_bytes - depth * CHUNK_BYTES) * per_byte
            )
        sent, going = self.texts.steps(path)
        cached: dict[str, int] = {}
        for steps, unit, counts in (
            (self.blocks.steps(keys, self._trusted), block_size, self._trusted),
            (sent, CHUNK_BYTES * per_byte, self._unsure),
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
        """Note that a leg with this prompt runs on a node from now on. What is returned is for
        `end`.
        """
        mark = self._mark(url)
        return self.texts.send(prefix.chunks, mark), mark

    def end(self, sent: Sent) -> None:
        """Note its end."""
        self.texts.end(*sent)

    def learn(self, prefix: Prefix) -> None:
        """Take over what a node has said of a prompt (Prefix.known)."""
        if prefix.keys is None or not (prefix.tokens and prefix.block_size and prefix.text_bytes):
            return
        self._block_size[prefix.by_content] = prefix.block_size
        looked_at = min(prefix.text_bytes, MAX_TEXT_BYTES) * prefix.tokens // prefix.text_bytes
        self.texts.learn(prefix.chunks, prefix.keys[: looked_at // prefix.block_size])

    def counted(self, prefix: Prefix, tokens: int) -> None:
        """Learn from a node's count of a prompt how long texts are in tokens."""
        if tokens and prefix.text_bytes and not prefix.counted:
            self._tokens_per_byte.add(tokens / prefix.text_bytes)

    def knows(self, prefix: Prefix) -> bool:
        """Say whether the blocks of all of its text were learned."""
        return self.texts.known_keys(self.texts.path(prefix.chunks))[1] == len(prefix.chunks)

    # --- KV events
    # -----------------------------------------------------------------------------------------------

    def stored(self, url: str, keys: Iterable[int]) -> None:
        """Note that a node holds these blocks."""
        self.blocks.stored(self._mark(url), keys)

    def removed(self, url: str, keys: Iterable[int]) -> None:
        """Note that it holds these no more."""
        self.blocks.removed(self._mark(url), keys)

    def trust(self, url: str, *, whole: bool = True) -> None:
        """Believe all that was told of this node, and from now on.

        Not `whole`: there is more than was told, so what was sent there counts, too."""
        mark = self._mark(url)
        self._trusted |= mark
        self._unsure = self._unsure & ~mark if whole else self._unsure | mark

    def doubt(self, url: str) -> None:
        """Go by what was sent there until it is trusted again: what was told of it may be old."""
        mark = self._mark(url)
        self._trusted &= ~mark
        self._unsure |= mark

    def trusts(self, url: str) -> bool:
        """Say whether this node's events are believed."""
        return bool(self._trusted & self._marks.get(url, 0))

    def forget(self, url: str) -> None:
        """Forget a node: it has nothing (it was restarted), or is gone."""
        mark = self._marks.pop(url, 0)
        self._trusted &= ~mark
        self._unsure &= ~mark
        self._gone |= mark
        self.blocks.sweep()  # events, which do so too, may never come
        if not self.blocks.sweeping and self._gone.bit_count() >= _GONE_TOGETHER:
            self.blocks.forget(self._gone)
            self.texts.forget(self._gone)
            self._gone = 0

    def _mark(self, url: str) -> int:
        """Return the node's mark: the lowest bit of which nothing is left, or integers grew for
        ever.
        """
        mark = self._marks.get(url)
        if mark is None:
            used = self._trusted | self._unsure | self._gone | self.blocks.sweeping
            mark = self._marks[url] = ~used & (used + 1)
            self._unsure |= mark
        return mark
