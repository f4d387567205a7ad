"""A simulated node: known answers of tiny cases, and what the engine's own scheduler says."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from benchmarks.placement import Cell, loads, rows, ways
from benchmarks.roles import H200, slowed
from kvrelay.paged_engine import waiting as engines_waiting
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.request import Request, StepPlan
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.planner.engine import OVERTAKEN, Engine
from kvrelay.planner.seat import Leg, PlacementHints
from kvrelay.planner.setting import Result, Setting, Stream
from kvrelay.planner.world import simulate
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.kv_events import root_of
from kvrelay.wire.router_config import POLICY_NAMES
from kvrelay.wire.sampling import SamplingParams


class Deaf:
    """Who hears nothing of a node."""

    begins = fetched = ended = gap = computed = staticmethod(lambda *_: None)


def run(streams: list[Stream], **setting: object) -> Result:
    return simulate(streams, Setting(**{"card": H200} | setting))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_request_alone_takes_what_its_parts_take(policy: str) -> None:
    stream = Stream(10.0, 4_096, 101)
    run([stream], policy=policy, prefill=1, decode=1)
    assert stream.ttft == pytest.approx(H200.prompt_ms(4_096))
    # The prompt is one chunk, so that all of it is fetched behind it.
    steps = stream.last - stream.first - H200.fetch_ms(4_096)
    middle = H200.step_ms(1, 4_096 + 49.5)
    assert steps == pytest.approx(100 * middle)


def test_steps_in_closed_form_are_those_one_by_one() -> None:
    """Two that overlap: the second joins at the end of a step, and leaves first."""
    first, second = Stream(0.0, 1_000, 401), Stream(333.0, 2_000, 51)
    run([first, second], prefill=2, decode=1)
    now, context, left = (
        first.first + H200.fetch_ms(1_000),
        {first: 1_000},
        {first: 400, second: 50},
    )
    joins = second.first + H200.fetch_ms(2_000)
    ends = {}
    while left:
        if second in left and now >= joins:
            context.setdefault(second, 2_000)
        now += H200.step_ms(len(context), sum(context.values()))
        for stream in list(context):
            context[stream] += 1
            left[stream] -= 1
            if not left[stream]:
                ends[stream] = now
                del left[stream], context[stream]
    assert first.last == pytest.approx(ends[first])
    assert second.last == pytest.approx(ends[second])


@pytest.mark.parametrize("policy", ["price", "prefix"])
def test_who_loses_its_room_goes_on_later(policy: str) -> None:
    streams = [Stream(30.0 * at, 200 + 977 * at % 8_800, 2 + 37 * at % 398) for at in range(200)]
    card = msgspec.structs.replace(H200, kv_tokens=14_000, max_num_seqs=12)
    run(streams, policy=policy, prefill=2, decode=2, card=card)
    assert any(stream.preempted for stream in streams)
    assert all(stream.at <= stream.begun < stream.first < stream.last for stream in streams)


def test_equal_seeds_give_equal_figures_and_others_do_not() -> None:
    def ends(seed: int) -> list[float]:
        streams = [Stream(30.0 * at, 500 + 89 * at % 8_000, 100) for at in range(100)]
        run(streams, prefill=4, decode=4, policy="least_queue", seed=seed)
        return [stream.last for stream in streams]

    assert ends(1) == ends(1) != ends(2)


def launched(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    for chunk in plan.chunks:
        scheduler.mark_launched(chunk)
    return plan


@pytest.mark.parametrize("shared", [0, 6_000, 50_000])
def test_prompts_end_in_the_order_in_which_the_engines_scheduler_ends_them(shared: int) -> None:
    """And find as much cached; of so many tokens the first ones are equal."""
    assert engines_waiting.OVERTAKEN == OVERTAKEN
    sizes = [9_000, 300, 20_000, 4_000, 100, 100, 12_000, 50, 8_193, 20_001]
    order: list[tuple[int, int]] = []
    waiting: list[tuple[float, object]] = []

    class Hears(Deaf):
        @staticmethod
        def computed(stream: Stream, *_: object) -> None:
            order.append((stream.number, stream.cached))

    node = Engine(H200, 16, lambda at, call: waiting.append((at, call)), Hears())
    scheduler = Scheduler(
        BlockPool(20_000), block_size=16, max_num_batched_tokens=H200.step_tokens, max_num_seqs=256,
        max_model_len=1 << 20, eos_token_ids=(),
    )  # fmt: skip
    scheduler.budget = node._budget
    for number, tokens in enumerate(sizes):
        equal = min(shared, tokens)
        names = range(tokens // 16)
        stream = Stream(
            0.0, tokens, 2, tuple(at if at < equal // 16 else 10_000 * number + at for at in names)
        )
        stream.number = number
        ids = [0] * equal + [number + 1] * (tokens - equal)
        request = Request(
            str(number), ids, tokens, SamplingParams(max_tokens=1, seed=1), 0.0, root_of("", "")
        )
        scheduler.add(request)
        node.submit(stream, Leg.PREFILL, 0.0)
        if number == 0:
            # The node begins its first step when the first prompt comes.
            plan = launched(scheduler)
    expected: list[tuple[int, int]] = []
    while plan.chunks:
        for chunk in plan.chunks:
            if chunk.samples:
                scheduler.append(chunk.request, 5, 0.0)
                assert chunk.request.cached_tokens is not None
                expected.append((int(chunk.request.request_id), chunk.request.cached_tokens))
        plan = launched(scheduler)
    while waiting:
        at, call = waiting.pop(0)
        call(at)  # type: ignore[operator]
    assert order == expected


def test_a_node_announces_what_the_engines_scheduler_does() -> None:
    """Of prompts that wait, of one that runs, and of what is fetched; five seconds later, too."""

    node = Engine(H200, 16, lambda *_: None, Deaf())
    scheduler = Scheduler(
        BlockPool(50_000), block_size=16, max_num_batched_tokens=H200.step_tokens, max_num_seqs=256,
        max_model_len=1 << 20, eos_token_ids=(),
    )  # fmt: skip
    scheduler.budget = node._budget
    for number, (leg, tokens, told) in enumerate([
        (Leg.WHOLE, 3_000, PlacementHints(20.0, 70)),
        (Leg.PREFILL, 9_000, PlacementHints()),
        (Leg.WHOLE, 1_000, PlacementHints()),
        (Leg.WHOLE, 2_000, PlacementHints(9.0, 30, spill_tokens=2_000)),
    ]):  # fmt: skip
        wishes = {
            "hold": leg is Leg.PREFILL,
            "tpot_ms": told.tpot_ms,
            "expected_output": told.expected_output,
        }
        params = SamplingParams(max_tokens=1 if leg is Leg.PREFILL else 1 << 30, seed=1)
        submit = Submit(
            str(number), [number] * tokens, params, spill_tokens=told.spill_tokens, **wishes
        )  # type: ignore[arg-type]
        assert (node.load(0.0).spill_ms, scheduler.load(0.0).spill_ms) == (250.0, 250.0)
        node.submit(Stream(0.0, tokens, 100), leg, 0.0, told=told)
        scheduler.add(Request.from_submit(submit, 0.0))
        if number == 0:
            chunks = launched(scheduler).chunks
    for now in (0.0, 5.0):
        seen, expected = node.load(now * 1e3), scheduler.load(now, chunks, now)
        for name in (
            "running", "waiting", "waiting_tokens", "context_tokens", "pace", "backlog_ms", "token_rate",
            "prompt_share", "row_weight", "strictest_tpot_ms", "spill_ms",
        ):  # fmt: skip
            assert getattr(seen, name) == pytest.approx(getattr(expected, name)), name
        assert seen.promised_tokens == pytest.approx(expected.promised_tokens, abs=16)
    assert seen.spill_ms > 0 < seen.token_rate


def test_a_node_announces_how_long_its_steps_take_now() -> None:
    calls: list[tuple[float, Callable[[float], None]]] = []
    card = slowed(H200, 1.5)
    card.__dict__["costs"] = H200.costs  # what it says of itself
    node = Engine(card, 16, lambda at, call: calls.append((at, call)), Deaf())
    node.submit(Stream(0.0, 1_000, 300), Leg.WHOLE, 0.0)
    while calls:
        at, call = calls.pop(0)
        call(at)
    load = node.load(at)
    assert load.pace == pytest.approx(1.5, rel=0.02)
    node.submit(Stream(0.0, 9_000, 2), Leg.PREFILL, at)
    later = Stream(0.0, 500, 2)
    node.submit(later, Leg.PREFILL, at)
    backlog = node.load(at)
    costs = H200.costs.scaled(load.pace)
    assert backlog.backlog_ms == pytest.approx(
        costs.prompts_ms(9_000 + 500, 500 * 250 + 9_000 * 4_500)
    )


def test_of_two_equal_prompts_at_once_the_second_waits_for_what_the_first_computes() -> None:
    blocks = tuple(range(312))
    first, second = Stream(0.0, 40_000, 2, blocks), Stream(1.0, 40_000, 2, blocks)
    run([first, second], prefill=1, decode=1)
    assert second.first > first.first


def test_of_a_mixture_the_price_serves_more_in_time_than_colocated_servers_and_strict_roles() -> (
    None
):
    load = next(each for each in loads(2) if each.name == "15, 4, 0.8")
    shares = {
        name: Cell(load, setting, told, 20.0, 1).in_time()
        for name, (setting, told) in ways(2, H200).items()
    }
    assert list(shares) == ["colocated", "strict 1", "price 1", "told 1"]
    assert min(shares["price 1"], shares["told 1"]) > 0.9 > shares["colocated"] > shares["strict 1"]
    (line,) = rows(load, 2, shares)
    assert line.endswith(f"{shares['colocated']:.1%}, colocated |")
