"""Which nodes are taken out because they are far worse than the others."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.nodes.outliers import ENOUGH, MOST, Sample, Samples, outliers
from router.nodes.standing import Passage, Standing

NOW = 100.0


def node(count: int = ENOUGH, failed: float = 0.0, first_s: float = 0.1, gap_s: float = 0.01) -> Samples:
    samples = Samples()
    samples.legs += [Sample(NOW - 1, failed=at < failed * count, first_s=first_s, gap_s=gap_s) for at in range(count)]
    return samples


def found(*nodes: Samples, out: tuple[str, ...] = ()) -> list[str]:
    return list(outliers({str(at): each for at, each in enumerate(nodes)}, out, NOW))


def test_a_node_that_fails_far_oftener_than_the_others_is_taken_out() -> None:
    why = outliers({"a": node(failed=0.5), "b": node(), "c": node()}, (), NOW)
    assert why == {"a": "50% of its legs failed, of the others' 0%"}
    assert found(node(failed=0.5), node(failed=0.4), node(failed=0.5)) == []  # what fails for all is nobody's fault


def legs(failed: int, count: int = 20, tokens: int = 1000) -> Samples:
    """What prefill legs and long decode legs leave, one after the other, of which some fail."""
    standing = Standing(random.Random(7))
    for at in range(count):
        leg = Passage(standing, standing, NOW, waits_for_us=True)
        if at < failed:
            leg.failed("it broke", NOW)
            continue
        for _ in range(tokens):
            leg.heard(NOW, tokens=True)
        leg.ended(NOW)
    return standing.samples


@pytest.mark.parametrize("tokens", [1, 300])
def test_the_share_of_failures_is_of_legs_whatever_else_they_have_told(tokens: int) -> None:
    others = {"b": legs(0, tokens=tokens), "c": legs(0, tokens=tokens)}
    assert outliers({"a": legs(7, tokens=tokens), **others}, (), NOW)["a"].startswith("35% of its legs failed")
    assert outliers({"a": legs(5, tokens=tokens), **others}, (), NOW) == {}
    few = Samples()  # one leg that has failed, beside others that go on
    few.legs += [Sample(NOW, failed=True), *[Sample(NOW, ended=False, gap_s=0.01)] * ENOUGH]
    assert outliers({"a": few, **others}, (), NOW) == {}


def test_a_leg_that_computes_its_prompt_is_one_of_each_kind() -> None:
    prefill, decode = Standing(random.Random(7)), Standing(random.Random(7))
    leg = Passage(prefill, decode, NOW, waits_for_us=False)
    for _ in range(3):
        leg.heard(NOW, tokens=True)
    leg.ended(NOW)
    assert [[each.ended for each in standing.samples.legs] for standing in (prefill, decode)] == [[True], [True]]


def test_a_node_that_is_far_slower_is_taken_out() -> None:
    assert found(node(), node(), node(first_s=2.0)) == ["2"]
    assert found(node(), node(gap_s=0.2), node()) == ["1"]
    assert found(node(), node(first_s=0.39), node()) == []
    assert found(node(gap_s=0.001), node(gap_s=0.001), node(gap_s=0.01)) == []  # ten times nothing is little


def test_times_that_differ_widely_among_all_are_no_outliers() -> None:
    spread = [node(first_s=0.2 * 1.5**at) for at in range(9)]
    assert found(*spread) == []
    assert found(*[node(first_s=0.2)] * 8, node(first_s=3.0)) == ["8"]


def test_little_or_old_evidence_is_none() -> None:
    assert found(node(ENOUGH - 1, failed=1.0), node(), node()) == []
    assert found(node(failed=1.0)) == []
    old = Samples()
    old.legs += [Sample(NOW - 61, failed=True)] * 50
    assert found(old, node(), node()) == []


def test_at_most_a_share_is_out_at_once_the_worst_first_and_never_the_last() -> None:
    good = [node() for _ in range(4)]
    assert found(node(failed=0.6), node(failed=1.0), *good) == ["1", "0"]
    assert found(node(failed=0.6), node(failed=1.0), *good, out=("5",)) == ["1"]
    assert found(node(failed=0.6), node(failed=1.0), *good, out=("4", "5")) == []
    assert found(node(failed=1.0), node()) == ["0"]
    assert found(node(failed=1.0), node(), out=("1",)) == []


@given(st.lists(st.builds(node, st.integers(0, 30), st.floats(0, 1), st.floats(0, 9), st.floats(0, 1)), max_size=12))
def test_never_more_than_the_share_and_equals_are_never_taken_out(nodes: list[Samples]) -> None:
    taken = found(*nodes)
    assert len(taken) <= max(0, min(len(nodes) - 1, max(1, math.floor(MOST * len(nodes)))))
    assert found(*[nodes[0]] * 6 if nodes else []) == []
