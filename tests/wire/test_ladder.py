"""The hit ladder against an oracle that looks at each token, and a history of small caches."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.wire.ladder import RUNGS, Depths, Found, History, ladder, places_of

TOKENS = st.integers(0, 40)
FOUND = st.builds(Found, *[TOKENS] * 5)


def rung_of(token: int, found: Found, depths: Depths) -> str:
    """Why a token is where it is, by the words of the documentation."""
    if token < found.tokens:
        places = [name for name in RUNGS[:4] for _ in range(getattr(found, name))]
        return places[token]
    known = token < max(depths[:4])
    if token < found.tokens + found.failed and known:
        return "failed"
    for rung, depth in zip(("stale", "evicted", "placement", "capacity"), depths, strict=False):
        if token < depth:
            return rung
    return "forgotten" if token < depths.older else "new"


@given(TOKENS, FOUND, st.builds(Depths, *[TOKENS] * 5))
def test_each_token_is_on_the_one_rung_that_an_oracle_names(
    tokens: int, found: Found, depths: Depths
) -> None:
    rungs = ladder(tokens, found, depths)
    assert list(rungs) == list(RUNGS)
    assert rungs == {
        rung: sum(rung_of(token, found, depths) == rung for token in range(tokens))
        for rung in RUNGS
    }
    assert sum(rungs.values()) == tokens


class Cache:
    """The blocks of a node, as an engine evicts them: the least recently used, ends first."""

    def __init__(self, name: str, size: int, history: History[str]) -> None:
        self.name, self.size, self.history = name, size, history
        self.blocks: OrderedDict[str, None] = OrderedDict()

    def run(self, prompt: str, at: float) -> None:
        names = list(itertools.accumulate(prompt))
        stored = [name for name in names if name not in self.blocks]
        for name in reversed(names):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        self.history.changed(self.name, stored, [], at)
        self.evict(len(self.blocks) - self.size, at)

    def evict(self, count: int, at: float) -> set[str]:
        gone = [self.blocks.popitem(last=False)[0] for _ in range(min(count, len(self.blocks)))]
        self.history.changed(self.name, [], gone, at)
        return set(gone)


def depths(
    history: History[Any], names: Sequence[Any], at: float, nodes: list[str], them: list[str]
) -> tuple[int, ...]:
    """How deep a prompt of these blocks, of a token each, was on each rung from `stale` on."""
    rungs = history.ladder(len(names) + 1, Found(), names, 1, at, nodes, them)
    assert (rungs["gpu"], sum(rungs.values())) == (0, len(names) + 1)
    return tuple(itertools.accumulate([*rungs.values()][5:-1]))


PROMPTS = st.text("ab", min_size=1, max_size=6)


@given(
    st.lists(st.tuples(st.integers(0, 1), PROMPTS), max_size=20),
    PROMPTS,
    st.integers(0, 1),
    st.integers(0, 8),
)
def test_a_history_tells_what_was_held_at_a_time_and_what_once_was(
    runs: list[tuple[int, str]], prompt: str, evicts: int, evicted: int
) -> None:
    history = History[str]()
    caches = [Cache("0", 6, history), Cache("1", 9, history)]
    seen = set[str]()
    for number, asked in runs:
        caches[number].run(asked, at=1)
        seen.update(itertools.accumulate(asked))
    held = [set(cache.blocks) for cache in caches]
    # After the placement blocks are evicted, and then the prompt itself is stored.
    gone = caches[evicts].evict(evicted, at=3)
    names = list(itertools.accumulate(prompt))
    history.changed("0", [name for name in names if name not in caches[0].blocks], [], at=4)

    def deep(names_of: set[str]) -> int:
        return len(list(itertools.takewhile(names_of.__contains__, names)))

    assert depths(history, names, 2, ["0"], ["0", "1"]) == (
        deep(held[0] if evicts else held[0] - gone),
        deep(held[0]),
        deep(held[0] | held[1]),
        *[deep(seen)] * 2,
    )


def test_what_was_evicted_and_stored_again_between_two_events_was_evicted() -> None:
    history = History[str]()
    history.changed("a", ["x", "xy"], [], 1, cleared=True)
    history.changed("a", ["xy"], [], 3)
    assert depths(history, ["x", "xy"], 2, ["a"], ["a"]) == (1, 2, 2, 2, 2)
    assert depths(history, ["x", "xy"], 2, ["b"], ["a"]) == (0, 0, 2, 2, 2)


def test_what_two_nodes_evict_at_once_was_evicted_on_either() -> None:
    history = History[str]()
    for node, evicted_at in (("a", 3), ("b", 4)):
        history.changed(node, ["x"], [], 1)
        history.changed(node, [], ["x"], evicted_at)
    for chosen in ("a", "b"):
        assert depths(history, ["x"], 2, [chosen], ["a", "b"]) == (0, 1, 1, 1, 1)


def test_what_one_medium_of_a_node_lacks_may_lie_in_another() -> None:
    history = History[str]()
    history.changed("a GPU", ["x"], [], 1)
    history.changed("a CPU", ["xy"], [], 1)
    history.changed("b CPU", ["xyz"], [], 1)
    nodes = places_of("ab")
    assert depths(history, ["x", "xy"], 2, nodes[:2], nodes) == (2, 2, 2, 2, 2)
    assert depths(history, ["x", "xy"], 2, nodes[3:], nodes) == (0, 0, 2, 2, 2)


def test_what_lies_behind_a_gap_is_not_to_be_had() -> None:
    history = History[str]()
    history.changed("a", "abdefgh", [], 1)
    history.changed("a", [], "h", 3)
    assert depths(history, "abcdefgh", 2, ["a"], ["a"]) == (2, 2, 2, 2, 2)
    assert depths(history, "abdefgh", 2, ["a"], ["a"]) == (6, 7, 7, 7, 7)


def test_a_long_prompt_that_many_nodes_share_the_beginning_of_is_walked_once() -> None:
    looks, prompt, nodes = 0, 1_000, [f"n{at}" for at in range(100)]

    class Name(int):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return int(self)

    names, history = [Name(at) for at in range(prompt)], History[Name]()
    for node in nodes:
        history.changed(node, names if node == nodes[50] else names[:1], [], 1)
    looks = 0
    assert depths(history, names, 2, nodes[:1], nodes) == (1, 1, prompt, prompt, prompt)
    assert looks < 4 * prompt


def test_no_name_is_in_an_empty_history() -> None:
    assert depths(History[int](), [0, -1, -2], 0, [], []) == (0, 0, 0, 0, 0)


def test_a_node_that_left_or_began_anew_has_had_its_blocks() -> None:
    history = History[str]()
    history.changed("a", ["x"], [], 1, cleared=True)
    history.changed("b", ["xy"], [], 1, cleared=True)
    history.changed("b", [], [], 2, cleared=True)
    history.left("a")
    history.left("nobody")
    assert depths(history, ["x", "xy"], 3, ["b"], ["b"]) == (0, 0, 0, 2, 2)


def test_what_is_older_than_the_history_is_known_to_be() -> None:
    history = History[int](most_gone=8)
    history.changed("a", [], range(100), 1)
    assert depths(history, [*range(100)][::-1], 2, ["a"], ["a"]) == (0, 0, 0, 7, 100)
    assert depths(history, [100], 2, ["a"], ["a"]) == (0, 0, 0, 0, 0)
