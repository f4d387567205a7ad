"""A prefix cache tells its changes; they are lost, doubled and reordered, and after a replay all is
known.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.node.kv_events import EventLog
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.wire.engine_messages import BlockText, CacheChanges
from kvrelay.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    extend,
    is_snapshot,
    read_batch,
)


def applied(held: set[bytes], batches: list[EventBatch]) -> set[bytes]:
    held = set(held)
    for batch in batches:
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    held.clear()
                case BlockStored():
                    held.update(h for h in event.block_hashes if isinstance(h, bytes))
                case BlockRemoved():
                    held.difference_update(h for h in event.block_hashes if isinstance(h, bytes))
    return held


def chain(prompt: int, blocks: int) -> list[bytes]:
    """Prompts share their first block."""
    hashes: list[bytes] = []
    extend(hashes, [0, *(prompt * 100 + at for at in range(1, blocks))], 1)
    return hashes


class Cache:
    """A pool whose prompts come and go, and the log of it."""

    def __init__(self, buffer_steps: int = 9_999) -> None:
        self.pool = BlockPool(9)
        self.pool.note_changes()
        self.log = EventLog(1, buffer_steps)
        self.truth: set[bytes] = set()

    def serve(self, prompt: int, blocks: int) -> None:
        hashes = chain(prompt, blocks)
        shared = self.pool.lookup(hashes)
        self.pool.share(shared)
        fresh = self.pool.allocate(blocks - len(shared))
        assert fresh is not None
        for at, block in enumerate(fresh, len(shared)):
            self.pool.publish(block, hashes[at], hashes[at - 1] if at else None)
        self.pool.release([*shared, *fresh])
        self.truth = {h for p in range(10) for h in chain(p, 9) if self.pool.lookup([h])}

    def tell(self) -> tuple[int, bytes]:
        changes = self.pool.changes()
        assert not self.pool.changed
        return self.log.append(
            CacheChanges(changes.stored, list(changes.removed), cleared=changes.cleared), 1.0
        )


steps = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), min_size=1, max_size=4),
    min_size=1,
    max_size=12,
)


@given(steps, st.integers(0, 2**32), st.sampled_from([1, 3, 9_999]), st.booleans())
@settings(max_examples=60)
def test_after_a_replay_the_listener_knows_what_the_node_holds(
    told: list[list[tuple[int, int]]], seed: int, buffer_steps: int, late: bool
) -> None:
    rng, cache = random.Random(seed), Cache(buffer_steps)
    held, taken = set[bytes](), 0
    for at, prompts in enumerate(told):
        for prompt, blocks in prompts:
            cache.serve(prompt, blocks)
        number, payload = cache.tell()
        if number == taken and rng.random() < 0.5 and not (late and at < len(told) // 2):
            held, taken = applied(held, [read_batch(payload)]), number + 1
        if rng.random() < 0.3 or at == len(told) - 1:
            for number, payload in cache.log.since(taken, 1.0):
                batch = read_batch(payload)
                assert number == taken or is_snapshot(batch)
                held, taken = applied(held, [batch]), number + 1
            assert (held, taken) == (cache.truth, cache.log.next_number)


def test_a_reset_cache_is_told_as_cleared_and_then_as_what_it_holds_since() -> None:
    cache = Cache(1 << 20)
    cache.serve(1, 4)
    held = applied(set(), [read(cache.tell())])
    assert len(held) == 4
    cache.pool.reset()
    cache.serve(2, 3)
    batch = read(cache.tell())
    assert isinstance(batch.events[0], AllBlocksCleared)
    assert not any(isinstance(event, AllBlocksCleared) for event in batch.events[1:])
    assert applied(held, [batch]) == cache.truth == set(chain(2, 3))
    cache.pool.reset()
    assert cache.pool.changed
    batch = read(cache.tell())
    assert batch.events == [AllBlocksCleared()]
    assert applied(held, [batch]) == set()
    assert cache.log.held == 0


def read(told: tuple[int, bytes]) -> EventBatch:
    return read_batch(told[1])


def test_what_is_in_blocks_is_told_with_adapter_and_salt_and_told_again() -> None:
    log = EventLog(2, buffer_steps=1, maps=True)
    one, two = chain(1, 2), chain(2, 2)[1:]
    texts = {
        one[0]: BlockText([1, 2], "lora", "salt"),
        one[1]: BlockText([3, 4], "lora"),
        two[0]: BlockText([5, 6]),
    }
    batches = [
        log.append(CacheChanges({one[0]: None, one[1]: one[0], two[0]: None}, [], texts), 1.0)
    ]
    log.append(CacheChanges({}, [two[0]]), 1.0)
    (snapshot,) = log.since(0, 1.0)
    for _, payload in (*batches, snapshot):
        events = [event for event in read_batch(payload).events if isinstance(event, BlockStored)]
        assert [
            (event.block_hashes, event.token_ids, event.lora_name, event.extra_keys)
            for event in events
        ] == [
            (one, [1, 2, 3, 4], "lora", [["lora", "salt"], ["lora"]]),
            (two, [5, 6], None, None),
        ][: len(events)]
        assert all(event.medium == "GPU" for event in events)
    assert len(events) == 1, "what is removed is told no more"


def test_what_is_held_is_told_again_without_being_made_again() -> None:
    log = EventLog(16, buffer_steps=10)

    def note() -> None:
        log.append(CacheChanges({chain(log.next_number, 2)[1]: None}, []), 1.0)

    while log.next_number < 12:
        note()
    first, *behind = log.since(0, 1.0)
    assert (first[0], behind) == (11, [])
    for at in range(10):
        note()
        again, *behind = log.since(0, 2.0)
        assert again[1] is first[1]
        assert [number for number, _ in behind] == list(range(12, 13 + at))
    held = applied(set(), [read_batch(payload) for _, payload in (again, *behind)])
    assert held == {chain(at, 2)[1] for at in range(22)}
    note()  # the batch behind it is kept no more
    ((number, payload),) = log.since(0, 3.0)
    assert (number, payload is first[1]) == (22, False)
    assert log.since(13, 3.0)[0][0] == 13, "the newest ten are kept"
