"""How many tokens a request proposes follows what came true."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.paged_engine.speculation import DraftPace


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


def test_one_that_comes_true_ends_the_waiting() -> None:
    made = drafts(DraftPace(4), [0, 0, 0, 0, 1, 1, 1], 4)
    assert [later - sooner for sooner, later in itertools.pairwise(made)] == [1, 1, 3, 5, 2, 2]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=60), st.integers(1, 8))
def test_the_length_is_within_its_limits(agrees: list[int], longest: int) -> None:
    pace = DraftPace(longest)
    drafts(pace, agrees, longest)
    assert 1 <= pace.reach <= longest
