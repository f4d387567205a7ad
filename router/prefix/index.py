"""How much of a prompt each node has in its prefix cache, before anybody has tokenized it. Pure.

Of a node that tells KV events it is what the events say: the text leads to the keys of blocks
(router/prefix/text_tree.py), as nodes have called them when they were sent such texts, and these to the nodes that hold
them (router/prefix/held_blocks.py). vLLM's nodes call the same block otherwise each, so theirs are called by their
content (router/prefix/contents.py), and texts lead to these apart from those of our nodes. Legs that are under way
count too: what they compute is there for whoever comes next. Of a node whose events are not to be had, or not in order,
or begin too late, it is what this router has sent there.

Texts are kept as 64-bit hashes of their chunks, by a secret of this process; they cannot be read back.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from router.prefix.contents import BlockContents
from router.prefix.held_blocks import HeldBlocks
from router.prefix.text_tree import CHUNK_BYTES, Edge, Path, Step, TextTree
from wire.means import RunningMean
from wire.outputs import PromptBlocks

__all__ = ["Cached", "Prefix", "PrefixIndex", "Sent"]

MAX_TEXT_BYTES = 512 << 10
"""Of a prompt that are looked at: 128,000 tokens, in 2 ms. What is behind counts as new."""
# What is forgotten of nodes that are gone is cleared when there are so many of them.
_GONE_TOGETHER = 64
_CHUNKS = re.compile(rb"(?s).{1,%d}" % CHUNK_BYTES).findall  # three times as fast as slices
_TOKENS_PER_BYTE = 0.25  # English text, until prompts were seen
_PROMPTS_MEAN = 32


Sent = tuple[Edge, int]
"""A leg under way: where its text ends, and its node's number."""


