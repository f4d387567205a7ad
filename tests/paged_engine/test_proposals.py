"""What is proposed: n-grams against a search of the whole text, and how many by what came true."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

import kvrelay.paged_engine.speculation
from kvrelay.paged_engine.speculation import DraftPace, NgramIndex


def searched(tokens: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """The longest n-gram at the end that occurs earlier, at its newest place, and what follows it
    there.
    """
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[-n:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[place + i])
                return text[len(tokens) :]
    return []


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=8),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    count=st.integers(1, 6),
)
def test_equals_a_search_at_every_length(pieces, sizes, count):
    shortest, longest = sorted(sizes)
    index, tokens = NgramIndex(longest, shortest), []
    for piece in pieces:
        tokens += piece
        if tokens:
            assert index.propose(tokens, count) == searched(tokens, longest, shortest, count)


def test_a_short_loop_is_proposed_for_as_long_as_is_asked():
    assert NgramIndex(3, 2).propose([9, 5, 6, 5, 6], 7) == [5, 6, 5, 6, 5, 6, 5]


def test_a_long_text_is_taken_in_over_several_calls(monkeypatch):
    monkeypatch.setattr(kvrelay.paged_engine.speculation, "_INDEXED_PER_CALL", 10)
    index = NgramIndex(2, 2)
    tokens = [*range(100, 120), 7, 8, 9, *range(200, 220), 7, 8]
    found = [index.propose(tokens, 2) for _ in range(6)]
    assert found == [[], [], [9, 200], [9, 200], [9, 200], [9, 200]]


def drafts(pace: DraftPace, agrees: list[int], longest: int) -> list[int]:
    """The output lengths at which proposals were made, a token per step besides those that came
    true.
    """
    tokens, at, made = 0, 0, []
    while at < len(agrees):
        allowed = pace.allowed(tokens)
        if allowed:
            agreed = min(agrees[at], allowed)
            made.append(tokens)
            tokens += agreed
            at += 1
            pace.note(allowed, agreed, tokens + 1, longest)
        tokens += 1
    return made


def test_what_came_true_decides_the_next_length() -> None:
    pace = DraftPace(4)
    for proposed, agreed, then in ((4, 2, 3), (3, 3, 4), (4, 0, 2), (2, 0, 1), (1, 1, 2)):
        pace.note(proposed, agreed, 10, 4)
        assert pace.allowed(10) == then


def test_after_misses_it_waits_twice_as_long_each_time_and_not_for_ever() -> None:
    made = drafts(DraftPace(4), [0] * 12, 4)
    waits = [later - sooner - 1 for sooner, later in itertools.pairwise(made)]
    assert waits == [0, 0, 2, 4, 8, 16, 32, 64, 64, 64, 64]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=60), st.integers(1, 8))
def test_the_length_is_within_its_limits(agrees: list[int], longest: int) -> None:
    pace = DraftPace(longest)
    drafts(pace, agrees, longest)
    assert 1 <= pace.reach <= longest
