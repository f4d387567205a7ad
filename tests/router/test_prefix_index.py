"""The prefix index against naive models: which node was sent what, which node holds what."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_doubles import parse_job

from kvrelay.router.node_load import Share
from kvrelay.router.nodes.node import HealthReport
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.prefix import index as module
from kvrelay.router.prefix.index import CHUNK_BYTES, MAX_TEXT_BYTES, Prefix, PrefixIndex
from kvrelay.router.request.job import CHAT_PATH, prefix_of
from kvrelay.wire.config import Role
from kvrelay.wire.kv_events import CPU, STORAGE, extend
from kvrelay.wire.outputs import PromptBlocks

BLOCK = 16


def common(one: array[int], other: array[int]) -> int:
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


def blocks_of(ids: list[int]) -> PromptBlocks:
    hashes: list[bytes] = []
    extend(hashes, ids, BLOCK)
    return PromptBlocks(BLOCK, b"".join(hashes))


words = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def prefix_of_words(text: list[int]) -> Prefix:
    return Prefix.of(7, b"".join(bytes([word]) * CHUNK_BYTES for word in text))


@given(st.lists(st.tuples(words, st.sampled_from("abc")), max_size=12), words, st.booleans())
@settings(max_examples=60)
def test_a_node_has_the_longest_beginning_that_it_was_sent(
    requests: list[tuple[list[int], str]], text: list[int], trusts: bool
) -> None:
    """With trust: that runs there now."""
    index, has = PrefixIndex(), defaultdict[str, int](int)
    under_way = []
    for at, (sent, url) in enumerate(requests):
        if trusts:
            index.changed(url, ())
        going = index.send(prefix_of_words(sent), url)
        if trusts and at % 2:
            index.end(going)
        else:
            under_way.append((sent, url, going))
    for sent, url, _ in under_way:
        depth = common(array("q", sent), array("q", text))
        if depth:
            has[url] = max(has[url], depth * CHUNK_BYTES // 4)
    assert cached(index, prefix_of_words(text)) == has
    for _, _, going in under_way:
        index.end(going)
    assert cached(index, prefix_of_words(text)) == ({} if trusts else has)


@pytest.mark.parametrize("limit", ["MAX_SENT", "MAX_LEARNED", "MAX_BLOCKS"])
def test_what_is_remembered_is_limited_and_the_newest_stays(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(module, limit, 64)
    index, followed = PrefixIndex(), PrefixIndex()
    for at in range(100):  # nodes share alike
        prefix = asked(index, f"{at:03} " + "x" * 8 * CHUNK_BYTES, "ab"[at % 2])
        followed.changed("ab"[at % 2], prefix.keys or ())
    sizes = {
        "MAX_SENT": sum(len(node.sent) for node in index._nodes.values()),
        "MAX_LEARNED": index.texts(),
        "MAX_BLOCKS": followed.blocks(),
    }
    assert 48 <= sizes.pop(limit) <= 64
    assert min(sizes.values()) > 800
    if limit != "MAX_BLOCKS":
        assert cached(index, asked(index, "099 " + "x" * 8 * CHUNK_BYTES))["b"] > 250


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
        index.learn(prefix, "n")
        return prefix
    return prefix


SYSTEM = "".join(f"rule {at}: be good and brief. " for at in range(80))


def test_a_node_has_what_its_events_say() -> None:
    index = PrefixIndex()
    first = asked(index, SYSTEM + "question one", "a")
    asked(index, SYSTEM + "another thing", "b")
    for url in ("a", "b"):
        index.changed(url, ())
    assert cached(index, asked(index, SYSTEM)) == {}
    assert first.keys is not None
    index.changed("a", first.keys)
    has = cached(index, asked(index, SYSTEM + "a third question"))
    shared = len(tokenized(SYSTEM)) // BLOCK * BLOCK
    assert set(has) == {"a"}
    assert shared - 2 * BLOCK <= has["a"] <= shared
    assert has.get("b", 0) == 0
    again = cached(index, asked(index, SYSTEM + "question one"))
    assert again["a"] == len(tokenized(SYSTEM + "question one")) // BLOCK * BLOCK
    index.changed("a", (), first.keys[10:])
    assert cached(index, asked(index, SYSTEM + "a third question"))["a"] == 10 * BLOCK
    index.forget("a")
    assert not cached(index, first)


def test_without_events_a_node_has_what_was_sent_there() -> None:
    index = PrefixIndex()
    asked(index, SYSTEM + "question one", "a")
    has = cached(index, asked(index, SYSTEM + "a third question"))
    assert abs(has["a"] - len(tokenized(SYSTEM))) <= CHUNK_BYTES // 4
    assert set(has) == {"a"}
    index.changed("a", ())
    asked(index, SYSTEM + "question one", "a")
    assert "a" not in cached(index, asked(index, SYSTEM + "a third question"))
    index.lost("a")
    asked(index, SYSTEM + "question one", "a")
    assert cached(index, asked(index, SYSTEM + "a third question"))["a"] == has["a"]


@pytest.mark.parametrize("handed_over", [True, False])
def test_the_next_turn_is_where_the_blocks_of_the_answer_are(*, handed_over: bool) -> None:
    index, text = PrefixIndex(), SYSTEM + "question one " * 40
    for _ in range(40):  # the tokens of the next turn are thought to be fewer than they are
        index.counted(Prefix.of(9, b"x" * 1000), 10)
    after = Prefix.of(7, (text + "answer and question " * 40).encode())
    ids = tokenized(text)
    whole = Prefix.of(7, text.encode()).known(blocks_of([*ids, *range(100)]), len(ids))
    if handed_over:
        index.learn(Prefix.of(7, text.encode()).known(blocks_of(ids), len(ids)), "n")
    index.answered(whole, "n")
    assert whole.keys is not None
    assert not cached(index, after)
    index.changed("a", whole.keys)
    assert cached(index, after)["a"] == len(whole.keys) * BLOCK
    index.changed("a", (), whole.keys[-20:])
    assert cached(index, after)["a"] == (len(whole.keys) - 20) * BLOCK
    assert cached(index, Prefix.of(7, text.encode()))["a"] <= len(ids)


def test_what_leaves_the_pool_for_the_host_is_lost_with_both_alone() -> None:
    index = PrefixIndex()
    prefix = asked(index, SYSTEM)
    keys = blocks_of(tokenized(SYSTEM))
    prefix = prefix.known(keys, len(tokenized(SYSTEM)))
    index.learn(prefix, "n")
    assert prefix.keys is not None
    count, (host, files) = len(prefix.keys), (prefix.keys[10:20], prefix.keys[15:30])

    def found() -> tuple[int, tuple[int, int]]:
        _, cached, below = index.lookup(prefix)
        whole = cached.get("a", 0) // BLOCK
        return whole, tuple(each // BLOCK for each in below.get("a", ()))  # type: ignore[return-value]

    index.changed("a", prefix.keys, cleared=True)
    index.changed("a", host, cleared=True, medium=CPU)
    index.changed("a", files, cleared=True, medium=STORAGE)
    assert found() == (count, ())
    index.changed("a", (), prefix.keys[10:])
    assert found() == (10, (20, 30))
    index.changed("a", (), prefix.keys[:10])
    assert found() == (0, ())  # the first blocks are nowhere
    index.changed("a", prefix.keys[:10])
    index.changed("a", (), cleared=True, medium=CPU)
    assert found() == (10, ())
    index.changed("a", prefix.keys[:15])
    assert found() == (15, (15, 30))
    index.lost("a")
    assert found() == (0, ())


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
    index.learn(known, "n")
    index.changed("a", known.keys or ())
    assert cached(index, prefix) == {"a": tokens // 2}


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


def test_a_process_that_starts_again_has_nothing() -> None:
    pool, text = Pool(["http://p"], []), Prefix.of(1, SYSTEM.encode())
    (node,) = pool.nodes
    for generation, has in (("g1", False), ("g1", True), ("g2", False)):
        pool.note_report(node, HealthReport(Role.PREFILL, "m", generation=generation), 0.0, 0.0)
        known = cached(pool.prefixes, text).get(node.url, 0)
        assert (known > 0.9 * len(SYSTEM) / 4) is has
        pool.give_back(pool.hold(node, Share(), text))
