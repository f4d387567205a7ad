"""The scheduler alone, with a model that is a pure function: budgets, order, preemption, fetches,
and random use.
"""

import random

import pytest
from invariants import check_scheduler
from scheduling import (
    BLOCK,
    EOS,
    all_free,
    drain,
    expected,
    fetching,
    launch,
    make,
    next_token,
    request,
    start_fetch,
    step,
)

from kvrelay.paged_engine.request import Chunk, Fetch, Request, State
from kvrelay.wire.kv_events import Pin
from kvrelay.wire.outputs import Finish
from kvrelay.wire.transfer import Ticket


def test_a_long_prompt_is_cut_to_the_budget_and_decodes_go_first():
    scheduler = make()
    scheduler.add(request("short", [5] * 10, max_tokens=20))
    assert step(scheduler) == [("short", 0, 10)]
    scheduler.add(request("long", list(range(150))))
    assert step(scheduler) == [("short", 10, 1), ("long", 0, 64)]
    assert step(scheduler) == [("short", 11, 1), ("long", 64, 64)]
    assert step(scheduler) == [("short", 12, 1), ("long", 128, 22)]
    assert step(scheduler) == [("short", 13, 1), ("long", 150, 1)]
    scheduler.abort("long")
    scheduler.add(request("whole", list(range(200, 264))))
    assert step(scheduler) == [("short", 14, 1), ("whole", 0, 64)]


def test_after_a_reset_nothing_from_before_is_found():
    """Also not what a request that ran then computes later: it is computed from KV of before."""
    scheduler = make(max_num_batched_tokens=32)
    prompt = list(range(100, 200))
    scheduler.add(request("ended", prompt[:32], max_tokens=1, hold=True))
    drain(scheduler)
    held = scheduler.kept.held("ended")
    before = request("before", prompt, max_tokens=40)
    scheduler.add(before)
    step(scheduler)
    fork = request("fork", prompt, choice=1, fork_of="before")
    scheduler.add(fork)
    scheduler.reset_prefix_cache()
    check_scheduler(scheduler)
    assert scheduler.kept.held("ended") == held
    drain(scheduler)
    assert before.token_ids == expected(prompt, 40)
    assert fork.token_ids == expected(prompt, 5)
    assert scheduler.pool.cached == 0

    after = request("after", prompt)
    scheduler.add(after)
    drain(scheduler)
    assert after.cached_tokens == 0
    again = request("again", prompt)
    scheduler.add(again)
    drain(scheduler)
    assert again.cached_tokens == 96
    assert again.token_ids == after.token_ids
    scheduler.kept.release("ended")
    assert all_free(scheduler)


@pytest.mark.parametrize(
    ("submit", "held"), [({}, 0), ({"hold": True}, 0), ({"hold": True, "hold_stopped": True}, 3)]
)
def test_a_stop_token_ends_a_request_and_holds_its_kv_only_for_other_choices(submit, held):
    scheduler = make()
    req = request("r", list(range(40)), max_tokens=1, **submit)
    scheduler.add(req)
    launch(scheduler)
    assert scheduler.append(req, EOS, 1.0) is Finish.STOP
    assert req.state is State.DONE
    assert scheduler.pool.total - scheduler.pool.free == scheduler.kept.num_held == held


def test_a_second_request_of_the_same_id_is_refused():
    scheduler = make()
    scheduler.add(request("r", [3]))
    with pytest.raises(ValueError, match="'r' is in use"):
        scheduler.add(request("r", [3]))


@pytest.mark.parametrize("early", [False, True])
def test_a_fetched_request_decodes_from_its_first_token(early):
    """An early one's first token comes with the KV."""
    scheduler = make()
    prompt = list(range(40))
    req = fetching("r", prompt, early=early)
    scheduler.add(req)
    fetch = start_fetch(scheduler)
    assert (fetch.remote_blocks, len(fetch.local_blocks)) == ([500, 501, 502], 3)
    assert step(scheduler) == []
    scheduler.finish_fetch("r", [next_token(prompt)] if early else ())
    assert req.new_tokens == ([next_token(prompt)] if early else [])
    assert step(scheduler) == [("r", 40, 1)]
    drain(scheduler)
    assert req.token_ids == expected(prompt, 5)
    assert all_free(scheduler)


