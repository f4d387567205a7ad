"""The search of a rate, where a server with a known capacity is a function of the rate."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.search import RateSearch, SearchResult


def searched(
    serves: Callable[[float], float], start: float = 1.0, precision: float = 0.05
) -> tuple[SearchResult, list[float]]:
    search, probes = RateSearch(start, 0.9, precision), list[float]()
    while (rate := search.rate) is not None:
        probes.append(rate)
        search.record(serves(rate))
    return search.result(), probes


@given(capacity=st.floats(0.05, 400), start=st.floats(0.5, 64), steep=st.floats(3, 60))
def test_it_comes_near_a_known_capacity(capacity: float, start: float, steep: float) -> None:
    """Attainment is 90 % at the capacity, and falls around it more or less steeply."""

    def serves(rate: float) -> float:
        return 1 / (1 + (rate / capacity) ** steep / 9)

    found, probes = searched(serves, start)
    if capacity < start / 256 * 2 or len(probes) == 14:
        assert found.holds <= capacity
        return
    assert found.why == ""
    assert found.breaks is not None
    assert found.holds <= capacity * (1 + 1e-9) <= found.breaks * (1 + 2e-9)
    assert found.breaks / found.holds <= 1.05
    assert len(probes) == len(set(probes))


@given(capacity=st.integers(1, 300), start=st.integers(1, 64))
def test_sessions_are_searched_in_whole_ones(capacity: int, start: int) -> None:
    search = RateSearch(float(start), whole=True)
    while (rate := search.rate) is not None:
        assert rate == int(rate) >= 1
        search.record(float(rate <= capacity))
    found = search.result()
    assert found.breaks is not None
    assert found.holds <= capacity < found.breaks
    assert found.breaks - found.holds == 1 or found.breaks / found.holds <= 1.05


def test_a_server_that_never_holds() -> None:
    found, probes = searched(lambda rate: 0.0, 4.0)
    assert (found.holds, probes[-1]) == (0.0, 4.0 / 256)
    assert found.breaks == 4.0 / 256


def test_a_server_that_never_breaks_ends_the_search() -> None:
    found, probes = searched(lambda rate: 1.0)
    assert (len(probes), found.breaks) == (14, None)
    assert "too many probes" in found.why
