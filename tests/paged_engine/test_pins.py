"""Pinned blocks of a pool against a plain model, and what requests pin."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from invariants import check_pool
from scheduling import BLOCK, drain, make, request

from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.wire.kv_events import Pin

TOTAL, MOST, LONGEST = 12, 8, 50
NAMES = [bytes([number]) * 16 for number in range(20)]
SHARES = {"a": 0.25, "b": 0.5, "c": 1.0}


class Pins(RuleBasedStateMachine):
    """The model knows each name's pin: its owner, its time, and since when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.now = BlockPool(TOTAL + 1), 0.0
        self.pool.allow_pins(MOST / TOTAL, LONGEST)
        self.pinned: dict[bytes, tuple[str, int]] = {}
        self.since: dict[bytes, float] = {}
        """When a free block was used last."""
        self.used: list[list[int]] = []

    def names(self, blocks: list[int]) -> list[bytes]:
        return [name for name in NAMES if self.pool.lookup([name])[:1] in [[b] for b in blocks]]

    def lose(self, name: bytes) -> None:
        self.pinned.pop(name, None)
        self.since.pop(name, None)

    @rule(first=st.integers(0, 19), count=st.integers(1, 5))
    def compute(self, first: int, count: int) -> None:
        found = {name for name in NAMES if self.pool.lookup([name])}
        blocks = self.pool.allocate(count)
        if blocks is None:
            assert count > TOTAL - len({block for each in self.used for block in each})
            return
        gone = {name for name in found if not self.pool.lookup([name])}
        if any(name in self.pinned for name in gone):  # then nothing else was left
            assert all(name in self.pinned or name not in self.since for name in found - gone)
        for name in gone:
            self.lose(name)
        for block, name in zip(blocks, NAMES[first:], strict=False):
            self.pool.publish(block, name)
        self.used.append(blocks)

    @rule(name=st.sampled_from(NAMES))
    def find(self, name: bytes) -> None:
        if blocks := self.pool.lookup([name]):
            self.pool.share(blocks)
            self.since.pop(name, None)
            self.used.append(blocks)

    @rule(at=st.integers(0, 99))
    def release(self, at: int) -> None:
        if self.used:
            blocks = self.used.pop(at % len(self.used))
            self.pool.release(blocks)
            busy = {block for each in self.used for block in each}
            self.since |= dict.fromkeys(self.names([b for b in blocks if b not in busy]), self.now)

    @rule(
        first=st.integers(0, 19),
        count=st.integers(1, 6),
        owner=st.sampled_from(sorted(SHARES)),
        seconds=st.sampled_from([0, 10, 30, 1000]),
    )
    def pin(self, first: int, count: int, owner: str, seconds: int) -> None:
        names = NAMES[first : first + count]
        taken = self.pool.pin(names, Pin(owner, SHARES[owner], seconds))
        for at, name in enumerate(names):
            mine = [each for each, _ in self.pinned.values()].count(owner)
            longer = min(seconds, LONGEST)
            if not (self.pool.lookup([name]) and longer):
                assert taken == at
                return
            if self.pinned.get(name, ("", 0))[1] < longer:
                if mine >= min(MOST, SHARES[owner] * TOTAL) or len(self.pinned) >= MOST:
                    assert taken == at
                    return
                self.pinned[name] = owner, longer
                if name in self.since:
                    self.since[name] = self.now
        assert taken == len(names)

    @rule(seconds=st.sampled_from([1, 9, 25]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.pool.expire(self.now)
        for name, since in self.since.items():
            if name in self.pinned and since + self.pinned[name][1] <= self.now:
                del self.pinned[name]

    @rule(name=st.sampled_from(NAMES))
    def doubt(self, name: bytes) -> None:
        for block in self.pool.lookup([name]):
            self.pool.forget(block)
            self.lose(name)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.pinned, self.since = {}, {}

    @invariant()
    def agrees(self) -> None:
        check_pool(self.pool)
        assert self.pool.pinned == len(self.pinned)
        assert {self.pool._hash_of[block] for block in self.pool._pins} == set(self.pinned)


Pins.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPins = Pins.TestCase


def text(number: int, blocks: int) -> list[int]:
    return [2 + (number * 7 + at) % 80 for at in range(blocks * BLOCK)]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_pinned_turn_outlives_a_flood_with_its_answer_until_its_time_is_over(
    pinned: bool,
) -> None:
    scheduler = make(blocks=17)
    scheduler.pool.allow_pins(0.5, 60)
    mine = request("mine", text(1, 3), 2 * BLOCK + 1, pin=Pin("me", 0.5, 60 if pinned else 0))
    scheduler.add(mine)
    drain(scheduler)

    def flood() -> None:
        for at in range(2, 6):
            scheduler.add(request(f"other {at}", text(at, 6), 2))
            drain(scheduler)

    flood()
    again = request("again", mine.token_ids)
    assert scheduler.cached_tokens(again) == (5 * BLOCK if pinned else 0)
    assert mine.pinned_tokens == scheduler.pool.pinned * BLOCK == (5 * BLOCK if pinned else 0)
    scheduler.pool.expire(61.0)
    flood()
    assert (scheduler.cached_tokens(again), scheduler.pool.pinned) == (0, 0)


def test_a_pin_yields_to_a_request_that_needs_its_room() -> None:
    scheduler = make(blocks=9)
    scheduler.pool.allow_pins(1.0, 60)
    scheduler.add(request("mine", text(1, 7), 2, pin=Pin("me", 1.0, 60)))
    drain(scheduler)
    assert (scheduler.pool.pinned, scheduler.pool.free) == (7, 8)
    large = request("large", text(2, 7), 10)
    scheduler.add(large)
    drain(scheduler)
    assert len(large.token_ids) == 7 * BLOCK + 10
    assert (scheduler.preemptions, scheduler.pool.pinned) == (0, 0)


def test_what_a_key_wishes_beyond_its_budget_is_evicted_like_all_else_and_counted() -> None:
    scheduler = make(blocks=21)
    scheduler.pool.allow_pins(0.5, 60)
    for at in range(4):
        one = request(f"{at}", text(at, 3), 2, pin=Pin("a" if at < 3 else "b", 0.25, 60))
        scheduler.add(one)
        drain(scheduler)
        assert one.pinned_tokens // BLOCK == [3, 2, 0, 3][at]
    assert (scheduler.pool.pinned, scheduler.pool.pins_refused) == (8, 2)
    again = request("again", text(0, 3), 2, pin=Pin("a", 0.25, 60))
    scheduler.add(again)  # has them: its budget is not asked
    drain(scheduler)
    assert (again.pinned_tokens, scheduler.pool.pins_refused) == (3 * BLOCK, 2)


def test_nothing_is_pinned_without_a_prefix_cache_or_after_a_reset() -> None:
    for options in ({"prefix_cache": False}, {}):
        scheduler = make(**options)
        scheduler.pool.allow_pins(0.5, 60)
        one = request("one", text(1, 3), 40, pin=Pin("a", 1.0, 60))
        scheduler.add(one)
        scheduler.schedule(0.0)
        scheduler.reset_prefix_cache()
        drain(scheduler)
        assert (one.pinned_tokens, scheduler.pool.pinned, scheduler.pool.pins_refused) == (0, 0, 0)