def test_a_request_that_holds_is_offered_once_with_all_blocks_of_its_prompt():
    scheduler = make(max_num_batched_tokens=BLOCK)
    req = request("r", list(range(40)), max_tokens=1, hold=True)
    scheduler.add(req)
    plan = scheduler.schedule(0.0)
    assert plan.offers == [req]
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(0, BLOCK)]
    blocks = list(req.blocks)
    assert len(blocks) == 3
    scheduler.mark_launched(plan.chunks[0])
    while req.finish is None:
        plan = launch(scheduler)
        assert plan.offers == []
        for chunk in plan.chunks:
            if chunk.samples:
                scheduler.append(req, next_token(req.token_ids), 0.0)
    assert scheduler.kept.held("r") == blocks


def test_a_ticket_without_a_first_token_computes_the_last_prompt_token_again():
    scheduler = make()
    prompt = list(range(32))
    req = fetching("r", prompt)
    req.token_ids.pop()
    scheduler.add(req)
    start_fetch(scheduler)
    scheduler.finish_fetch("r")
    assert step(scheduler) == [("r", 31, 1)]
    drain(scheduler)
    assert req.token_ids == expected(prompt, 5)


def test_forks_wait_for_the_prompt_and_share_its_blocks():
    scheduler = make(max_num_batched_tokens=32)
    prompt = list(range(40))
    parent = request("r", prompt)
    forks = [request(f"r.{i}", prompt, choice=i, fork_of="r") for i in (1, 2)]
    for each in (parent, *forks, request("other", [7] * 30)):
        scheduler.add(each)
    assert step(scheduler) == [("r", 0, 32)]
    # A step computes little more than half of its budget of prompts, if there are several of them.
    assert step(scheduler) == [("r", 32, 8), ("r.1", 32, 8)]
    assert step(scheduler) == [("r", 40, 1), ("r.1", 40, 1), ("r.2", 32, 8), ("other", 0, 24)]
    assert [each.blocks[:2] for each in forks] == [parent.blocks[:2]] * 2
    assert len({each.blocks[2] for each in (parent, *forks)}) == 3
    assert (scheduler.pool.total - scheduler.pool.free) == 2 + 3 + 2
    scheduler.abort("r")
    check_scheduler(scheduler)
    drain(scheduler)
    for each in forks:
        assert each.token_ids == expected(prompt, 5)
    assert all_free(scheduler)


def test_others_pass_a_fork_that_waits():
    scheduler = make()
    prompt = list(range(40))
    scheduler.add(fetching("r", prompt))
    scheduler.add(request("r.1", prompt, choice=1, fork_of="r"))
    scheduler.add(request("other", [7] * 3))
    plan = scheduler.schedule(0.0)
    assert [fetch.request.request_id for fetch in plan.fetches] == ["r"]
    assert [chunk.request.request_id for chunk in plan.chunks] == ["other"]
    for chunk in plan.chunks:
        scheduler.mark_launched(chunk)
        scheduler.append(chunk.request, 5, 0.0)
    assert scheduler.load(0.0).waiting_tokens == 40 - 32
    scheduler.finish_fetch("r")
    assert step(scheduler) == [("other", 3, 1), ("r", 40, 1), ("r.1", 32, 8)]


@pytest.mark.parametrize("how", ["aborted", "unknown", "ended"])
def test_a_fork_without_its_parent_starts_by_itself(how):
    scheduler = make(max_num_seqs=1)
    prompt = list(range(40))
    fork = request("r.1", prompt, choice=1, fork_of="r")
    if how != "unknown":
        scheduler.add(request("r", prompt))
    scheduler.add(fork)
    if how == "aborted":
        scheduler.abort("r")
    drain(scheduler)
    assert fork.token_ids == expected(prompt, 5)
    assert fork.cached_tokens == (32 if how == "ended" else 0)


def test_a_lower_priority_number_is_admitted_first_and_preempted_last():
    scheduler = make(blocks=9, max_num_seqs=2)
    first = request("first", [3] * 60, max_tokens=60, priority=1)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(request("late", [5] * 10, max_tokens=3, priority=1))
    urgent = request("urgent", [4] * 40, max_tokens=60)
    scheduler.add(urgent)
    assert step(scheduler) == [("first", 60, 1), ("urgent", 0, 40)]
    while not scheduler.preemptions:
        step(scheduler)
    assert (first.state, urgent.state) == (State.WAITING, State.RUNNING)
    drain(scheduler)
    assert first.token_ids == expected([3] * 60, 60)
    assert urgent.token_ids == expected([4] * 40, 60)


