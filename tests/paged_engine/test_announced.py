"""What an engine's load tells for a price: sums that are right after anything, and time for prompts
of others.
"""

from dataclasses import replace

import pytest
import scheduling
from hypothesis import example, given
from hypothesis import strategies as st
from invariants import check_scheduler
from scheduling import BLOCK, EOS, drain, launch, ticket

from kvrelay.paged_engine.request import Request, State
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.wire.step_costs import MEMORY_MS, TARGET_USED, TPOT_STEPS, StepCosts

COSTS = StepCosts(8.0, 0.25, 1 / 1024, -2.0, 0.125, 1 / 8192)
IDLE_GAIN = 1 - 1 / (TARGET_USED * TPOT_STEPS)
"""A share of each millisecond: what an empty step leaves of the planned time per token."""


def make(costs: StepCosts = COSTS, blocks: int = 40, **options) -> Scheduler:
    scheduler = scheduling.make(blocks, **({"max_num_seqs": 6} | options))
    scheduler.budget = replace(scheduler.budget, costs=costs, gap_ms=50.0, pace=1.0)
    return scheduler


def request(name: str, prompt: list[int], max_tokens: int = 50, **submit) -> Request:
    return scheduling.request(name, prompt, max_tokens, **submit)


class Run:
    """A scheduler, and beside it what came of all requests, counted anew each time."""

    def __init__(self, **options) -> None:
        self.scheduler = make(**options)
        self.prompts_ms, self.names = 0.0, 0
        self.all: list[Request] = []

    def arrive(self, tokens: int, kind: str, max_tokens: int, **said) -> None:
        self.names += 1
        prompt = [2 + (kind == "other")] * tokens
        parent = next(iter(self.scheduler.live), None)
        if kind == "hold":
            said, max_tokens = said | {"hold": True}, 1
        elif kind == "fetch":
            said["fetch"] = ticket(tokens)
        elif kind == "fork" and parent is not None:
            said["fork_of"], prompt = parent.request_id, parent.token_ids[: parent.prompt_tokens]
        made = request(f"r{self.names}", prompt, max_tokens, **said)
        self.scheduler.add(made)
        self.all.append(made)
        if made.fetch is None:
            self.prompts_ms += COSTS.prompts_ms(
                made.work, made.work * (made.shared + made.work / 2)
            )

    def change(self, what: str, index: int) -> None:
        live = list(self.scheduler.live)
        if not live:
            return
        chosen = live[index % len(live)]
        if what == "abort":
            self.scheduler.abort(chosen.request_id)
        elif what == "fetched" and chosen.state is State.FETCHING:
            self.scheduler.finish_fetch(chosen.request_id, [3])
        elif what == "failed" and chosen.fetch is not None:
            self.scheduler.fail_fetch(chosen.request_id, "PeerLost: gone", index % 3)

    def step(self) -> None:
        for chunk in launch(self.scheduler).chunks:
            if chunk.samples:
                self.scheduler.append(chunk.request, 3, 0.0)

    def compare(self) -> None:
        check_scheduler(self.scheduler)
        live = list(self.scheduler.live)
        load = self.scheduler.load(0.0)
        decode = [each for each in live if not each.hold]
        assert load.strictest_tpot_ms == min((each.tpot_ms for each in decode), default=0)
        here = [each for each in self.all if each.tpot_ms]
        expected = sum(each.output_tokens if each.finish else each.expected_output for each in here)
        assert load.token_rate == pytest.approx(expected / MEMORY_MS)
        backlog_ms, tokens, promised = COSTS.prompts, 0, 0
        for each in live:
            waits = each.state is State.WAITING
            start = each.shared if waits else each.num_computed
            left = len(each.token_ids) + each.num_pending - start
            has = start if waits else len(each.blocks) * BLOCK
            in_the_end = each.prompt_tokens + each.expected_output
            if waits:  # also one that has more than was expected, and was preempted
                in_the_end = max(in_the_end, len(each.token_ids))
            promised += max(0, in_the_end - has)
            if each.fetch is None and (waits or left > 1):
                backlog_ms, tokens = backlog_ms + COSTS.chunk_ms(left, start), tokens + left
        assert (load.waiting_tokens, load.promised_tokens) == (tokens, promised)
        assert load.backlog_ms == pytest.approx(max(0.0, backlog_ms) if tokens else 0.0)
        assert load.prompt_share == pytest.approx(self.prompts_ms / MEMORY_MS)


ARRIVALS = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 150),
        "kind": st.sampled_from(["", "hold", "fetch", "fork", "other"]),
        "max_tokens": st.integers(2, 60),
        "tpot_ms": st.sampled_from([0.0, 20.0, 50.0, 1e9]),
        "expected_output": st.sampled_from([0, 1, 30]),
    }
)
CHANGES = st.tuples(st.sampled_from(["abort", "fetched", "fetched", "failed"]), st.integers(0, 20))


