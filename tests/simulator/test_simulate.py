"""`python -m benchmarks.simulate`: known answers of tiny cases, equal seeds, every request ends once."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.simulate import main
from load.measures import percentile
from load.workloads import SCALE, WORKLOADS, Asked, read_trace
from paged_engine import waiting as engines_waiting
from paged_engine.blocks import BlockPool
from paged_engine.request import Request
from paged_engine.scheduler import Scheduler
from paged_engine.step_plan import StepPlan
from router.policies.by_name import POLICIES
from simulator.block_cache import BlockCache
from simulator.engine import OVERTAKEN, Engine
from simulator.seat import Leg
from simulator.setting import OMNISCIENT, Result, Setting
from simulator.speeds import H200, Speeds
from simulator.stream import Stream, at_load, streams_at, streams_of
from simulator.summary import plot, summary_of, table
from simulator.world import simulate
from wire.hashes import root_of
from wire.sampling import SamplingParams

SPEEDS = Speeds(H200)


def run(streams: list[Stream], **setting: object) -> Result:
    return simulate(streams, Setting(**setting))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [*sorted(POLICIES), OMNISCIENT])
def test_a_request_alone_takes_what_its_parts_take(policy: str) -> None:
    stream = Stream(10.0, 4_096, 101)
    run([stream], policy=policy, prefill=1, decode=1)
    assert stream.ttft == pytest.approx(SPEEDS.prompt_ms(4_096))
    # The prompt is one chunk, so that all of it is fetched behind it.
    steps = stream.last - stream.first - SPEEDS.fetch_ms(4_096)
    middle = SPEEDS.step_ms(1, 4_096 + 49.5)
    assert steps == pytest.approx(100 * middle)


def test_the_speeds_are_near_those_that_were_measured() -> None:
    assert 4_096 / SPEEDS.prompt_ms(4_096) * 1e3 == pytest.approx(43_140, rel=0.02)
    for running, measured in ((1, 4.06), (32, 5.16), (128, 9.20)):
        assert SPEEDS.step_ms(running, running * 1_024) == pytest.approx(measured, rel=0.04)


def test_steps_in_closed_form_are_those_one_by_one() -> None:
    """Two that overlap: the second joins at the end of a step, and leaves first."""
    first, second = Stream(0.0, 1_000, 401), Stream(333.0, 2_000, 51)
    run([first, second], prefill=2, decode=1)
    now, context, left = first.first + SPEEDS.fetch_ms(1_000), {first: 1_000}, {first: 400, second: 50}
    joins = second.first + SPEEDS.fetch_ms(2_000)
    ends = {}
    while left:
        if second in left and now >= joins:
            context.setdefault(second, 2_000)
        now += SPEEDS.step_ms(len(context), sum(context.values()))
        for stream in list(context):
            context[stream] += 1
            left[stream] -= 1
            if not left[stream]:
                ends[stream] = now
                del left[stream], context[stream]
    assert first.last == pytest.approx(ends[first])
    assert second.last == pytest.approx(ends[second])


def test_a_prompt_that_was_computed_before_is_cached() -> None:
    blocks = tuple(range(32))
    first, again = Stream(0.0, 4_100, 10, blocks), Stream(5_000.0, 4_100, 10, blocks)
    run([first, again], prefill=3, decode=3)
    assert (first.cached, again.cached) == (0, 4_096)
    assert again.ttft < first.ttft / 10


def test_the_shortest_prompt_goes_first() -> None:
    long, short = Stream(0.0, 40_000, 2), Stream(1.0, 100, 2)
    run([long, short], prefill=1, decode=1)
    assert short.first < long.first
    long, short = Stream(0.0, 40_000, 2), Stream(1.0, 100, 2)
    run([long, short], prefill=1, decode=1, shortest_first=False)
    assert short.first >= long.first > 8 * SPEEDS.prompt_ms(4_096)


@pytest.mark.parametrize("policy", ["cost", OMNISCIENT])
def test_every_request_ends_once_and_in_order(policy: str) -> None:
    speeds = Speeds(msgspec.structs.replace(H200, kv_tokens=20_000, max_num_seqs=12))
    streams = streams_of(WORKLOADS["sessions"], 300, 2, 1)
    streams = [stream for stream in streams if stream.prompt + stream.output < 10_000]
    result = run(streams, policy=policy, prefill=2, decode=2, routers=2, stale_ms=50.0, speeds=speeds)
    assert result.preemptions > 0
    for stream in streams:
        assert stream.at <= stream.begun < stream.first < stream.last
        assert 0 <= stream.cached < stream.prompt
        assert stream.tpot >= SPEEDS.step_ms(1, stream.prompt) * 0.99
    # One time between tokens for each token after the first, and what was waited beside.
    assert sum(result.gaps.values()) >= sum(stream.output - 1 for stream in streams)


def test_equal_seeds_give_equal_figures_and_others_do_not() -> None:
    def ends(seed: int) -> list[float]:
        streams = streams_of(WORKLOADS["chat"], 200, 4, 3)
        run(streams, prefill=4, decode=4, routers=3, stale_ms=100.0, seed=seed)
        return [stream.last for stream in streams]

    assert ends(1) == ends(1) != ends(2)


def test_old_news_of_others_cost_little() -> None:
    """Eight routers with reports that are 0.5 s old: p99 stays below twice that of an omniscient balancer."""

    def p99(policy: str, **setting: float) -> float:
        streams = streams_of(SCALE, 2_000, 30, 0)
        run(streams, policy=policy, prefill=30, decode=30, prefixes=False, conditional=False, **setting)
        return percentile(sorted(stream.ttft for stream in streams[200:]), 0.99)

    best, old, blind = p99(OMNISCIENT), p99("cost", routers=8, stale_ms=500.0), p99("random")
    assert best < old < 2.4 * best
    assert old < 0.8 * blind


def launched(scheduler: Scheduler) -> StepPlan:
    """The next step, which is under way."""
    plan = scheduler.schedule(0.0)
    for chunk in plan.chunks:
        scheduler.launched(chunk)
    return plan


@pytest.mark.parametrize("shared", [0, 6_000, 50_000])
def test_prompts_end_in_the_order_in_which_the_engines_scheduler_ends_them(shared: int) -> None:
    """And find as much cached; of so many tokens the first ones are equal."""
    assert engines_waiting.OVERTAKEN == OVERTAKEN
    sizes = [9_000, 300, 20_000, 4_000, 100, 100, 12_000, 50, 8_193, 20_001]
    speeds = SPEEDS
    order: list[tuple[int, int]] = []
    waiting: list[tuple[float, object]] = []

    class Hears:
        begins = fetched = ended = gap = staticmethod(lambda *_: None)

        @staticmethod
        def computed(stream: Stream, *_: object) -> None:
            order.append((stream.number, stream.cached))

    node = Engine(speeds, 16, lambda at, call: waiting.append((at, call)), Hears())
    scheduler = Scheduler(
        BlockPool(20_000), block_size=16, max_num_batched_tokens=speeds.step_tokens, max_num_seqs=256,
        max_model_len=1 << 20, eos_token_ids=(),
    )  # fmt: skip
    scheduler.budget = node._budget
    for number, tokens in enumerate(sizes):
        equal = min(shared, tokens)
        names = range(tokens // 16)
        stream = Stream(0.0, tokens, 2, tuple(at if at < equal // 16 else 10_000 * number + at for at in names))
        stream.number = number
        ids = [0] * equal + [number + 1] * (tokens - equal)
        request = Request(str(number), ids, tokens, SamplingParams(max_tokens=1, seed=1), 0.0, root_of("", ""))
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


def test_what_is_used_is_never_pushed_out() -> None:
    cache = BlockCache(1_000, 100)
    assert cache.take((1, 2, 3), 50) == (1, 2, 3)
    cache.ready((1, 2, 3))
    assert cache.take((1, 2, 9), 0) == (1, 2, 9)
    cache.ready((9,))
    assert cache.cached((1, 2, 3, 4)) == 300
    assert cache.free == 1_000 - 400 - 50
    cache.give_back((1, 2, 3), 50)
    assert cache.free == 700
    assert cache.cached((1, 2, 3)) == 300
    assert not cache.room_for((5, 6, 7), 401)
    cache.take((), 650)
    assert cache.cached((1, 2, 3)) == 200
    assert cache.news() == ([1, 2, 3, 9], [3])
    assert cache.news() == ([], [])


def test_what_is_not_computed_yet_is_found_by_nobody() -> None:
    cache = BlockCache(1_000, 100)
    assert cache.take((1, 2, 3), 0) == (1, 2, 3)
    assert cache.cached((1, 2, 3)) == 0
    cache.ready((1,))
    assert cache.cached((1, 2, 3)) == 100
    assert cache.room_for((1, 2, 3), 500)
    assert not cache.room_for((1, 2, 3), 501)
    assert cache.take((1, 2, 3), 500) == (1,)
    assert (cache.free, cache.private) == (0, 700)
    cache.give_back((1,), 700)
    cache.give_back((1, 2, 3), 0)
    assert cache.free == 1_000
    assert cache.cached((1, 2, 3)) == 100
    assert cache.news() == ([1], [])


def test_of_two_equal_prompts_at_once_the_second_waits_for_what_the_first_computes() -> None:
    blocks = tuple(range(312))
    first, second = Stream(0.0, 40_000, 2, blocks), Stream(1.0, 40_000, 2, blocks)
    run([first, second], prefill=1, decode=1)
    assert second.first > first.first
    away = Stream(0.0, 40_000, 2, blocks)
    run([away, Stream(1.0, 100, 2)], policy=OMNISCIENT, prefill=1, decode=1)
    assert away.cached == 0


def test_a_trace_is_read_and_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures, drawing = tmp_path / "trace.jsonl", tmp_path / "figures.json", tmp_path / "plot.svg"
    lines = [
        {"timestamp": 1e12 + 100 * at, "input_length": 1_100, "output_length": 1 + at, "hash_ids": [0, at, at + 1]}
        for at in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    streams = read_trace(trace)
    assert (streams[3].at, streams[3].prompt, streams[3].output, streams[3].blocks) == (300.0, 1_100, 4, (0, 3))
    assert main(
        ["--workloads", "trace", "chat", "--policies", "cost", "omniscient", "--trace", str(trace), "--requests", "20",
         "--nodes", "2:2", "--json", str(figures), "--plot", str(drawing)]
    ) == 0  # fmt: skip
    assert "| trace | omniscient |" in capsys.readouterr().out
    assert [(each["workload"], each["policy"]) for each in json.loads(figures.read_text())] == [
        ("trace", "cost"), ("trace", "omniscient"), ("chat", "cost"), ("chat", "omniscient"),
    ]  # fmt: skip
    assert drawing.read_text().startswith("<svg")
    assert main(["--scale", "--requests", "40", "--nodes", "4:4", "--policies", "cost", "--routers", "2"]) == 0
    assert "| cost | 2 | 0.5 s |" in capsys.readouterr().out


def test_a_request_alone_comes_at_once_whatever_the_load() -> None:
    alone = [Asked(0.0, 100, 5)]
    assert [stream.at for stream in (*at_load(alone, 1_000.0), *streams_at(alone, 3.0))] == [0.0, 0.0]


def test_what_was_not_answered_is_not_good_and_is_told() -> None:
    speeds = Speeds(msgspec.structs.replace(H200, kv_tokens=4_096))
    streams = [Stream(100.0 * at, 5_000 if at % 2 else 50, 5) for at in range(20)]
    summary = summary_of("made up", run(streams, prefill=1, decode=1, speeds=speeds))
    assert (summary.requests, summary.refused, summary.good) == (18, 9, 0.5)
    assert summary.ttft_p50 > 0
    assert "50.0% (5/s), 9 not answered" in table([summary], scale=False)


def test_a_plot_leaves_out_what_is_not_known() -> None:
    drawing = plot("a < b", ["x", "y"], {"one": [1.0, None], "two": [100.0, 10.0]}, "ms")
    assert drawing.count("<circle") == 3
    assert "a &lt; b" in drawing