class Memory:
    """KV by block and offset: the tokens that it was computed from, or something else."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], object] = {}

    def compute(self, chunk: Chunk) -> None:
        """Read KV before the chunk, write the chunk's; the device knows pending tokens."""
        request, tokens = chunk.request, list(chunk.request.token_ids)
        while len(tokens) < chunk.start + chunk.count:
            tokens.append(next_token(tokens))
        for position in range(chunk.start + chunk.count):
            place = request.blocks[position // BLOCK], position % BLOCK
            if position >= chunk.start:
                self.kv[place] = tuple(tokens[: position + 1])
            assert self.kv.get(place) == tuple(tokens[: position + 1]), (request, position)

    def write(self, blocks: list[int], first: int, tokens: list[int] | None) -> None:
        """Write what a READ does to the blocks of a request from number `first` on; None: wrong."""
        for index, block in enumerate(blocks, first):
            for offset in range(BLOCK):
                end = index * BLOCK + offset + 1
                self.kv[block, offset] = None if tokens is None else tuple(tokens[:end])


class Course:
    """Random arrivals, fetches, pulls, failures, late settling, aborts, holds and preemption."""

    def __init__(self, seed: int, ahead: bool) -> None:
        self.rng, self.ahead, self.memory = random.Random(seed), ahead, Memory()
        self.scheduler = make(
            blocks=self.rng.choice([14, 24, 60]),
            max_num_batched_tokens=self.rng.choice([8, 33, 64]),
            max_num_seqs=self.rng.choice([2, 5]),
            prefix_cache=self.rng.random() < 0.8,
        )
        self.scheduler.pool.allow_pins(self.rng.choice([0.0, 0.3, 1.0]), 9)
        self.prefix = self.text(64)
        self.asked: dict[str, tuple[Request, list[int], int]] = {}
        self.reading: dict[str, Fetch] = {}
        self.landing: dict[str, tuple[list[int], int]] = {}  # a lost READ may still write there
        self.held: set[str] = set()
        self.asking: set[str] = set()
        self.pending: list[Chunk] = []

    def text(self, length: int) -> list[int]:
        return [self.rng.randrange(2, 90) for _ in range(length)]

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def arrive(self, name: str) -> None:
        prompt = self.prefix[: self.rng.randrange(64)] + self.text(self.rng.randint(1, 40))
        count, hold = self.rng.randint(2, 12), self.chance(0.2)
        if hold:
            made = [request(name, prompt, count := 1, hold=True)]
        elif self.chance(0.4):
            made = [fetching(name, prompt, count, early=self.chance(0.5))]
        else:
            made = [request(name, prompt, count)]
        if not hold and self.chance(0.4):
            forks = range(1, self.rng.randint(2, 4))
            made += [request(f"{name}.{i}", prompt, count, i, fork_of=name) for i in forks]
        for each in made:
            each.pin = Pin(self.rng.choice("ab"), self.rng.random(), self.rng.randrange(12))
        for each in made:
            self.scheduler.add(each)
            self.asked[each.request_id] = each, prompt, count
        if made[0].fetch is None and self.chance(0.4):
            first = self.scheduler.cached_tokens(made[0]) // BLOCK
            made[0].asking, made[0].pull_from = True, first
            self.asking.add(name)

    def answer(self, name: str) -> None:
        self.asking.discard(name)
        req, prompt, _ = self.asked[name]
        if req.finish is None:
            first, most = req.pull_from, (len(prompt) - 1) // BLOCK
            assert first is not None
            leased = self.rng.randint(0, max(0, most - first))
            blocks = [list(range(500, 500 + leased))]
            found = Ticket(num_tokens=(first + leased) * BLOCK, remote_block_ids=blocks)
            self.scheduler.end_ask(req, found if leased else None)
            check_scheduler(self.scheduler)

    def step(self) -> None:
        self.scheduler.pool.expire(self.scheduler.pool.now + self.rng.random())
        plan = self.scheduler.schedule(0.0)
        self.reading |= {fetch.request.request_id: fetch for fetch in plan.fetches}
        for chunk in plan.chunks:
            self.memory.compute(chunk)
            self.scheduler.mark_launched(chunk)
        sampled = [chunk for chunk in plan.chunks if chunk.samples]
        self.pending, sampled = (sampled, self.pending) if self.ahead else ([], sampled)
        for chunk in sampled:
            self.scheduler.append(chunk.request, next_token(chunk.request.token_ids), 0.0)
        self.held |= {name for name in self.asked if self.scheduler.kept.held(name) is not None}
        check_scheduler(self.scheduler)

    def end_fetch(self, name: str, how: str) -> None:
        fetch, (req, prompt, _) = self.reading.pop(name), self.asked[name]
        first = len(req.blocks) - len(fetch.local_blocks)
        if pulls := req.pull_from is not None:
            assert fetch.local_blocks == req.blocks[req.num_published :][: len(fetch.local_blocks)]
            first, how = req.num_published, "fails" if how == "ends" else how
        verified = self.rng.randint(0, len(fetch.local_blocks))
        if how == "arrives":
            self.memory.write(fetch.local_blocks, first, prompt)
            self.scheduler.finish_fetch(name, [] if pulls else [next_token(prompt)])
            return
        self.memory.write(fetch.local_blocks[:verified], first, prompt)
        self.landing[name] = fetch.local_blocks[verified:], first + verified
        if how == "fails":
            self.scheduler.fail_fetch(name, "lost", verified)
        elif how == "ends":
            self.scheduler.end_failed_fetch(name, "lost")
        else:
            self.scheduler.abort(name)

    def disturb(self) -> None:
        if self.asking and self.chance(0.5):
            self.answer(self.rng.choice(sorted(self.asking)))
        if self.reading and self.chance(0.6):
            how = self.rng.choice(["arrives", "arrives", "fails", "fails", "ends", "aborted"])
            self.end_fetch(self.rng.choice(sorted(self.reading)), how)
        for name, (blocks, first) in list(self.landing.items()):
            self.memory.write(blocks, first, None)
            if self.chance(0.3):
                self.settle(name)
        others = [each for each in self.asked if each not in self.reading]
        if others and self.chance(0.05):
            self.scheduler.abort(self.rng.choice(others))
        if self.held and self.chance(0.3):
            self.scheduler.kept.release(self.held.pop())

    def settle(self, name: str) -> None:
        del self.landing[name]
        self.scheduler.kept.settle(name)

    def finish(self) -> None:
        for _ in range(2000):
            for name in list(self.asking):
                self.answer(name)
            for name in list(self.reading):
                self.end_fetch(name, "arrives")
            for name in list(self.landing):
                self.settle(name)
            while self.held:
                self.scheduler.kept.release(self.held.pop())
            if not (self.scheduler.live or self.pending):
                return
            self.step()


@pytest.mark.parametrize("ahead", [False, True], ids=["", "one-step-ahead"])
@pytest.mark.parametrize("seed", range(25))
def test_random_use_gives_every_request_its_tokens_and_every_block_back(seed, ahead):
    """No step attends to KV that is not its own. `ahead`: tokens are known one step late."""
    course = Course(seed, ahead)
    for turn in range(300):
        if turn < 200 and course.chance(0.3):
            course.arrive(f"r{turn}")
        course.step()
        course.disturb()
    course.finish()
    assert course.scheduler.pool.free == course.scheduler.pool.total
    whole = [
        (req.token_ids, expected(prompt, count))
        for req, prompt, count in course.asked.values()
        if req.finish in (Finish.STOP, Finish.LENGTH)
    ]
    assert len(whole) > 20
    assert all(ours == theirs for ours, theirs in whole)


def test_a_request_whose_last_token_is_on_its_way_keeps_its_blocks():
    """One step ahead it still looks like a running request; but a hand-over of it must find its KV."""
    scheduler = make(blocks=5, max_num_batched_tokens=256)
    growing = request("growing", [3] * (2 * BLOCK - 1), max_tokens=20)
    held = request("held", [6] * (2 * BLOCK), max_tokens=1, hold=True)
    held.arrival_s = 1.0

    def sampling() -> list[Request]:
        return [chunk.request for chunk in launch(scheduler).chunks if chunk.samples]

    scheduler.add(growing)
    first = sampling()
    scheduler.add(held)
    second = sampling()
    assert {r.request_id for r in second} == {"growing", "held"}
    assert scheduler.pool.free == 0
    for each in first:
        scheduler.append(each, 5, 1.0)
    launch(scheduler)  # `growing` needs a block, and `held` is the youngest
    assert scheduler.preemptions == 1
    for each in second:
        scheduler.append(each, 5, 1.0)
    assert held.finish is Finish.LENGTH
    assert len(scheduler.kept.held("held") or []) == 2
