"""An index of what nodes have in their prefix caches, by untokenized prompts. Pure.

A node with KV events has the blocks it told of; the text of a prompt leads to their keys. Running
requests count, too. Any other node has what this router has sent there.

A text is a sequence of chunks, each named by a 64-bit hash of all text up to its end, by a secret
of this process. Blocks are chained as well, and caches evict the end of a prefix first: a name
implies those before it, and a bisection finds how deep a node is.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import msgspec

from kvrelay.wire.kv_events import GPU
from kvrelay.wire.ladder import History, place_of
from kvrelay.wire.outputs import PromptBlocks
from kvrelay.wire.step_costs import RunningMean

__all__ = ["CHUNK_BYTES", "MAX_TEXT_BYTES", "Prefix", "PrefixIndex", "Sent"]

CHUNK_BYTES = 128
"""The text of one chunk, about two blocks of 16 tokens."""
MAX_TEXT_BYTES = 512 << 10
"""The text of a prompt that is looked at: 128,000 tokens; the rest is new."""
MAX_BLOCKS = 4_000_000
"""Blocks of all nodes in one medium, about 100 bytes each; each node may have an equal share."""
MAX_SENT = 640_000
"""Chunks sent to all nodes, about 100 bytes each, shared alike: 80 MiB of text."""
MAX_LEARNED = 400_000
"""Chunks whose blocks are known, about 200 bytes each: 12,000 prompts of 4 KB that share nothing."""
_CHUNKS = re.compile(rb"(?s).{1,%d}" % CHUNK_BYTES).findall  # three times as fast as slices
_TOKENS_PER_BYTE = 0.25  # English text, until prompts were seen
_PROMPTS_MEAN = 32

Sent = tuple[Counter[int], Sequence[int]]


class Prefix(msgspec.Struct, frozen=True):
    """A prompt by its chunks, which also name what else decides its tokens.

    Once tokenized: the number of `tokens`, and the `keys` of its full blocks.
    """

    chunks: array[int]
    text_bytes: int
    keys: array[int] | None = None
    tokens: int = 0
    block_size: int = 0
    counted: bool = False
    """The text is token ids, and says nothing of other texts' tokens."""

    @classmethod
    def of(cls, context: int, text: bytes, ids: int = 0) -> Prefix:
        """Return the prefix of a text; `context` is a hash of other fields that decide its tokens.

        `ids`: the number of token ids, if the prompt came as such.
        """
        pieces = _CHUNKS(text[:MAX_TEXT_BYTES]) or [b""]
        names = accumulate(pieces, lambda before, piece: hash((before, piece)), initial=context)
        return cls(array("q", islice(names, 1, None)), len(text), tokens=ids, counted=ids > 0)

    def known(self, blocks: PromptBlocks, tokens: int) -> Prefix:
        halves = array("Q")
        halves.frombytes(blocks.hashes[: len(blocks.hashes) // 16 * 16])
        return msgspec.structs.replace(
            self, keys=halves[::2], tokens=tokens, block_size=blocks.block_size
        )


@dataclass(eq=False, slots=True)
class _Node:
    held: dict[str, dict[int, float]] = field(default_factory=dict)  # block keys by medium
    sent: dict[int, None] = field(default_factory=dict)  # chunks, the oldest first; without events
    running: Counter[int] = field(default_factory=Counter)  # requests by chunk


class PrefixIndex:
    def __init__(self) -> None:
        self._nodes: defaultdict[str, _Node] = defaultdict(_Node)
        self.history = History[int]()
        self._learned: dict[int, array[int]] = {}
        """Keys of the blocks that end in a chunk, and by ~chunk all behind a whole prompt's last."""
        self._block_size = 0
        self._tokens_per_byte = RunningMean(_TOKENS_PER_BYTE, _PROMPTS_MEAN)

    def lookup(self, prefix: Prefix) -> tuple[int, dict[str, int], dict[str, tuple[int, int]]]:
        """Return a prompt's tokens (an estimate until tokenized), and those cached by URL.

        They are in pools, or in further media if these have more.
        """
        chunks, keys, tokens = prefix.chunks, prefix.keys, prefix.tokens
        block_size = prefix.block_size or self._block_size
        per_byte = tokens / prefix.text_bytes if tokens else self._tokens_per_byte.value
        if keys is None:
            depth, keys = _depth(chunks[::-1], self._learned), array("Q")
            for chunk in chunks[:depth]:
                keys += self._learned[chunk]
            new_bytes = max(0, prefix.text_bytes - depth * CHUNK_BYTES)
            tokens = len(keys) * block_size + int(new_bytes * per_byte)
            if depth:
                keys += self._learned.get(~chunks[depth - 1], array("Q"))
        cached: dict[str, int] = {}
        below: dict[str, tuple[int, int]] = {}
        chunks, keys = chunks[::-1], keys[::-1]
        for url, node in self._nodes.items():
            texts: Container[int] = node.running if node.held else node.sent
            has = int(_depth(chunks, texts) * CHUNK_BYTES * per_byte)
            depth, reach = 0, []
            for names in node.held.values():
                depth += _depth(keys[:-depth] if depth else keys, names)
                reach.append(depth * block_size)
            if has or depth:
                reach = [max(has, each) for each in reach or [0]]
                if reach[0]:
                    cached[url] = reach[0]
                if reach[-1] > reach[0]:
                    below[url] = reach[1], reach[-1]
        return tokens, cached, below

    def send(self, prefix: Prefix, url: str) -> Sent:
        """Note that a request with this prompt begins on a node; the result is for `end`."""
        node = self._nodes[url]
        node.running.update(prefix.chunks)
        if not node.held:
            _keep(node.sent, dict.fromkeys(prefix.chunks), MAX_SENT // len(self._nodes))
        return node.running, prefix.chunks

    @staticmethod
    def end(sent: Sent) -> None:
        running, chunks = sent
        running.subtract(chunks)
        for chunk in chunks:
            if not running[chunk]:
                del running[chunk]

    def learn(self, prefix: Prefix, url: str) -> None:
        """Take over the keys of a prompt's blocks, taken to be spread evenly over its text.

        `url` is the node that named them.
        """
        if prefix.keys is None or not (prefix.tokens and prefix.block_size and prefix.text_bytes):
            return
        self._block_size = prefix.block_size
        text_bytes = min(prefix.text_bytes, MAX_TEXT_BYTES)
        count = text_bytes * prefix.tokens // prefix.text_bytes // prefix.block_size
        keys, begin, learned = prefix.keys[:count], 0, {}
        for at, chunk in enumerate(prefix.chunks, 1):
            end = len(keys) * min(at * CHUNK_BYTES, text_bytes) // text_bytes
            learned[chunk], begin = keys[begin:end], end
        self._learn(learned, url)

    def answered(self, prefix: Prefix, url: str) -> None:
        """Take over the keys of a prompt with those of its answer, which the next turn has, too."""
        full = min(prefix.text_bytes, MAX_TEXT_BYTES) // CHUNK_BYTES
        if full and prefix.keys is not None:
            last = prefix.chunks[full - 1]
            if last not in self._learned:
                self.learn(prefix, url)
            known = prefix.tokens // prefix.block_size * full * CHUNK_BYTES // prefix.text_bytes
            self._learn({~last: prefix.keys[known:]}, url)

    def _learn(self, new: dict[int, array[int]], url: str) -> None:
        # A node of the release before tells nothing, and may name the same blocks otherwise.
        old = () if self.follows(url) else self._learned
        new = {chunk: keys for chunk, keys in new.items() if chunk not in old}
        _keep(self._learned, new, MAX_LEARNED)

    def counted(self, prefix: Prefix, tokens: int) -> None:
        if tokens and prefix.text_bytes and not prefix.counted:
            self._tokens_per_byte.add(tokens / prefix.text_bytes)

    def changed(
        self,
        url: str,
        stored: Iterable[int],
        removed: Iterable[int] = (),
        at: float = 0.0,
        *,
        cleared: bool = False,
        medium: str = GPU,
    ) -> None:
        """Follow an event of a node's cache; the first one of a medium is `cleared`."""
        node = self._nodes[url]
        node.sent = {}
        where = place_of(url, medium)
        node.held[medium] = held = self.history.changed(where, stored, removed, at, cleared=cleared)
        for key in list(islice(held, max(0, len(held) - MAX_BLOCKS // len(self._nodes)))):
            del held[key]

    def lost(self, url: str) -> None:
        """Go by what is sent to a node from now on, as it tells no more events."""
        if url in self._nodes:
            for medium in self._nodes[url].held:
                self.history.left(place_of(url, medium))
            self._nodes[url].held.clear()

    def follows(self, url: str) -> bool:
        return url in self._nodes and GPU in self._nodes[url].held

    def forget(self, url: str) -> None:
        self.lost(url)
        self._nodes.pop(url, None)

    def texts(self) -> int:
        return len(self._learned)

    def blocks(self) -> int:
        return sum(len(each) for node in self._nodes.values() for each in node.held.values())


def _depth(names: Sequence[int], held: Container[int]) -> int:
    """Return how many names, from the first on, are held; `names` are in reverse."""
    if not names or names[-1] not in held:
        return 0
    return len(names) - bisect_left(names, True, key=held.__contains__)  # no Python a step


def _keep(kept: dict[int, Any], new: dict[int, Any], most: int) -> None:
    # The beginning of a text is younger than its end, so that the end goes first.
    for chunk in reversed(new):
        kept.pop(chunk, None)
        kept[chunk] = new[chunk]
    if len(kept) > most:  # an eighth at once: to find the oldest takes as long as many
        for chunk in list(islice(kept, len(kept) - most * 7 // 8)):
            del kept[chunk]
