"""A radix tree over the texts of prompts: where each was sent, and which blocks of KV lie behind which text. Pure.

A text is a sequence of chunks, each a number (router/prefix/index.py makes them). An edge holds a run of chunks that no
text has left yet, so a prompt that shares its beginning with others costs one edge and 8 bytes per chunk of its own. Of
each edge the tree knows the *marks* (a bit per node) of those that were sent a text through it and, once a node has
said how it calls the blocks of such a text, the keys of the blocks that end in the edge. Where a block ends is known
where two texts part, and in between it is taken to be proportional.

Bounded: the texts that were asked for longest ago go first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

__all__ = ["CHUNK_BYTES", "Edge", "Path", "Step", "TextTree"]

CHUNK_BYTES = 64
"""Of text in one chunk, about a block of 16 tokens: less finds no more blocks, and costs time per prompt."""
# An edge with its dict entries and arrays, without chunks and keys; measured with tracemalloc.
EDGE_BYTES = 700
_NUMBER_BYTES = 8
# 40,000 prompts of 4 KB that share nothing.
LIMIT_BYTES = 64 << 20

Step = tuple[int, int]
"""A depth, and the marks of the nodes that are that deep."""
Path = list[tuple["Edge", int]]
"""The edges that a text goes through, each with how many of its chunks it shares: all, but for the last one."""


class Edge:
    """`sent` are marks; `under_way` counts, by node, legs that have not ended, and `going` are these nodes' marks."""

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


