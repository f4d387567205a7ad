"""When KV of another node's cache is worth its way, and who is asked for it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrelay.kv_transfer.connector import CachedAsked, Granted
from kvrelay.node.pulls import PullPrice, Pulls
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.kv_events import CPU, STORAGE, CacheChanges, extend
from kvrelay.wire.outputs import Load
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.step_costs import StepBudget, StepCosts
from kvrelay.wire.transfer import KvTransferParams, Source, Ticket

COSTS = StepCosts(5.0, 0.5, 0.0, 0.0, 0.1, 0.0)
SIZE = 10**6
TOKENS = 70


def test_a_first_contact_decides_nothing_and_a_slow_link_is_tried_again_in_a_minute() -> None:
    price = PullPrice()
    first_ms = price.pull_ms(SIZE, 0.0)
    price.read(SIZE, 5000.0, now=0.0)
    assert price.pull_ms(SIZE, 0.0) == first_ms
    price.read(SIZE, 500.0, now=1.0)
    assert price.pull_ms(SIZE, 1.0) > 500.0
    assert price.pull_ms(SIZE, 60.5) == first_ms


def test_slow_answers_count_too() -> None:
    price = PullPrice()
    for _ in range(3):
        price.asked(50.0, now=0.0)
    price.read(0, 1.0, now=0.0)  # all was cached meanwhile
    assert price.pull_ms(0, 0.0) == 50.0


class Node(Pulls):
    """Without an engine and with a connector that only remembers."""

    def __init__(self, kv_pull: str = "always") -> None:
        self.said: list[tuple[Any, ...]] = []
        self.met = set[str]()
        self.scheduler = Scheduler(
            BlockPool(33),
            block_size=16,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            max_model_len=99,
            eos_token_ids=(),
        )
        self.scheduler.budget = StepBudget(64, 16, StepCosts(5.0, 0.5, 0.0, 0.0, 0.1, 0.0))
        engine: Any = SimpleNamespace(
            scheduler=self.scheduler,
            pool=SimpleNamespace(block_size=16, block_bytes=1000),
            counters=SimpleNamespace(steps=0),
            in_flight=False,
        )
        connector: Any = SimpleNamespace(
            generation="own",
            meet=lambda source: source.generation in self.met,
            ask=lambda name, source, hashes, *_: self.said.append(
                ("ask", name, source.generation, len(hashes))
            ),
            watch=lambda name, _: self.said.append(("watch", name)),
            cancel=lambda name: self.said.append(("cancel", name)),
        )
        config: Any = SimpleNamespace(
            transfer=SimpleNamespace(kv_pull=kv_pull, transfer_deadline_s=10.0),
            engine=SimpleNamespace(tensor_parallel_size=1),
        )
        super().__init__(engine, connector, config)

    def begun(self, *sources: Source) -> Request:
        submit = Submit("r", [7] * TOKENS, SamplingParams(max_tokens=4, seed=1), sources=[*sources])
        request = Request.from_submit(submit, 0.0)
        self.scheduler.abort("r")
        self.scheduler.add(request)
        self.begin(request)
        return request


def names() -> list[bytes]:
    hashes: list[bytes] = []
    extend(hashes, [7] * TOKENS, 16)
    return hashes


def source(tokens: int, generation: str = "g") -> Source:
    return Source("127.0.0.1", 4000, generation, tokens)


def test_the_source_with_the_most_is_asked_and_then_the_next() -> None:
    node = Node()
    few = [source(1, "few") for _ in range(5000)]
    node.note_below(CacheChanges(names()[:2], [], medium=CPU))
    request = node.begun(*few, source(48, "most"), source(64, "own"), source(0, "tier"))
    for generation in ("most", "tier"):
        assert node.said.pop()[:3] == ("ask", "r", generation)
        assert request.asking
        node.handle(Granted("r", None, "NotHeld"))
    assert (node.said, request.asking, request.sources) == ([], False, [])


def test_what_is_not_below_the_pool_is_not_asked_for() -> None:
    node = Node()
    assert not node.begun(source(0, "tier")).asking
    node.note_below(CacheChanges(names()[1:], [], medium=CPU))
    assert not node.begun(source(0, "tier")).asking  # it lacks the first block
    node.note_below(CacheChanges(names()[:1], [], medium=STORAGE))
    node.note_below(CacheChanges([], names(), medium=CPU))
    assert node.begun(source(0, "tier")).asking
    assert node.said == [("ask", "r", "tier", 1)]


@pytest.mark.parametrize(
    ("peer_ms", "host_ms", "file_ms", "asked"),
    [
        (1.0, 1.0, 1.0, ("tier", 4)),
        (1.0, 1.0, 9.0, ("peer", 4)),
        (9.0, 1.0, 30.0, ("tier", 2)),
        (9.0, 9.0, 1.0, None),
    ],
)
def test_what_is_asked_for_saves_the_most_by_the_prices_that_routers_hear(
    peer_ms: float, host_ms: float, file_ms: float, asked: tuple[str, int] | None
) -> None:
    """A block takes 1.6 ms to compute."""
    node, now = Node("auto"), time.monotonic()
    node.met |= {"peer", "tier"}
    node.note_below(CacheChanges(names()[:2], [], medium=CPU))
    node.note_below(CacheChanges(names()[2:], [], medium=STORAGE))
    sources = source(48, "peer"), source(0, "tier")
    for each, ms in zip(sources, (peer_ms, host_ms), strict=True):
        for _ in range(2):
            node._price(each).asked(0.1, now)
            node._price(each).read(1000, ms / 2, now)
    for _ in range(2):
        node._files.read(1000, file_ms / 10, now)
    request = node.begun(*sources)
    assert [each[2:] for each in node.said] == ([asked] if asked else [])
    told = Load(**node.announced(now))
    assert told.peer_ms(16) == pytest.approx(0.1 + peer_ms / 2)
    assert told.tier_ms(16, 16) == pytest.approx(0.1 + host_ms / 2 + file_ms / 10)
    if asked == ("tier", 4):  # its answer waits for files
        request.asked_s = time.monotonic() - 10_000.0
        node.handle(Granted("r", Ticket(num_tokens=64, remote_block_ids=[[1, 2, 3, 4]])))
        assert node._files._bytes[-1][1] == pytest.approx(10_000_000 / 2_000, rel=0.01)
        assert Load(**node.announced(now)).host_ms == 0.1


def test_while_other_nodes_are_reset_nothing_is_taken_from_them() -> None:
    node = Node()
    node.note_below(CacheChanges(names(), [], medium=CPU))
    node.stay_alone(time.monotonic())
    assert not node.begun(source(64)).asking
    assert node.begun(source(64), source(0, "tier")).asking
    node.stay_alone(time.monotonic() - 40.0)
    assert node.begun(source(64)).asking


@pytest.mark.parametrize(
    "wrong", [{"port": 1 << 16}, {"port": -1}, {"tokens": -1}, {"tokens": 1 << 70}, {}]
)
def test_a_body_names_a_few_sources_by_numbers_in_range(wrong: dict[str, Any]) -> None:
    sources = [{"host": "h", "port": 1, "generation": "g", "tokens": 2} | wrong] * (
        1 if wrong else 65
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"sources": sources}, KvTransferParams)


def test_a_ticket_without_a_seat_is_given_back_and_the_prompt_computed() -> None:
    """Else two nodes wait for ever whose blocks are leased to each other's waiting requests."""
    node = Node()
    request = node.begun(source(64))
    node.handle(Granted("r", Ticket(num_tokens=32, remote_block_ids=[[5, 6]])))
    node.give_up(request.asked_s + 9.0)
    assert request.fetch is not None
    node.give_up(request.asked_s + 11.0)
    assert node.said[1:] == [("watch", "r"), ("cancel", "r")]
    assert (request.fetch, node.failures) == (None, {"NoSeat": 1})
    assert node.scheduler.schedule(0.0).chunks[0].start == 0


def test_a_source_that_was_too_slow_twice_is_left_for_a_minute_or_until_it_is_met() -> None:
    node = Node("auto")

    def asks(generation: str) -> bool:
        request = node.begun(source(64, generation))
        if request.asking:
            node.failed(request, "TransferTimeout", Ticket(remote_block_ids=[[1, 2, 3, 4]]))
        node.scheduler.abort("r")
        return request.asking

    assert [asks("slow") for _ in range(3)] == [True, True, False]
    assert asks("other")
    node.met.add("slow")
    assert [asks("slow") for _ in range(3)] == [True, True, False]


def test_blocks_that_another_node_reads_are_lent_until_its_lease_ends() -> None:
    node = Node()
    pool, kept = node.scheduler.pool, node.scheduler.kept
    (block,) = pool.allocate(1) or []
    pool.publish(block, names()[0])
    pool.release([block])
    node.handle(CachedAsked("cached.1", names()))
    assert (kept.num_lent, kept.num_held, pool.total - pool.free) == (1, 1, 1)
    kept.release("cached.1")
    assert (kept.num_lent, kept.num_held, pool.total - pool.free) == (0, 0, 0)
