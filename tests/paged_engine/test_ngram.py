"""The index of n-grams against a search through the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import kvrelay.paged_engine.speculation
from kvrelay.paged_engine.speculation import NgramIndex


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
