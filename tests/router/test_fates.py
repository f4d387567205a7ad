"""Whether a process has died: what proves it, what proves the contrary, and what proves nothing."""

from __future__ import annotations

import pytest

from kvrelay.router.nodes.node import ProcessDeaths


@pytest.fixture
def fates() -> ProcessDeaths:
    known = ProcessDeaths()
    known.answered("g1", 0.0, drains=False)
    return known


def told(fates: ProcessDeaths, generation: str = "g1", since: float = 1.0) -> list[bool]:
    """What is said of the process on which a leg was lost."""
    said: list[bool] = []
    fates.ask(generation, since, said.append)
    return said


def test_a_check_that_began_before_the_loss_proves_nothing_and_a_later_one_that_the_process_lives(
    fates: ProcessDeaths,
) -> None:
    said = told(fates)
    fates.answered("g1", 0.9, drains=False)
    assert said == []
    fates.answered("g1", 1.0, drains=False)
    assert said == [False]
    fates.died("g1")
    assert said == [False]  # it is told once


def test_another_generation_proves_that_the_process_has_died_also_to_who_asks_later(
    fates: ProcessDeaths,
) -> None:
    said = told(fates)
    fates.answered("g2", 0.5, drains=False)
    assert said == told(fates) == [True]
    assert told(fates, "g2") == []


def test_so_does_an_engine_that_is_called_dead_until_it_goes_on(fates: ProcessDeaths) -> None:
    said = told(fates)
    fates.died("g1")
    assert said == told(fates) == [True]
    fates.answered("g1", 2.0, drains=False)
    assert told(fates, since=1.0) == [False]
    assert told(fates, since=3.0) == []


def test_the_end_of_a_process_that_drains_is_no_death(fates: ProcessDeaths) -> None:
    fates.drains("g1")
    fates.died("g1")
    fates.answered("g2", 2.0, drains=False)
    assert told(fates) == [False]
    assert told(fates, "g2", 3.0) == []


def test_a_process_that_drains_no_more_may_die(fates: ProcessDeaths) -> None:
    fates.answered("g1", 1.0, drains=True)
    fates.answered("g1", 2.0, drains=False)
    said = told(fates, since=3.0)
    fates.died("g1")
    assert said == [True]
