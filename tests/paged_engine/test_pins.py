"""Pinned blocks of a pool against a plain model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from invariants import check_pool

from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.wire.kv_events import Pin

TOTAL, MOST, LONGEST = 12, 8, 50
NAMES = [bytes([number]) * 16 for number in range(TOTAL + 3)]
SHARES = {"a": 0.25, "b": 0.5, "c": 1.0}
first = st.integers(0, TOTAL + 2)


class Pins(RuleBasedStateMachine):
    """The model knows each pin: its owner, its time, and when it ends. No block is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.now = BlockPool(TOTAL + 1), 0.0
        self.pool.allow_pins(MOST / TOTAL, LONGEST)
        self.pins: dict[bytes, tuple[str, int, float]] = {}
        for at in range(TOTAL):
            self.compute(at)

    @rule(first=first)
    def compute(self, first: int) -> None:
        if self.pool.lookup([NAMES[first]]):
            return
        before = set(self.pool._block_of)
        lasts = {name: self.pins[name][1] if name in self.pins else 0 for name in before}
        (block,) = self.pool.allocate(1) or []
        for gone in before - set(self.pool._block_of):
            assert lasts[gone] == min(lasts.values())
            self.pins.pop(gone, None)
        self.pool.publish(block, NAMES[first])
        self.pool.release([block])

    @rule(first=first)
    def use(self, first: int) -> None:
        name = NAMES[first]
        blocks = self.pool.lookup([name])
        self.pool.share(blocks)
        self.pool.release(blocks)
        if name in self.pins:
            owner, lasts, _ = self.pins[name]
            self.pins[name] = owner, lasts, self.now + lasts

    @rule(
        first=first,
        count=st.integers(1, 6),
        owner=st.sampled_from("abc"),
        wish=st.sampled_from([0, 10, 30, 1000]),
    )
    def pin(self, first: int, count: int, owner: str, wish: int) -> None:
        names, lasts, wanted = NAMES[first:][:count], min(wish, LONGEST), 0
        for name in names:
            known = name in self.pins and self.pins[name][1] >= lasts
            others = [pin[0] for held, pin in self.pins.items() if held != name]
            full = others.count(owner) >= SHARES[owner] * TOTAL or len(others) >= MOST
            if not (lasts and self.pool.lookup([name])) or (full and not known):
                break
            wanted += 1
            if not known:
                self.pins[name] = owner, lasts, self.now + lasts
        assert self.pool.pin(names, Pin(owner, SHARES[owner], wish)) == wanted

    @rule(seconds=st.sampled_from([1, 9, 25]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.pool.expire(self.now)
        self.pins = {name: pin for name, pin in self.pins.items() if pin[2] > self.now}

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.pins = {}

    @invariant()
    def agrees(self) -> None:
        check_pool(self.pool)
        assert {self.pool._hash_of[block] for block in self.pool._pins} == set(self.pins)


Pins.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPins = Pins.TestCase


def test_what_expires_is_evicted_next_its_end_first() -> None:
    pool = BlockPool(4)
    pool.allow_pins(1.0, LONGEST)
    blocks = pool.allocate(3) or []
    for block, name in zip(blocks, NAMES, strict=False):
        pool.publish(block, name)
    assert pool.pin(NAMES[:2], Pin(seconds=9)) == 2
    pool.release(blocks)
    assert list(pool.victims()) == [NAMES[2]]
    pool.expire(9)
    assert list(pool.victims()) == [NAMES[1], NAMES[0], NAMES[2]]
