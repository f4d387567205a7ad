"""The prefix index against naive models: which node was sent what, which node holds what."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from router_doubles import parse_job

from kvrelay.router.node_load import Share
from kvrelay.router.nodes.node import HealthReport
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.prefix.index import CHUNK_BYTES, MAX_TEXT_BYTES, HeldBlocks, Prefix, PrefixIndex
from kvrelay.router.prefix.text_tree import EDGE_BYTES, Edge, TextTree
from kvrelay.router.request.job import CHAT_PATH, prefix_of
from kvrelay.wire.config import Role
from kvrelay.wire.kv_events import extend
from kvrelay.wire.outputs import PromptBlocks

texts = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda chunks: array("q", chunks))
BLOCK = 16
unhurried = settings(max_examples=60)


def common(one: list[int] | array[int], other: list[int] | array[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@contextmanager
def under_way(index: PrefixIndex, prefix: Prefix, url: str) -> Iterator[None]:
    sent = index.send(prefix, url)
    yield
    index.end(sent)


def cached(index: PrefixIndex, prefix: Prefix) -> dict[str, int]:
    return index.lookup(prefix)[1]


def length(index: PrefixIndex, prefix: Prefix) -> int:
    return index.lookup(prefix)[0]


def check(tree: TextTree) -> None:
    """Raise AssertionError if an invariant is broken."""
    below = list(tree._root.children.values())
    size, seen = 0, 0
    order = {edge: at for at, edge in enumerate(tree._edges)}
    while below:
        edge = below.pop()
        seen += 1
        size += edge.size_bytes
        assert len(edge.chunks) > 0
        assert edge.parent is not None
        assert edge.parent.children[edge.chunks[0]] is edge
        assert edge.parent is tree._root or order[edge.parent] > order[edge]
        assert edge.going == sum(edge.under_way)
        assert edge.parent is tree._root or edge.sent & ~edge.parent.sent == 0
        below += edge.children.values()
    assert seen == len(tree._edges)
    assert size == tree.size_bytes, (size, tree.size_bytes)


def depth_of(steps: list[tuple[int, int]], node: int) -> int:
    return max((depth for depth, marks in steps if marks >> node & 1), default=0)


@unhurried
@given(st.lists(st.tuples(texts, st.integers(0, 3), st.booleans()), max_size=40), texts)
def test_the_tree_knows_how_much_of_a_text_each_node_was_sent(
    legs: list[tuple[array[int], int, bool]], asked: array[int]
) -> None:
    tree = TextTree()
    going: list[tuple[array[int], int, Edge]] = []
    for chunks, node, ends in legs:
        last = tree.send(chunks, 1 << node)
        if ends:
            tree.end(last, 1 << node)
        else:
            going.append((chunks, node, last))
        check(tree)
    sent_steps, going_steps = tree.steps(tree.path(asked))
    for node in range(4):
        sent = max((common(chunks, asked) for chunks, at, _ in legs if at == node), default=0)
        assert depth_of(sent_steps, node) == sent
        assert depth_of(going_steps, node) == max(
            (common(chunks, asked) for chunks, at, _ in going if at == node), default=0
        )
    for _, node, last in going:
        tree.end(last, 1 << node)
        check(tree)
    assert tree.steps(tree.path(asked))[1] == []


@unhurried
@given(st.lists(texts, min_size=1, max_size=12), texts)
def test_blocks_of_a_shared_beginning_are_those_of_the_texts_that_share_it(
    sent: list[array[int]], asked: array[int]
) -> None:
    """Two blocks to each chunk; the key of a block is its text so far. What is learned is a
    beginning of the truth.
    """

    def truth(chunks: array[int]) -> array[int]:
        seen, keys = 0, array("Q")
        for chunk in chunks:
            for half in (1, 2):
                seen = hash((seen, chunk, half))
                keys.append(seen & (2**64 - 1))
        return keys

    tree = TextTree()
    for chunks in sent:
        tree.send(chunks, 1)
        tree.learn(chunks, truth(chunks))
        check(tree)
        keys, depth = tree.known_keys(tree.path(chunks))
        assert (keys, depth) == (truth(chunks), len(chunks))
    shared = max(common(chunks, asked) for chunks in sent)
    assert tree.known_keys(tree.path(asked))[0] == truth(asked[:shared])


@unhurried
@given(st.lists(st.tuples(texts, st.integers(0, 3)), max_size=40), st.integers(1, 12))
def test_the_tree_stays_in_its_limit_and_forgets_the_oldest(
    legs: list[tuple[array[int], int]], edges: int
) -> None:
    limit = edges * (EDGE_BYTES + 8 * 8)
    tree = TextTree(limit)
    for chunks, node in legs:
        tree.send(chunks, 1 << node)
        check(tree)
        assert tree.size_bytes <= limit
    if legs and edges >= len(legs[-1][0]):  # a text that grew chunk by chunk has an edge for each
        assert depth_of(tree.steps(tree.path(legs[-1][0]))[0], legs[-1][1]) == len(legs[-1][0])


def test_a_template_that_changes_its_tokens_replaces_what_was_learned() -> None:
    tree, chunks = TextTree(), array("q", range(8))
    tree.send(chunks, 1)
    tree.learn(chunks, array("Q", range(16)))
    tomorrow = array("Q", range(100, 116))
    tree.learn(chunks, tomorrow)
    assert tree.known_keys(tree.path(chunks))[0] == tomorrow


@unhurried
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 9), max_size=4)),
        max_size=40,
    ),
    st.lists(st.integers(0, 9), max_size=8),
)
def test_held_blocks_are_what_nodes_have_told(
    told: list[tuple[int, bool, list[int]]], asked: list[int]
) -> None:
    blocks, held = HeldBlocks(), {node: set[int]() for node in range(3)}
    for node, stored, keys in told:
        (blocks.stored if stored else blocks.removed)(1 << node, keys)
        held[node] = held[node] | set(keys) if stored else held[node] - set(keys)
    steps = blocks.steps(asked, 0b111)
    for node in range(3):
        longest = next((at for at, key in enumerate(asked) if key not in held[node]), len(asked))
        assert depth_of(steps, node) == longest
    assert len(blocks) == len(set.union(*held.values()))


def test_a_full_table_forgets_what_came_first() -> None:
    blocks = HeldBlocks(limit=80)
    blocks.stored(1, range(80))
    blocks.stored(2, [79])
    blocks.stored(1, [80])
    assert len(blocks) == 71
    assert blocks.steps([0], 1) == []
    assert blocks.steps([79, 80], 0b11) == [(1, 0b11), (2, 1)]
    blocks.stored(1, range(100, 300))
    assert len(blocks) <= 80
    assert blocks.steps([299], 1) == [(1, 1)]


def blocks_of(token_ids: list[int]) -> PromptBlocks:
    hashes: list[bytes] = []
    extend(hashes, token_ids, BLOCK)
    return PromptBlocks(BLOCK, b"".join(hashes))


def tokenized(text: str) -> list[int]:
    """Four characters to a token."""
    return [hash(text[at : at + 4]) & 0xFFFF for at in range(0, len(text), 4)]


def asked(index: PrefixIndex, text: str, url: str = "") -> Prefix:
    """A request with this prompt, through a leg on `url` that has ended, if it is given."""
    prefix = Prefix.of(7, text.encode())
    if url:
        with under_way(index, prefix, url):
            pass
        ids = tokenized(text)
        prefix = prefix.known(blocks_of(ids), len(ids))
        index.learn(prefix)
        return prefix
    return prefix


SYSTEM = "".join(f"rule {at}: be good and brief. " for at in range(80))


def test_a_node_has_what_its_events_say() -> None:
    index = PrefixIndex()
    first = asked(index, SYSTEM + "question one", "a")
    asked(index, SYSTEM + "another thing", "b")
    for url in ("a", "b"):
        index.trust(url)
    assert cached(index, asked(index, SYSTEM)) == {}
    assert first.keys is not None
    index.stored("a", first.keys)
    has = cached(index, asked(index, SYSTEM + "a third question"))
    shared = len(tokenized(SYSTEM)) // BLOCK * BLOCK
    assert set(has) == {"a"}
    assert shared - 2 * BLOCK <= has["a"] <= shared
    assert has.get("b", 0) == 0
    again = cached(index, asked(index, SYSTEM + "question one"))
    assert again["a"] == len(tokenized(SYSTEM + "question one")) // BLOCK * BLOCK
    index.removed("a", first.keys[10:])
    assert cached(index, asked(index, SYSTEM + "a third question"))["a"] == 10 * BLOCK
    index.forget("a")
    assert not cached(index, first)


def test_without_events_a_node_has_what_was_sent_there() -> None:
    index = PrefixIndex()
    asked(index, SYSTEM + "question one", "a")
    has = cached(index, asked(index, SYSTEM + "a third question"))
    assert abs(has["a"] - len(tokenized(SYSTEM))) <= CHUNK_BYTES // 4
    assert set(has) == {"a"}
    index.trust("a")
    assert "a" not in cached(index, asked(index, SYSTEM + "a third question"))
    index.doubt("a")
    assert cached(index, asked(index, SYSTEM + "a third question"))["a"] == has["a"]


def test_a_leg_under_way_counts_for_who_comes_next() -> None:
    index = PrefixIndex()
    index.trust("a")
    with under_way(index, Prefix.of(7, SYSTEM.encode()), "a"):
        assert cached(index, asked(index, SYSTEM + "more"))["a"] > 400
        assert not cached(index, Prefix.of(8, SYSTEM.encode())), "the same text for another model"
    assert "a" not in cached(index, asked(index, SYSTEM + "more"))


def test_a_decode_node_that_holds_the_last_turn_is_found_by_token_ids() -> None:
    index = PrefixIndex()
    index.trust("d")
    turn = tokenized(SYSTEM) + list(range(40))  # what was generated is not in any text
    whole = Prefix.of(7, SYSTEM.encode()).known(blocks_of(turn), len(turn))
    assert whole.keys is not None
    index.stored("d", whole.keys)
    now = Prefix.of(7, (SYSTEM + "and what was generated").encode())
    assert "d" not in cached(index, now)
    assert (
        cached(index, now.known(blocks_of([*turn, *range(90)]), len(turn) + 90))["d"]
        == len(turn) // BLOCK * BLOCK
    )


def test_the_length_of_a_prompt_is_learned() -> None:
    index = PrefixIndex()
    dense = "0123456789" * 400
    for at in range(100):
        prefix = Prefix.of(7, (str(at) + dense).encode())
        index.counted(prefix, 2_000)
    assert abs(length(index, Prefix.of(7, b"x" * 4_000)) - 2_000) < 50


def test_token_ids_are_counted_and_say_nothing_of_texts() -> None:
    index, ids = PrefixIndex(), list(range(1_000, 3_000))
    prefix = Prefix.of(7, str(ids).encode(), len(ids))
    assert abs(length(index, prefix) - 2_000) < 2
    text = length(index, Prefix.of(7, b"x" * 4_000))
    for _ in range(100):
        index.counted(prefix, len(ids))
    assert length(index, Prefix.of(7, b"x" * 4_000)) == text


def test_a_very_long_prompt_is_looked_at_in_part() -> None:
    index = PrefixIndex()
    prefix = Prefix.of(7, bytes(2 * MAX_TEXT_BYTES))
    assert len(prefix.chunks) == MAX_TEXT_BYTES // CHUNK_BYTES
    tokens = MAX_TEXT_BYTES // 2
    known = prefix.known(
        PromptBlocks(BLOCK, b"".join(at.to_bytes(16) for at in range(tokens // BLOCK))), tokens
    )
    with under_way(index, prefix, "a"):
        index.learn(known)
    keys, _ = index.texts.known_keys(index.texts.path(prefix.chunks))
    assert len(keys) == tokens // BLOCK // 2


def test_numbers_of_nodes_that_are_gone_are_used_again() -> None:
    index = PrefixIndex()
    keys = list(range(50))
    for at in range(200):
        index.trust("a")
        index.stored("a", keys)
        asked(index, SYSTEM, "a")
        index.stored("b", [1_000 + at % 3])
        index.forget("a")
        assert "a" not in cached(index, asked(index, SYSTEM))
    assert len(index.blocks) <= 53
    assert index._mark("new").bit_length() <= 2 * 64 + 2


def test_what_is_gone_is_cleared_piece_by_piece() -> None:
    blocks = HeldBlocks()
    blocks.stored(1, range(5_000))
    blocks.stored(2, range(4_000, 6_000))
    blocks.forget(1)
    left = []
    while blocks.sweeping:
        left.append(len(blocks))
        blocks.removed(4, ())
    assert [before - after for before, after in pairwise(left)] == [0, 0, 1_000, 1_000, 1_000]
    assert (len(blocks), blocks.steps(range(4_000, 5_000), 3)) == (2_000, [(1_000, 2)])


def chat(messages: list[dict[str, str]], **more: object) -> Prefix:
    body = msgspec.json.encode({"model": "m", "messages": messages, **more})
    return prefix_of(parse_job(body, CHAT_PATH))


def test_a_conversation_that_goes_on_keeps_its_beginning() -> None:
    turn = [{"role": "user", "content": SYSTEM}]
    one, two = (
        chat(turn),
        chat(
            [*turn, {"role": "assistant", "content": "yes"}], temperature=0.5, seed=3, stream=True
        ),
    )
    assert common(one.chunks, two.chunks) >= len(one.chunks) - 2
    for other in (
        chat(turn, tools=[{"type": "function"}]),
        chat(turn, cache_salt="s"),
        chat(turn, model="n"),
    ):
        assert common(one.chunks, other.chunks) == 0


def test_a_lease_says_what_its_node_is_believed_to_have() -> None:
    pool = Pool(["http://p1", "http://p2"], [])
    for at, node in enumerate(pool.nodes):
        pool.note_report(node, HealthReport(Role.PREFILL, "m", generation=f"g{at}"), 0.0, 0.0)
    text, first = Prefix.of(1, SYSTEM.encode()), pool.nodes[0]
    lease = pool.hold(first, Share(), 100, text, cached(pool.prefixes, text))
    assert lease.cached_tokens == 0
    pool.give_back(lease)
    for _ in range(4):
        has = cached(pool.prefixes, text)
        lease = pool.hold(first, Share(), 100, text, has)
        assert lease.cached_tokens > 0.9 * len(SYSTEM) / 4
        assert set(has) == {first.url}
        pool.give_back(lease)
    pool.note_report(first, HealthReport(Role.PREFILL, "m", generation="restarted"), 0.0, 0.0)
    assert not cached(pool.prefixes, text)