def arrival(kind: str) -> dict[str, object]:
    said = {"max_tokens": 60, "tpot_ms": 0.0, "expected_output": 30}
    return {"tokens": 100, "kind": kind} | said


@example([arrival(""), arrival("other"), 12, 12, 12])  # one is preempted
@example([arrival("fetch"), 1, ("failed", 0), 2])
@given(st.lists(st.one_of(ARRIVALS, st.integers(1, 12), CHANGES), min_size=5, max_size=25))
def test_sums_are_those_of_the_requests_after_any_course(course):
    """With chunks, forks, cached prefixes, fetches that fail, and a pool so small that requests are
    preempted.
    """
    run = Run(blocks=16)
    for each in course:
        if isinstance(each, dict):
            run.arrive(**each)
        elif isinstance(each, tuple):
            run.change(*each)
        else:
            for _ in range(each):
                run.step()
                run.compare()
        run.compare()


def test_what_is_not_said_of_an_answer_is_what_is_usual_here():
    scheduler = make()
    first = request("first", [2] * 10, max_tokens=3)
    scheduler.add(first)
    assert (first.tpot_ms, first.expected_output) == (
        TPOT_STEPS * COSTS.step,
        3,
    )  # never more than it may have
    long = request("long", [2] * 10, max_tokens=1000)
    scheduler.add(long)
    assert long.expected_output == 128
    scheduler.append(long, EOS, 0.0)
    for name in range(300):
        short = request(str(name), [2], max_tokens=1000)
        scheduler.add(short)
        scheduler.append(short, 3, 0.0)
        scheduler.append(short, EOS, 0.0)
    late = request("late", [2] * 10, max_tokens=1000, tpot_ms=7.0)
    scheduler.add(late)
    assert (late.tpot_ms, late.expected_output) == (7.0, 2)


def test_an_idle_node_gains_time_for_prompts_of_others_up_to_a_limit():
    scheduler = make()
    assert scheduler.load(10.0).spill_ms == 250
    assert scheduler.load(11.0).spill_ms == pytest.approx(250 + 1000 * IDLE_GAIN)
    assert scheduler.load(11.0).spill_ms == scheduler.load(5.0).spill_ms
    assert scheduler.load(100.0).spill_ms == 2000


@pytest.mark.parametrize(("cached", "left"), [(False, 400), (True, 16)])
def test_a_prompt_that_another_could_compute_takes_its_own_time_without_what_is_cached(
    cached, left
):
    scheduler = make()
    if cached:
        scheduler.add(request("before", [2] * 400, max_tokens=2))
        drain(scheduler)
    scheduler.add(request("own", [2] * 16))
    assert scheduler.load(0.0).spill_ms == 250
    scheduler.add(request("spilled", [2] * 400, spill_tokens=400))
    assert scheduler.load(0.0).spill_ms == pytest.approx(
        250 - COSTS.prompts_ms(left, left * (400 - left / 2))
    )


@pytest.mark.parametrize(
    ("tpot_ms", "expected", "gains"), [(9.0, 1, True), (8.4, 1, False), (1e9, 30_000, False)]
)
def test_strict_answers_and_many_tokens_leave_no_time_for_prompts_of_others(
    tpot_ms, expected, gains
):
    """A step takes 8 ms: of 9 ms 0.95 are used, which leave 0.06; and 5 tokens per millisecond, 0.25 ms each,
    leave nothing.
    """
    scheduler = make()
    scheduler.add(
        request("r", [2] * 10, max_tokens=30_000, tpot_ms=tpot_ms, expected_output=expected)
    )
    scheduler.load(0.0)
    assert (scheduler.load(1.0).spill_ms > 250) == gains


def test_without_measured_costs_there_is_no_time_in_a_load():
    scheduler = make()
    scheduler.budget = replace(scheduler.budget, costs=None, pace=0.0)
    scheduler.add(request("r", [2] * 100, spill_tokens=100))
    load = scheduler.load(0.0)
    assert (load.pace, load.backlog_ms, load.prompt_share, load.spill_ms) == (0, 0, 0, 250)
    assert load.waiting_tokens == 100


def test_a_prompt_is_backlog_until_the_device_has_computed_it():
    """On a GPU the next step is launched while one runs: what is launched is not done."""
    scheduler = make()
    scheduler.add(request("a", [2] * 40))
    before = scheduler.load(0.0)
    plan = launch(scheduler)
    assert scheduler.load(0.0).backlog_ms == 0
    launched = scheduler.load(0.0, plan.chunks)
    assert (launched.backlog_ms, launched.waiting_tokens) == (
        before.backlog_ms,
        before.waiting_tokens,
    )
    half_ms = before.backlog_ms / 2
    assert scheduler.load(0.0, plan.chunks, half_ms / 1e3).backlog_ms == pytest.approx(half_ms)
    assert scheduler.load(0.0, plan.chunks, 9.0).backlog_ms == 0
