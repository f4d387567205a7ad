"""A radix tree over the texts of prompts: which nodes got each, and which blocks it has. Pure.

A text is a sequence of chunks, each a number. An edge holds a run of chunks that no text has left
yet, the *marks* (a bit per node) of the nodes that were sent a text through it and, once a node has
named the blocks of such a text, the keys of the blocks that end in it. Where a block ends is known
where two texts part; in between it is taken to be proportional. The least recently used texts go
first.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections import OrderedDict

__all__ = ["CHUNK_BYTES", "Edge", "Path", "Step", "TextTree"]

CHUNK_BYTES = 64
"""The text of one chunk, about a block of 16 tokens: less finds no more blocks, and costs time."""
# An edge with its dict entries and arrays, without chunks and keys; measured with tracemalloc.
EDGE_BYTES = 700
_NUMBER_BYTES = 8
# 40,000 prompts of 4 KB that share nothing.
LIMIT_BYTES = 64 << 20

Step = tuple[int, int]
"""A depth in chunks, and the marks of the nodes that are that deep."""
Path = list[tuple["Edge", int]]
"""The edges of a text, each with the number of its chunks that are shared: all but in the last."""


class Edge:
    """A run of chunks. `sent` and `going` are marks; `under_way` counts running requests by mark."""

    __slots__ = ("children", "chunks", "going", "keys", "learned", "parent", "sent", "under_way")

    def __init__(self, parent: Edge | None, chunks: array[int]) -> None:
        self.parent = parent
        self.chunks = chunks
        self.children: dict[int, Edge] = {}
        self.keys: array[int] = array("Q")
        self.learned = False
        self.sent = 0
        self.going = 0
        self.under_way: dict[int, int] = {}

    @property
    def size_bytes(self) -> int:
        return EDGE_BYTES + _NUMBER_BYTES * (len(self.chunks) + len(self.keys))


class TextTree:
    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._root = Edge(None, array("q"))
        # Least recently used first; an edge is always behind all edges below it.
        self._edges: OrderedDict[Edge, None] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._edges)

    def path(self, chunks: array[int]) -> Path:
        at, edge = 0, self._root
        path: Path = []
        while at < len(chunks):
            child = edge.children.get(chunks[at])
            if child is None:
                break
            shared = _common(child.chunks, chunks[at : at + len(child.chunks)])
            path.append((child, shared))
            at += shared
            if shared < len(child.chunks):
                break
            edge = child
        return path

    @staticmethod
    def known_keys(path: Path) -> tuple[array[int], int]:
        """Return the keys of the blocks along a path, and the depth up to which they are known."""
        keys: array[int] = array("Q")
        depth = 0
        for edge, shared in path:
            if not edge.learned:
                break
            keys += edge.keys[: len(edge.keys) * shared // len(edge.chunks)]
            depth += shared
        return keys, depth

    @staticmethod
    def steps(path: Path) -> tuple[list[Step], list[Step]]:
        """Return how deep nodes were sent this text: ever, and by running requests; deepest last."""
        sent: list[Step] = []
        going: list[Step] = []
        depth = 0
        for edge, shared in path:
            depth += shared
            if edge.sent:
                sent.append((depth, edge.sent))
            if edge.going:
                going.append((depth, edge.going))
        return sent, going

    def send(self, chunks: array[int], mark: int) -> Edge:
        """Note that a request with this text begins on a node; return the last edge, for `end`."""
        edges = self._insert(chunks)
        for edge in edges:
            edge.sent |= mark
            edge.going |= mark
            edge.under_way[mark] = edge.under_way.get(mark, 0) + 1
        self._evict()
        return edges[-1]

    @staticmethod
    def end(last: Edge, mark: int) -> None:
        """Note the end of a request. An edge that was split since then still ends the text."""
        edge: Edge | None = last
        while edge is not None:
            count = edge.under_way.get(mark, 0)
            if count > 1:
                edge.under_way[mark] = count - 1
            elif count:
                del edge.under_way[mark]
                edge.going &= ~mark
            edge = edge.parent

    def learn(self, chunks: array[int], keys: array[int]) -> None:
        depth = before = 0
        for edge, shared in self.path(chunks):
            depth += shared
            if shared < len(edge.chunks):
                break  # the rest was evicted
            end = max(before, len(keys) * depth // len(chunks))
            if edge.learned:
                self._compare(edge, keys[before:], end - before)
            if not edge.learned or (
                depth == len(chunks) and not any(c.learned for c in edge.children.values())
            ):
                self._set_keys(edge, keys[before:end])
            before += len(edge.keys)
        self._evict()

    def forget(self, marks: int) -> None:
        for edge in self._edges:
            edge.sent &= ~marks
            if edge.going & marks:
                edge.going &= ~marks
                edge.under_way = {
                    mark: count for mark, count in edge.under_way.items() if not mark & marks
                }

    def _insert(self, chunks: array[int]) -> list[Edge]:
        edges, depth = [], 0
        for edge, shared in self.path(chunks):
            edges.append(edge if shared == len(edge.chunks) else self._split(edge, shared))
            depth += shared
        if depth < len(chunks):
            parent = edges[-1] if edges else self._root
            edge = parent.children[chunks[depth]] = Edge(parent, chunks[depth:])
            edges.append(edge)
            self.size_bytes += edge.size_bytes
        for edge in reversed(edges):
            self._edges[edge] = None
            self._edges.move_to_end(edge)
        return edges

    def _split(self, edge: Edge, at: int) -> Edge:
        parent = edge.parent
        assert parent is not None
        upper = Edge(parent, edge.chunks[:at])
        upper.sent, upper.under_way, upper.learned = edge.sent, dict(edge.under_way), edge.learned
        upper.going = edge.going
        of_upper = len(edge.keys) * at // len(edge.chunks)
        upper.keys, edge.keys = edge.keys[:of_upper], edge.keys[of_upper:]
        edge.chunks = edge.chunks[at:]
        edge.parent = upper
        upper.children[edge.chunks[0]] = edge
        parent.children[upper.chunks[0]] = upper
        self.size_bytes += EDGE_BYTES
        return upper

    def _compare(self, edge: Edge, keys: array[int], end: int) -> None:
        """Compare an edge's keys with another text's: the last may belong below, where both part."""
        same = _common(edge.keys, keys)
        if same == len(edge.keys):
            return
        if 2 * same < len(edge.keys):
            # The same text has become other tokens (a template with the date in it): what was
            # learned is worth nothing.
            for child in edge.children.values():
                child.learned = False
            self._set_keys(edge, keys[:end])
            return
        moved = edge.keys[same:]
        self._set_keys(edge, edge.keys[:same])
        for child in edge.children.values():
            if child.learned:
                self._set_keys(child, moved + child.keys)

    def _set_keys(self, edge: Edge, keys: array[int]) -> None:
        self.size_bytes += _NUMBER_BYTES * (len(keys) - len(edge.keys))
        edge.keys, edge.learned = keys, True

    def _evict(self) -> None:
        while self.size_bytes > self._limit_bytes and self._edges:
            edge, _ = self._edges.popitem(last=False)
            assert edge.parent is not None
            assert not edge.children
            del edge.parent.children[edge.chunks[0]]
            self.size_bytes -= edge.size_bytes


def _common(one: array[int], other: array[int]) -> int:
    """Return the length of the longest common beginning."""
    if one == other:
        return len(one)
    return bisect(
        range(1, min(len(one), len(other)) + 1), False, key=lambda size: one[:size] != other[:size]
    )
