"""What is proposed: n-grams against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from scheduling import request

from kvrelay.paged_engine.speculation import NgramIndex, Speculation


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


def test_after_failed_drafts_it_waits_longer_each_time_and_not_for_ever() -> None:
    speculation, req, waits = Speculation(4, 3, 1), request("r", [7, 8] * 10, 10_000), []
    for _ in range(9):
        wait = 0
        while not (proposals := speculation.proposals(req, 4)):
            req.token_ids.append(7 + len(req.token_ids) % 2)
            wait += 1
        waits.append(wait)
        req.proposals = proposals
        req.token_ids += speculation.accept(req, [1000 + len(req.token_ids)] * 5)
        req.token_ids += [7 + (len(req.token_ids) + 1) % 2, 7 + len(req.token_ids) % 2]
    assert waits[0] == 0
    assert waits[-2:] == [waits[-1]] * 2
    assert waits == sorted(waits)
    assert 50 < waits[-1] < 70