class Prefix(msgspec.Struct, frozen=True):
    """By what the index knows a prompt. `chunks` begin with a number for all that decides its tokens beside the text.

    Once a node has tokenized it: `tokens` of them, and `keys` of the full blocks of `block_size` each. `by_content`:
    keys are those of router/prefix/contents.py, not nodes' own names."""

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
        """`context`: a hash of the fields beside the text that decide its tokens. `ids`: if it is made of so many."""
        looked_at = text[:MAX_TEXT_BYTES]
        chunks = array("q", [context, *map(hash, _CHUNKS(looked_at))])
        return cls(chunks, len(text), tokens=ids, counted=ids > 0)

    def known(self, blocks: PromptBlocks, tokens: int) -> Prefix:
        """The same prompt, of which a node has said what its blocks are called."""
        halves = array("Q")
        halves.frombytes(blocks.hashes[: len(blocks.hashes) // 16 * 16])
        return self.called(halves[::2], tokens, blocks.block_size)

    def called(self, keys: array[int], tokens: int, block_size: int) -> Prefix:
        """The same prompt, the keys of whose blocks are known otherwise."""
        return msgspec.structs.replace(self, keys=keys, tokens=tokens, block_size=block_size)

    def for_contents(self) -> Prefix:
        """The same prompt, for nodes whose blocks are called by their content."""
        chunks = self.chunks[:]
        chunks[0] = hash(("content", chunks[0]))
        return msgspec.structs.replace(self, chunks=chunks, by_content=True)


@dataclass(slots=True, eq=False)
class Cached(Mapping[str, int]):
    """Tokens of one prompt that each node is believed to have, by URL. Nodes that nobody asks for cost nothing."""

    prompt_tokens: int
    """Of the whole prompt; an estimate until it is tokenized."""
    _numbers: Mapping[str, int]
    _steps: tuple[list[Step], ...]
    path: Path
    """In the texts, when they had this `shape`."""
    shape: int

    def __getitem__(self, url: str) -> int:
        tokens = self._tokens(self._numbers[url])
        if not tokens:
            raise KeyError(url)
        return tokens

    def get(self, url: str, default: int = 0) -> int:  # type: ignore[override]
        """As of any mapping; the way that is fast."""
        number = self._numbers.get(url)
        return default if number is None else self._tokens(number) or default

    def __iter__(self) -> Iterator[str]:
        return (url for url, number in self._numbers.items() if self._tokens(number))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(self._steps)

    def _tokens(self, number: int) -> int:
        deepest = 0
        for steps in self._steps:
            for depth, marks in reversed(steps):
                if marks >> number & 1:
                    deepest = max(deepest, depth)
                    break
        return min(deepest, self.prompt_tokens)


def _in_tokens(steps: list[Step], chunk_tokens: float, marks: int) -> list[Step]:
    """For these nodes only. The first chunk has no bytes."""
    if not marks or not steps:
        return []
    return [(int((depth - 1) * chunk_tokens), marks & those) for depth, those in steps if depth > 1 and marks & those]


class PrefixIndex:
    """Of all nodes, by URL; those it has not heard of have nothing."""

    def __init__(self, texts: TextTree | None = None, blocks: HeldBlocks | None = None) -> None:
        self.texts = texts or TextTree()
        self.blocks = blocks or HeldBlocks()
        self.contents: dict[str, BlockContents] = {}
        """Of the nodes whose blocks are called by it, by URL."""
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._free: list[int] = []
        self._gone = 0
        self._clearing = 0
        self._known = 0
        self._trusted = 0
        self._partly = 0
        """Of those that are trusted: they hold more than was told of them."""
        self._block_size = {False: 0, True: 0}
        """As last seen, by whether blocks are called by their content."""
        self._tokens_per_byte = RunningMean(_TOKENS_PER_BYTE, _PROMPTS_MEAN)

    # --- requests ------------------------------------------------------------------------------------------------

    def lookup(self, prefix: Prefix) -> Cached:
        """What each node has of a prompt."""
        path = self.texts.path(prefix.chunks)
        keys, block_size, tokens = prefix.keys, prefix.block_size, prefix.tokens
        per_byte = tokens / prefix.text_bytes if tokens else self._tokens_per_byte.value
        if keys is None:
            keys, depth = self.texts.known_keys(path)
            block_size = self._block_size[prefix.by_content]
            unknown_bytes = prefix.text_bytes - max(0, depth - 1) * CHUNK_BYTES
            tokens = len(keys) * block_size + int(max(0, unknown_bytes) * per_byte)
        held = self.blocks.steps(keys, self._trusted) if self._trusted else []
        sent, going = self.texts.steps(path)
        chunk_tokens = CHUNK_BYTES * per_byte
        known_wholly = self._trusted & ~self._partly
        return Cached(
            tokens,
            self._numbers,
            (
                [(count * block_size, marks) for count, marks in held],
                _in_tokens(sent, chunk_tokens, self._known & ~known_wholly),
                _in_tokens(going, chunk_tokens, known_wholly),
            ),
            path,
            self.texts.shape,
        )

    def send(self, prefix: Prefix, url: str, found: Mapping[str, int] | None = None) -> Sent:
        """A leg with this prompt runs on a node from now on; for `end`. `found`: what a lookup has told of it."""
        number = self._number(url)
        path = found.path if isinstance(found, Cached) and found.shape == self.texts.shape else None
        return self.texts.send(prefix.chunks, number, path), number

    def end(self, sent: Sent) -> None:
        """It has ended."""
        self.texts.end(*sent)

    def learn(self, prefix: Prefix) -> None:
        """What a node has said of a prompt (Prefix.known)."""
        if prefix.keys is None or not prefix.tokens or not prefix.text_bytes:
            return
        self._block_size[prefix.by_content] = prefix.block_size
        per_byte = prefix.tokens / prefix.text_bytes
        if prefix.text_bytes <= MAX_TEXT_BYTES:
            keys = prefix.keys
        else:
            keys = prefix.keys[: int(MAX_TEXT_BYTES * per_byte) // prefix.block_size]
        self.texts.learn(prefix.chunks, keys, CHUNK_BYTES * per_byte / prefix.block_size)

    def counted(self, prefix: Prefix, tokens: int) -> None:
        """Learn from a node's count of a prompt how long texts are in tokens."""
        if tokens and prefix.text_bytes and not prefix.counted:
            self._tokens_per_byte.add(tokens / prefix.text_bytes)

    def knows(self, prefix: Prefix) -> bool:
        """Whether the blocks of all of its text were learned."""
        return self.texts.known_keys(self.texts.path(prefix.chunks))[1] == len(prefix.chunks)

    # --- KV events -----------------------------------------------------------------------------------------------

    def stored(self, url: str, keys: Iterable[int]) -> None:
        """A node holds these blocks."""
        self.blocks.stored(1 << self._number(url), keys)

    def removed(self, url: str, keys: Iterable[int]) -> None:
        """It holds these no more."""
        self.blocks.removed(1 << self._number(url), keys)

    def trust(self, url: str, *, whole: bool = True) -> None:
        """All that was told of this node is true from now on.

        Not `whole`: there is more than was told, so what was sent there counts, too."""
        mark = 1 << self._number(url)
        self._trusted |= mark
        self._partly = self._partly & ~mark if whole else self._partly | mark

    def doubt(self, url: str) -> None:
        """What was told of it may be old: what was sent there counts, until it is trusted again."""
        self._trusted &= ~(1 << self._number(url))

    def trusts(self, url: str) -> bool:
        """Whether this node's events are believed."""
        return url in self._numbers and bool(self._trusted >> self._numbers[url] & 1)

    def forget(self, url: str) -> None:
        """A node has nothing (it was restarted), or is gone."""
        number = self._numbers.pop(url, None)
        if number is not None:
            self._known &= ~(1 << number)
            self._trusted &= self._known
            self._partly &= self._known
            self._gone |= 1 << number
            self._recycle()

    # --- inside --------------------------------------------------------------------------------------------------

    def _number(self, url: str) -> int:
        number = self._numbers.get(url)
        if number is None:
            if not self._free:
                self._free.append(self._next)
                self._next += 1
            number = self._numbers[url] = self._free.pop()
            self._known |= 1 << number
        return number

    def _recycle(self) -> None:
        """Numbers of nodes that are gone are given again once nothing is left of them; else integers grew for ever."""
        self.blocks.sweep()  # events, which do so too, may never come
        if self.blocks.sweeping:
            return
        self._free += [number for number in range(self._next) if self._clearing >> number & 1]
        self._clearing = 0
        if self._gone.bit_count() >= _GONE_TOGETHER:
            self._clearing, self._gone = self._gone, 0
            self.blocks.forget(self._clearing)
            self.texts.forget(self._clearing)
