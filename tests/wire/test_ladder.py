"""The hit ladder against an oracle that looks at each token, and a history of small caches."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.wire.ladder import RUNGS, Depths, Found, History, ladder

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

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.blocks: OrderedDict[str, None] = OrderedDict()

    def run(self, prompt: str) -> tuple[int, list[str], list[str]]:
        """Return how many blocks of a prompt were found, which are new, and which are gone."""
        names = list(itertools.accumulate(prompt))
        found = len(list(itertools.takewhile(self.blocks.__contains__, names)))
        stored = [name for name in names[: self.size] if name not in self.blocks]
        for name in reversed(names[: self.size]):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        gone = []
        while len(self.blocks) > self.size:
            gone.append(self.blocks.popitem(last=False)[0])
        return found, stored, gone


PROMPTS = st.text("ab", min_size=1, max_size=8)


@given(st.lists(st.tuples(st.integers(0, 1), PROMPTS), max_size=30), PROMPTS, st.integers(0, 30))
def test_a_history_tells_what_was_held_at_a_time_and_what_once_was(
    runs: list[tuple[int, str]], prompt: str, at: int
) -> None:
    caches, history = [Cache("0", 6), Cache("1", 9)], History[str]()
    then: list[set[str]] = [set(), set()]
    since, seen = set[str](), set[str]()
    for time, (number, asked) in enumerate(runs):
        cache = caches[number]
        _, stored, gone = cache.run(asked)
        history.changed(cache.name, [each for each in stored if each not in gone], gone, time)
        if time <= at:
            then[number] = set(cache.blocks)
            seen.update(stored)
        elif number == 0:
            since.update(gone)
    names = list(itertools.accumulate(prompt))

    def deep(held: set[str]) -> int:
        return len(list(itertools.takewhile(held.__contains__, names)))

    depths = history.depths(names, 1, at, ["0"], ["0", "1"])
    assert depths[:3] == (deep(then[0] - since), deep(then[0]), deep(then[0] | then[1]))
    assert depths.older == depths.seen >= deep(seen)


def test_what_was_evicted_and_stored_again_between_two_events_was_evicted() -> None:
    history = History[str]()
    history.changed("a", ["x", "xy"], [], 1, cleared=True)
    history.changed("a", ["xy"], [], 3)
    assert history.depths(["x", "xy"], 1, 2, ["a"], ["a"]) == (1, 2, 2, 2, 2)
    assert history.depths(["x", "xy"], 1, 2, ["b"], ["a"]) == (0, 0, 2, 2, 2)


def test_a_node_that_left_or_began_anew_has_had_its_blocks() -> None:
    history = History[str]()
    history.changed("a", ["x"], [], 1, cleared=True)
    history.changed("b", ["xy"], [], 1, cleared=True)
    history.changed("b", [], [], 2, cleared=True)
    history.left("a", 2)
    history.left("nobody", 2)
    assert history.depths(["x", "xy"], 1, 3, ["b"], ["b"]) == (0, 0, 0, 2, 2)


def test_what_is_older_than_the_history_is_known_to_be() -> None:
    history = History[int](most_gone=8)
    history.changed("a", [], range(100), 1)
    assert history.depths([*range(100)][::-1], 1, 2, ["a"], ["a"]) == (0, 0, 0, 7, 100)
    assert history.depths([100], 1, 2, ["a"], ["a"]) == (0, 0, 0, 0, 0)
    rungs = ladder(110, Found(), history.depths(list(range(99, -1, -1)), 1, 2, ["a"], ["a"]))
    assert {rung: count for rung, count in rungs.items() if count} == {
        "capacity": 7,
        "forgotten": 93,
        "new": 10,
    }