class TextTree:
    """Depths are in chunks; the first chunk of a text names what else decides its tokens, and has no bytes."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._root = Edge(None, array("q"))
        # Least recently used first; an edge is always behind all edges below it.
        self._edges: OrderedDict[Edge, None] = OrderedDict()
        self.size_bytes = 0
        self.shape = 0
        """Another number whenever paths may be others than before."""

    def __len__(self) -> int:
        return len(self._edges)

    # --- asking --------------------------------------------------------------------------------------------------

    def path(self, chunks: array[int]) -> Path:
        """Where a text leads."""
        at, edge = 0, self._root
        path: Path = []
        while at < len(chunks):
            child = edge.children.get(chunks[at])
            if child is None:
                break
            shared = _shared(child.chunks, chunks, at)
            path.append((child, shared))
            at += shared
            if shared < len(child.chunks):
                break
            edge = child
        return path

    @staticmethod
    def known_keys(path: Path) -> tuple[array[int], int]:
        """The keys of the blocks along a path, as far as they were learned, and how deep that is."""
        keys: array[int] = array("Q")
        depth = 0
        for edge, shared in path:
            if not edge.learned:
                break
            whole = len(edge.chunks)
            keys += edge.keys if shared == whole else edge.keys[: len(edge.keys) * shared // whole]
            depth += shared
        return keys, depth

    @staticmethod
    def steps(path: Path) -> tuple[list[Step], list[Step]]:
        """How deep which nodes were sent this text: ever, and by legs that have not ended. The deepest come last."""
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

    # --- telling -------------------------------------------------------------------------------------------------

    def send(self, chunks: array[int], node: int, path: Path | None = None) -> Edge:
        """A leg with this text begins on a node (its number, not its mark). The last edge of the text, for `end`.

        `path` may be given where it is known and the tree has the same shape as then."""
        mark = 1 << node
        edges = self._insert(chunks, self.path(chunks) if path is None else path)
        for edge in edges:
            edge.sent |= mark
            edge.going |= mark
            edge.under_way[node] = edge.under_way.get(node, 0) + 1
        if self.size_bytes > self._limit_bytes:
            self._evict()
        return edges[-1]

    def end(self, last: Edge, node: int) -> None:
        """It has ended. An edge that was cut in two since then is still the end of the same text."""
        edge: Edge | None = last
        while edge is not None and edge is not self._root:
            left = edge.under_way.get(node, 0) - 1
            if left > 0:
                edge.under_way[node] = left
            elif not left:
                del edge.under_way[node]
                edge.going &= ~(1 << node)
            edge = edge.parent

    def learn(self, chunks: array[int], keys: array[int], blocks_per_chunk: float) -> None:
        """`keys` are the blocks of this text, so many of them, roughly, in each chunk but the first."""
        depth = before = 0
        for edge, shared in self.path(chunks):
            depth += shared
            if shared < len(edge.chunks):
                break  # the rest was evicted
            end = len(keys)
            if depth < len(chunks):
                end = min(end, max(before, int((depth - 1) * blocks_per_chunk)))
            if edge.learned:
                self._compare(edge, keys[before:], end - before)
            if not edge.learned or (depth == len(chunks) and not any(c.learned for c in edge.children.values())):
                self._set_keys(edge, keys[before:end])
            before += len(edge.keys)
        self._evict()

    def forget(self, marks: int) -> None:
        """No node has these marks any more."""
        for edge in self._edges:
            edge.sent &= ~marks
            edge.going &= ~marks
            for node in [node for node in edge.under_way if marks >> node & 1]:
                del edge.under_way[node]

    # --- inside --------------------------------------------------------------------------------------------------

    def _insert(self, chunks: array[int], path: Path) -> list[Edge]:
        """All edges of a text, made where they are missing, and now the most recently used."""
        edges, depth = [], 0
        for edge, shared in path:
            edges.append(edge)
            depth += shared
        if path and path[-1][1] < len(edges[-1].chunks):
            edges[-1] = self._split(edges[-1], path[-1][1])
        # The first chunk has no bytes, so no blocks: an edge of its own.
        for begin, end in ((0, 1), (max(1, depth), len(chunks))) if depth < len(chunks) else ():
            if depth <= begin < end:
                parent = edges[-1] if edges else self._root
                edges.append(Edge(parent, chunks[begin:end]))
                parent.children[chunks[begin]] = edges[-1]
                self._count(edges[-1])
        for edge in reversed(edges):
            self._edges[edge] = None
            self._edges.move_to_end(edge)
        return edges

    def _split(self, edge: Edge, at: int) -> Edge:
        """Cut an edge in two; the upper one is new, and returned."""
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
        self.shape += 1
        return upper

    def _compare(self, edge: Edge, keys: array[int], end: int) -> None:
        """What another text says of an edge: its last blocks may belong below it, where the two have parted."""
        same = _common(edge.keys, keys)
        if same == len(edge.keys):
            return
        if 2 * same < len(edge.keys):
            # The same text has become other tokens (a template with the date in it): what was learned is worth nothing.
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

    def _count(self, edge: Edge, sign: int = 1) -> None:
        self.shape += 1
        self.size_bytes += sign * (EDGE_BYTES + _NUMBER_BYTES * (len(edge.chunks) + len(edge.keys)))

    def _evict(self) -> None:
        while self.size_bytes > self._limit_bytes and self._edges:
            edge, _ = self._edges.popitem(last=False)
            assert edge.parent is not None
            assert not edge.children
            del edge.parent.children[edge.chunks[0]]
            self._count(edge, -1)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        below: list[Edge] = list(self._root.children.values())
        size, seen = 0, 0
        order = {edge: at for at, edge in enumerate(self._edges)}
        while below:
            edge = below.pop()
            seen += 1
            size += EDGE_BYTES + _NUMBER_BYTES * (len(edge.chunks) + len(edge.keys))
            assert len(edge.chunks) > 0
            assert edge.parent is not None
            assert edge.parent.children[edge.chunks[0]] is edge
            assert edge.parent is self._root or order[edge.parent] > order[edge]
            assert edge.going == sum(1 << node for node in edge.under_way)
            assert edge.parent is self._root or edge.sent & ~edge.parent.sent == 0
            below += edge.children.values()
        assert seen == len(self._edges)
        assert size == self.size_bytes, (size, self.size_bytes)


def _shared(run: array[int], chunks: array[int], at: int) -> int:
    """How many chunks of a run are those of a text from `at` on; of which the first is."""
    size = min(len(run), len(chunks) - at)
    return size if run[:size] == chunks[at : at + size] else _common(run, chunks[at : at + size])


def _common(one: array[int], other: array[int]) -> int:
    """The length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
