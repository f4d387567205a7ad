"""A prefix cache tells its changes; they are lost, doubled and reordered, and after a replay all is
known.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.node.kv_events import EventLog
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.router.prefix.kv_events import MAX_AHEAD, EventStream
from kvrelay.wire.engine_messages import BlockText, CacheChanges
from kvrelay.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    extend,
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
    stream, held = EventStream(), set[bytes]()
    for at, prompts in enumerate(told):
        for prompt, blocks in prompts:
            cache.serve(prompt, blocks)
        number, payload = cache.tell()
        arrivals = [(number, payload)] * rng.choice([0, 1, 1, 2])
        if not late or at > len(told) // 2:
            for came, batch in rng.sample(arrivals, len(arrivals)):
                held = applied(held, stream.add(came, read_batch(batch)))
        if stream.gap and rng.random() < 0.5:
            held = replayed(cache, stream, held, rng)
        if stream.complete and stream.next_number == cache.log.next_number:
            assert held == cache.truth
    held = replayed(cache, stream, held, rng)
    assert not stream.gap
    assert stream.next_number == cache.log.next_number
    assert held == cache.truth


def replayed(cache: Cache, stream: EventStream, held: set[bytes], rng: random.Random) -> set[bytes]:
    again = cache.log.since(stream.next_number, 1.0)
    again += rng.sample(again, len(again) // 2)
    for number, payload in again:
        held = applied(held, stream.add(number, read_batch(payload)))
    return applied(held, stream.end_replay())


def test_a_reset_cache_is_told_as_cleared_and_then_as_what_it_holds_since() -> None:
    cache, stream = Cache(1 << 20), EventStream()
    cache.serve(1, 4)
    held = applied(set(), stream.add(*read(cache.tell())) + stream.end_replay())
    assert len(held) == 4
    cache.pool.reset()
    cache.serve(2, 3)
    number, batch = read(cache.tell())
    assert isinstance(batch.events[0], AllBlocksCleared)
    assert not any(isinstance(event, AllBlocksCleared) for event in batch.events[1:])
    assert applied(held, stream.add(number, batch)) == cache.truth == set(chain(2, 3))
    cache.pool.reset()
    assert cache.pool.changed
    number, batch = read(cache.tell())
    assert batch.events == [AllBlocksCleared()]
    assert applied(held, stream.add(number, batch)) == set()
    assert cache.log.held == 0


def read(told: tuple[int, bytes]) -> tuple[int, EventBatch]:
    return told[0], read_batch(told[1])


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


def test_what_waits_is_limited() -> None:
    stream, batch = EventStream(), EventBatch(1.0, [])
    stream.end_replay()
    for number in range(1, MAX_AHEAD + 10):
        assert stream.add(number, batch) == []
    assert len(stream.add(0, batch)) == MAX_AHEAD + 1
    assert stream.next_number == MAX_AHEAD + 1
