"""What holds of a scheduler, its queue and its blocks at any time."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from kvrelay.paged_engine.blocks import NO_PIN, NULL_BLOCK, BlockPool
from kvrelay.paged_engine.request import State
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.paged_engine.waiting import WaitingQueue


def check_pool(pool: BlockPool) -> None:
    references, hashes = pool._references, pool._hash_of
    used = [block for block in range(1, pool.num_blocks) if references[block]]
    assert len(used) + pool.free == pool.total
    lines, pins = pool._lines, pool._pins
    free = [block for line in lines.values() for block in line]
    assert len(set(free)) == len(free) == pool.free
    assert not any(references[block] for block in free)
    assert all(pins.get(block, NO_PIN).seconds == of for of in lines for block in lines[of])
    assert all(list(line.values()) == sorted(line.values()) for line in lines.values())
    assert all(hashes[block] for block in pins)
    assert +pool._pinned_of == Counter(pin.owner for pin in pins.values())
    assert min(references) >= 0
    assert {h: block for block, h in enumerate(hashes) if h is not None} == pool._block_of
    assert hashes[NULL_BLOCK] is None
    assert NULL_BLOCK not in free


def check_waiting(queue: WaitingQueue) -> None:
    line = queue._line
    assert all(each.state is State.WAITING and not each.blocks for each in line)
    assert line == sorted(line, key=lambda each: each.turn)
    assert queue.tokens == sum(each.work for each in line)
    assert queue.pairs == sum(each.work * (each.shared + each.work / 2) for each in line)
    assert queue.wanted == sum(each.wanted for each in line)


def check_scheduler(scheduler: Scheduler) -> None:
    pool, kept, live = scheduler.pool, scheduler.kept, scheduler._requests
    running, fetching = scheduler._running, scheduler._fetching
    check_pool(pool)
    owned = [block for request in live.values() for block in request.blocks]
    unsettled = (blocks for blocks, _ in kept._unsettled.values())
    owned += itertools.chain(*kept._held.values(), *kept._lent.values(), *unsettled)
    assert len(set(owned)) == pool.total - pool.free
    check_waiting(scheduler._waiting)
    announced, decoding = scheduler._announced, [r for r in live.values() if r.tpot_ms]
    assert announced._tpots == Counter(r.tpot_ms for r in decoding)
    weights = sum(1 / (r.tpot_ms * max(1, r.expected_output)) for r in decoding)
    assert math.isclose(announced.row_weight, weights, rel_tol=1e-9, abs_tol=1e-12)
    assert all(live[request.request_id].state is State.RUNNING for request in running)
    # Somebody may be reading its blocks.
    assert all(each.state is State.RUNNING for each in live.values() if each.offered)
    assert len(live) == len(scheduler._waiting) + len(running) + len(fetching)
    writers: dict[int, str] = {}
    for request in [*running, *fetching.values()]:
        assert len(request.blocks) >= scheduler._blocks_for(request.num_computed)
        written = max(request.num_computed // scheduler._block_size, request.num_published)
        for block in request.blocks[written:]:
            assert writers.setdefault(block, request.request_id) == request.request_id
