"""What a router counts of requests for the balance of roles, and what that comes to for each role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from router_doubles import MODEL, Call, cluster, decode, prefill, until
from test_balance_of_roles import AIMS, TARGETS, pool_of
from test_joined_walk import PROMPTS, first_token, rest

from planning.balance import Seen
from router.balance.seen import Typical
from router.balance.work import Counted, Work
from router.timeline import Timeline
from router.walk.job import COMPLETIONS_PATH
from wire.config import Role
from wire.errors import Overloaded, RateLimited
from wire.outputs import Load

P, D = Role.PREFILL, Role.DECODE
ARRIVED = 10.0


@dataclass(eq=False)
class Clock:
    """Stands at a second."""

    now: float = ARRIVED

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Walked:
    """A walk of one prompt, as far as it is."""

    tokens: int = 0
    each_s: float = 0.01
    came_s: float | None = None
    cached_tokens: int | None = 200
    choices: int = 1
    ttft_s: float | None = 0.2
    prompt_only: bool = False
    prompt_tokens: int | None = 1200
    more: Sequence[Walked] = ()
    job: Any = field(init=False)

    def __post_init__(self) -> None:
        targets = SimpleNamespace(ttft_s=self.ttft_s, tpot_s=0.02)
        fields = {"targets": targets, "choices": self.choices, "prompt_only": self.prompt_only}
        self.job = SimpleNamespace(model="m", prompt_tokens=1000, **fields)

    @property
    def timeline(self) -> Timeline:
        if self.came_s is None:
            return Timeline(ARRIVED)
        first = ARRIVED + self.came_s
        return Timeline(ARRIVED, first_token=first, last_token=first + self.each_s * (self.tokens - 1))

    @property
    def output_tokens(self) -> int:
        return self.tokens

    @property
    def parts(self) -> list[Walked]:
        return [self, *self.more]


def over(counted: Counted, status: int, **of: Any) -> Walked:
    """One that came and has ended."""
    walk = Walked(**of)
    counted.asked(walk)
    counted.ended(walk, status)
    return walk


def test_what_requests_bring_and_what_was_kept_is_counted_by_model() -> None:
    pool, clock = pool_of(1, 1), Clock(10.1)
    counted = Counted(pool, lambda: {"m": (2, 900)}, lambda: {"m": 3}, clock)
    over(counted, 200, came_s=0.1, tokens=11)
    over(counted, 200, came_s=0.3, tokens=11, each_s=0.03)
    over(counted, 504)  # late
    over(counted, 400)  # its own fault
    over(counted, 200, came_s=0.1, tokens=1)  # keeps no target between tokens
    over(counted, 499, came_s=0.1, tokens=11)
    work = counted.take()["m"]
    assert (work.asked, work.asked_tokens, work.waiting, work.waiting_tokens) == (6, 6000, 5, 900)
    assert (work.first, work.first_met, work.last, work.last_met) == (5, 3, 2, 1)
    assert (work.computed, work.answered, work.output_tokens, work.running) == (4, 3, 23, 0)
    assert (work.guessed_tokens, work.uncached_tokens) == (4000, 4000)
    assert work.prefill_ms == pytest.approx(4 * pool.fleet(P, "m").prefill_ms(1000))
    assert counted.take() == {"m": Work(waiting=5, waiting_tokens=900)}


def test_a_promise_is_counted_when_it_is_decided_and_once() -> None:
    """Not when the answer ends: that may be minutes later."""
    clock = Clock()
    counted = Counted(pool_of(1, 1), clock=clock)
    kept, late, never, untold = Walked(), Walked(), Walked(), Walked(ttft_s=None)
    for walk in (kept, late, never, untold):
        counted.asked(walk)

    def look() -> tuple[int, int, int]:
        work = counted.take().get("m", Work())
        return work.first, work.first_met, work.running

    assert look() == (0, 0, 0)
    clock.now, kept.came_s = 10.1, 0.05
    assert look() == (1, 1, 1)
    clock.now = 10.3
    assert look() == (2, 0, 1)  # two whose time is over, and which have no token
    late.came_s = untold.came_s = 0.35
    assert look() == (1, 1, 3)  # without a target, whenever it comes
    for walk in (kept, late, never, untold):
        counted.ended(walk, 200)
    assert look() == (0, 0, 0)


@pytest.mark.parametrize(
    ("status", "after_s", "late"), [(499, 0.3, 1), (499, 0.1, 0), (502, 0.3, 1), (502, 0.1, 0), (503, 0.1, 1)]
)
def test_who_gave_up_before_the_first_token_was_late_if_its_time_was_over(
    status: int, after_s: float, late: int
) -> None:
    clock = Clock()
    counted = Counted(pool_of(1, 1), clock=clock)
    walk = Walked()
    counted.asked(walk)
    clock.now += after_s
    counted.ended(walk, status)
    work = counted.take()["m"]
    assert (work.first, work.first_met, work.computed, work.answered) == (late, 0, 0, 0)


def test_who_wants_no_token_is_not_late_without_one() -> None:
    clock = Clock(99.0)
    counted = Counted(pool_of(1, 1), clock=clock)
    over(counted, 200, prompt_only=True)
    assert counted.take()["m"].first == 0


def test_an_answer_whose_prompt_nobody_has_told_of_has_no_price() -> None:
    """What was cached of it is not known: as if nothing were, it would cost many times what it has cost."""
    counted = Counted(pool_of(1, 1))
    over(counted, 200, came_s=0.1, tokens=11, cached_tokens=None)
    work = counted.take()["m"]
    assert (work.computed, work.guessed_tokens, work.prefill_ms, work.answered) == (0, 0, 0.0, 1)


def test_tokens_of_several_choices_come_together() -> None:
    counted = Counted(pool_of(1, 1))
    over(counted, 200, came_s=0.1, tokens=40, each_s=0.006, choices=4)  # each choice has one every 0.026 s
    work = counted.take()["m"]
    assert (work.last, work.last_met) == (1, 0)


def test_each_prompt_of_a_request_counts() -> None:
    counted = Counted(pool_of(1, 1))
    over(counted, 200, came_s=0.1, tokens=11, more=[Walked(11, 0.03, 0.1)])
    walk = Walked(came_s=0.1, more=[Walked()])
    counted.asked(walk)
    work = counted.take()["m"]
    assert (work.asked, work.asked_tokens, work.answered, work.output_tokens) == (4, 4000, 2, 22)
    assert (work.last, work.last_met, work.running) == (2, 1, 1)
    assert work.context_tokens == 2 * 1205.5


def test_what_was_refused_for_want_of_nodes_is_work_that_was_late_and_nothing_else_is() -> None:
    counted = Counted(pool_of(1, 1))
    counted.refused(Walked(), Overloaded("later", code="ttft"))
    counted.refused(Walked(), Overloaded("never", code="ttft_never"))
    counted.refused(Walked(), RateLimited("your limit"))
    work = counted.take()["m"]
    assert (work.asked, work.first, work.first_met) == (1, 1, 0)


# What that comes to.


def looked(work: Work, prefills: int = 1) -> dict[Role, Seen]:
    pool = pool_of(prefills, 1)
    return Typical().look(work, 5.0, {role: pool.up(role, model="m") for role in (P, D)}, AIMS)


def test_work_is_a_share_of_the_nodes_time_at_measured_speed() -> None:
    pool = pool_of(2, 1)
    for _ in range(20):
        pool.nodes[0].rates.prefilled(1000, 500.0)
        pool.nodes[2].rates.stepped(8, 16.0)
    nodes = {role: pool.up(role, model="m") for role in (P, D)}
    work = Work(asked=10, asked_tokens=20_000, computed=4, guessed_tokens=8_000, prefill_ms=2_000.0)
    work.uncached_tokens = 4_000
    work.answered, work.output_tokens, work.context_tokens = 4, 400, 4 * 1050.0
    work.waiting, work.waiting_tokens, work.first, work.first_met, work.last, work.last_met = 3, 6_000, 4, 3, 4, 2
    seen = Typical().look(work, 5.0, nodes, AIMS)
    # Of what has ended, a token that was guessed has cost a quarter of a millisecond, and one that was computed a half.
    assert seen[P].work == pytest.approx(20_000 * 0.25 / 1e3 / 5)
    assert seen[P].backlog_s == pytest.approx((6_000 * 0.5 - 2 * 100) / 1e3)
    assert (seen[P].nodes, seen[P].ended, seen[P].met) == (2, 4, 3)
    assert (seen[D].nodes, seen[D].ended, seen[D].met) == (1, 4, 2)
    each_ms = seen[D].work * 1e3 * 5 / 10 / 100
    rates = pool.fleet(D, "m")
    most = max(batch for batch in range(1, 16) if rates.step_ms(batch) <= 20)  # 15 of these contexts fit
    assert each_ms == pytest.approx(rates.step_ms(most) / most)
    assert seen[D].backlog_s == pytest.approx(3 * 100 * each_ms / 1e3)


def test_before_anything_has_ended_prompts_are_thought_to_cost_what_they_would() -> None:
    pool, typical = pool_of(1, 1), Typical()
    nodes = {role: pool.up(role, model="m") for role in (P, D)}
    seen = typical.look(Work(asked=2, asked_tokens=2000), 5.0, nodes, AIMS)
    assert seen[P].work == pytest.approx(2 * pool.fleet(P, "m").prefill_ms(1000) / 1e3 / 5)
    assert seen[D].work == 0
    assert typical.look(Work(), 5.0, {P: [], D: []}, AIMS)[P].nodes == 0


def test_what_decode_nodes_have_to_do_is_known_once_enough_answers_have_ended() -> None:
    pool, typical = pool_of(1, 1), Typical()
    nodes = {role: pool.up(role, model="m") for role in (P, D)}

    def known(answered: int, running: int) -> bool:
        work = Work(answered=answered, output_tokens=8 * answered, context_tokens=99.0 * answered, running=running)
        seen = typical.look(work, 5.0, nodes, AIMS)
        assert seen[P].known
        return seen[D].known

    # The short ones end first; from then on it stays known, whatever comes.
    assert [known(*each) for each in ((0, 0), (3, 0), (9, 30), (18, 30), (0, 500))] == [
        False,
        False,
        False,
        True,
        True,
    ]


# In a router.


async def test_requests_of_a_router_are_counted_once_each() -> None:
    async with cluster(prefill(), decode(), **TARGETS) as c:
        counted = c.router.counted
        assert counted is not None
        for _ in range(3):
            await c.text()
        async with c.post({"model": "nobody"}) as answer:
            assert answer.status == 404
        await until(lambda: counted._work[MODEL].computed == 3)
        work = counted.take()[MODEL]
        assert (work.asked, work.first, work.first_met, work.answered, work.running) == (3, 3, 3, 3, 0)


async def test_an_answer_that_its_client_leaves_is_priced_without_what_was_cached() -> None:
    async def handed_over(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await call.hand_over(prompt_token_ids=list(range(300)), cached_tokens=290)

    async def waits(call: Call) -> None:
        await call.tokens(12, "b", 2)
        await d.resume.wait()

    d = decode(waits)
    async with cluster(prefill(handed_over), d, **TARGETS) as c:
        counted = c.router.counted
        assert counted is not None
        async with c.post({"stream": True}) as answer:
            while b'"b"' not in await answer.content.readany():
                pass
            work = counted.take()[MODEL]
            assert (work.first, work.first_met, work.running, work.computed) == (1, 1, 1, 0)
            answer.close()
        await until(lambda: MODEL in counted._work and counted._work[MODEL].computed == 1)
        work = counted.take()[MODEL]
        assert (work.uncached_tokens, work.answered, work.first, work.running) == (10, 0, 0, 0)


async def test_a_leg_that_waits_for_room_on_a_decode_node_waits() -> None:
    load = Load(block_size=16, total_blocks=2, free_blocks=0, running=1)
    async with cluster(prefill(), decode(load=load), **TARGETS) as c:
        counted = c.router.counted
        assert counted is not None
        async with c.post({"stream": True}) as answer:
            await until(lambda: counted._for_room() == {MODEL: 1})
            assert counted.take()[MODEL].waiting == 1
            answer.close()
        await until(lambda: not counted._for_room())


async def test_the_time_between_tokens_is_that_of_one_answer_of_several() -> None:
    name = "kvrelay_router_inter_token_latency_seconds"
    async with cluster(prefill(first_token), decode(rest), **TARGETS) as c:
        counted, walks = c.router.counted, list[Any]()
        assert counted is not None
        counted.ended = lambda walk, status: walks.append(walk)  # type: ignore[method-assign]
        await c.text({"prompt": PROMPTS}, path=COMPLETIONS_PATH)
        await until(lambda: bool(walks))
        between_s = walks[0].timeline.last_token - walks[0].timeline.first_token  # each has two tokens
        assert c.metric(f"{name}_sum") == pytest.approx(between_s)
        (ended,) = c.router.lookout._recent.requests(0.0)
        assert (ended.output_tokens, ended.inter_token_s) == (6, pytest.approx(between_s))
    async with cluster(prefill(), decode(), **TARGETS) as c:
        await c.text({"n": 3})  # one token each, as it were
        await until(lambda: c.metric("kvrelay_router_e2e_request_latency_seconds_count") == 1)
        assert c.metric(f"{name}_count") == 0
