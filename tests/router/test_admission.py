"""Who begins, who waits, who is refused: against a model of a cluster that drains as its rates say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.admission import Admission, Arrival, Refusal
from router.admission.fair_queue import Entrant
from router.admission.saturation import Freed, Nodes, Promised, SureRates, own_ttft_s
from router.nodes.rates import NodeRates

DECODE_S = 0.5


@dataclass
class FixedRates:
    """Milliseconds."""

    per_token: float = 1.0
    step: float = 10.0
    per_running: float = 1.0

    def prefill_ms(self, tokens: float) -> float:
        return tokens * self.per_token

    def prompts_ms(self, tokens: float) -> float:
        return tokens * self.per_token

    def queue_ms(self, tokens: float, requests: int) -> float:
        return tokens * self.per_token

    def step_ms(self, running: float) -> float:
        return self.step + running * self.per_running

    sure_prefill_ms, sure_step_ms = prefill_ms, step_ms

    def output_tokens(self, limit: int = 0) -> float:
        return limit


@dataclass
class ModelNode:
    requests: int = 0
    tokens: int = 0
    kv_room: float = math.inf
    rates: SureRates = field(default_factory=FixedRates)
    url: str = "http://node"
    computes_prompts: bool = False

    @property
    def certain_requests(self) -> int:
        return self.requests

    @property
    def certain_tokens(self) -> int:
        return self.tokens


class ModelCluster:
    """A prefill node and a decode node, as fluid as their rates; a router's admission in front of them."""

    def __init__(self, max_queue: int, kv_tokens: int = 10**9) -> None:
        self.admission = Admission(max_queue)
        self.now = 0.0
        self.kv_tokens = kv_tokens
        self.prefilling: list[tuple[Entrant, float]] = []  # (whose, tokens left)
        self.lacking: list[Entrant] = []  # computed, and there is no room for their KV yet
        self.decoding: list[tuple[Entrant, float]] = []  # (whose, ends at)
        self.refused: list[tuple[Entrant, Refusal]] = []
        self.begun: list[Entrant] = []

    @property
    def room(self) -> int:
        return self.kv_tokens - sum(each.tokens for each, _ in self.decoding)

    @property
    def nodes(self) -> Nodes:
        left = sum(left for _, left in self.prefilling)
        return Nodes(
            [ModelNode(len(self.prefilling), math.ceil(left))],
            [ModelNode(len(self.decoding), kv_room=float(self.room))],
        )

    def ask(self, entrant: Entrant) -> Arrival:
        arrival = self.admission.arrive(entrant, self.nodes, self.now)
        if arrival.begins:
            self._begin(entrant)
        return arrival

    def run(self, seconds: float, tick: float = 0.01) -> None:
        for _ in range(max(1, math.ceil(seconds / tick - 1e-9))):
            self.now += tick
            self._compute(tick * 1e3)
            for each in [each for each, ends in self.decoding if ends <= self.now]:
                self.decoding = [item for item in self.decoding if item[0] is not each]
                self.admission.ended(each, each.prompt_tokens, each.output_tokens, self.now)
            while self.lacking and (self.lacking[0].tokens <= self.room or not self.decoding):
                self.admission.placed(self.lacking[0], prefilling=True, decoding=True)
                self.decoding.append((self.lacking.pop(0), self.now + DECODE_S))
            self.refused += self.admission.late(self.nodes, self.now)
            while (entrant := self.admission.next(self.nodes)) is not None:
                self._begin(entrant)

    def _begin(self, entrant: Entrant) -> None:
        self.begun.append(entrant)
        self.prefilling.append((entrant, float(entrant.prompt_tokens)))
        self.admission.placed(entrant, prefilling=True, decoding=False)

    def _compute(self, tokens: float) -> None:
        while self.prefilling and tokens > 0:
            entrant, left = self.prefilling[0]
            if left > tokens:
                self.prefilling[0] = (entrant, left - tokens)
                return
            tokens -= left
            self.lacking.append(self.prefilling.pop(0)[0])


def entrant(tokens: int = 100, key: str = "a", arrived: float = 0.0, **fields: float) -> Entrant:
    return Entrant(key, arrived, prompt_tokens=tokens, output_tokens=10, **fields)  # type: ignore[arg-type]


def refusal(arrival: Arrival) -> Refusal:
    assert arrival.refusal is not None
    return arrival.refusal


def told(refused: Refusal) -> int:
    """What a client reads in Retry-After."""
    assert refused.retry_after_s is not None
    return max(1, math.ceil(refused.retry_after_s))


sizes = st.lists(st.integers(20, 2000), min_size=8, max_size=30)


def test_an_idle_cluster_takes_everything_at_once() -> None:
    cluster = ModelCluster(0)
    assert [cluster.ask(entrant(10)).begins for _ in range(50)] == [True] * 50


@settings(max_examples=30)
@given(sizes, st.integers(0, 4), st.integers(20, 2000))
def test_whoever_is_refused_for_a_full_queue_gets_a_place_after_the_time_he_is_told(
    asked: list[int], max_queue: int, late: int
) -> None:
    cluster = ModelCluster(max_queue)
    for tokens in asked:
        cluster.ask(entrant(tokens))
        assert len(cluster.admission.queue) <= max_queue
    arrival = cluster.ask(entrant(late))
    if arrival.refusal is None:
        return
    assert refusal(arrival).reason == "queue_full"
    cluster.run(told(refusal(arrival)))
    assert cluster.ask(entrant(late, arrived=cluster.now)).refusal is None


@settings(max_examples=30)
@given(sizes, st.integers(20, 2000), st.floats(0.01, 10))
def test_whoever_is_refused_for_his_target_is_taken_after_the_time_he_is_told_and_served_in_time(
    asked: list[int], tokens: int, target_s: float
) -> None:
    cluster = ModelCluster(100)
    for each in asked:
        cluster.ask(entrant(each))
    arrival = cluster.ask(entrant(tokens, ttft_s=target_s))
    if arrival.refusal is None:
        return
    if refusal(arrival).reason == "ttft_never":
        assert refusal(arrival).retry_after_s is None
        assert tokens / 1e3 > target_s
        return
    assert refusal(arrival).reason == "ttft"
    cluster.run(told(refusal(arrival)))
    again = entrant(tokens, arrived=cluster.now, ttft_s=target_s)
    assert cluster.ask(again).refusal is None
    began_by = cluster.now + target_s
    while again not in [each for each, _ in cluster.decoding]:
        cluster.run(0.01)
        assert again not in [each for each, _ in cluster.refused]
        assert cluster.now <= began_by + 0.05


@settings(max_examples=20)
@given(sizes, st.integers(200, 3000))
def test_nobody_waits_for_ever_and_few_are_computed_before_there_is_room_for_them(
    asked: list[int], kv_tokens: int
) -> None:
    cluster = ModelCluster(100, kv_tokens)
    for tokens in asked:
        cluster.ask(entrant(tokens))
    for _ in range(math.ceil(sum(asked) / 1e3 + (DECODE_S + 0.1) * len(asked))):
        ahead = [*cluster.lacking, *(each for each, _ in cluster.prefilling)]
        assert len(ahead) <= 2 or sum(each.tokens for each in ahead) <= kv_tokens
        cluster.run(1, tick=0.05)
    assert len(cluster.begun) == len(asked)
    assert not [*cluster.refused, *cluster.lacking, *cluster.decoding]


def test_a_light_key_is_not_refused_for_the_queue_of_a_heavy_one() -> None:
    cluster = ModelCluster(100)
    for _ in range(60):
        cluster.ask(entrant(500, "heavy"))
    assert refusal(cluster.ask(entrant(100, "heavy", ttft_s=8.0))).reason == "ttft"
    light = entrant(100, "light", ttft_s=8.0)
    assert cluster.ask(light).refusal is None
    cluster.run(8)
    assert light in cluster.begun


@pytest.mark.parametrize("kv_tokens", [10**9, 1500])
def test_whoever_is_refused_for_a_full_queue_is_told_how_long_the_queue_takes(kv_tokens: int) -> None:
    cluster = ModelCluster(50, kv_tokens)
    for _ in range(30):  # as fast as they are computed, so that it is known how fast decode ends them
        cluster.ask(entrant(1000, arrived=cluster.now))
        cluster.run(1)
    while not (arrival := cluster.ask(entrant(1000, arrived=cluster.now))).refusal:
        pass
    assert refusal(arrival).reason == "queue_full"
    last, since = list(cluster.admission.queue)[-1], cluster.now
    while last not in [each for each, _ in cluster.decoding]:
        cluster.run(0.1)
    assert cluster.now - since > 40  # and not the second after which there is one place
    assert told(refusal(arrival)) == pytest.approx(cluster.now - since, rel=0.25)


def test_a_full_queue_makes_room_for_the_more_important() -> None:
    cluster = ModelCluster(3)
    while not (arrival := cluster.ask(entrant(1000))).refusal:
        pass
    assert refusal(arrival).reason == "queue_full"
    arrival = cluster.ask(urgent := entrant(1000, priority=-1))
    assert arrival.displaced is not None
    assert arrival.displacement is not None
    assert arrival.displacement.reason == "displaced"
    assert not cluster.admission.waits(arrival.displaced)
    assert cluster.admission.queue.first() is urgent


def test_the_places_of_one_key_are_bounded() -> None:
    cluster = ModelCluster(100)
    for _ in range(20):
        cluster.ask(entrant(1000))
    waiting = cluster.admission.queue.waiting("a")
    arrival = cluster.admission.arrive(entrant(), cluster.nodes, 0.0, max_of_key=waiting)
    assert refusal(arrival).reason == "key_queue_full"
    assert cluster.admission.arrive(entrant(key="b"), cluster.nodes, 0.0, max_of_key=waiting).refusal is None


def test_requests_leave_the_queue_at_their_deadline_and_when_their_target_has_passed() -> None:
    cluster = ModelCluster(100)
    for _ in range(20):
        cluster.ask(entrant(1000))
    patient = entrant(deadline=1.0, priority=1)
    cluster.ask(patient)
    hurried = entrant(100, "b", ttft_s=9.0)
    assert cluster.ask(hurried).refusal is None
    cluster.ask(gone := entrant(priority=1))
    cluster.admission.leave(gone)
    for _ in range(20):  # others are more important
        cluster.ask(entrant(1000, "c", priority=-1))
    cluster.run(9)
    assert {each: why.reason for each, why in cluster.refused} == {patient: "deadline", hurried: "ttft_passed"}
    assert gone not in cluster.begun


def test_one_more_request_waits_until_a_token_takes_no_longer_than_its_target() -> None:
    cluster = ModelCluster(100)
    for _ in range(5):
        assert cluster.ask(entrant(1)).begins
    cluster.run(0.01)
    assert cluster.nodes.decode[0].requests == 5
    assert not cluster.ask(hurried := entrant(1, tpot_s=0.0163)).begins  # one more makes it full: 16 ms
    assert cluster.admission.waits(hurried)
    cluster.run(DECODE_S)
    assert hurried in cluster.begun
    assert refusal(cluster.ask(entrant(1, tpot_s=0.0105))).reason == "tpot_never"


def test_nobody_is_refused_for_a_batch_that_was_never_seen() -> None:
    """Seen on two H200s: 62 requests in 0.8 s were refused by idle prefill nodes, as the first answers ended."""
    rates = NodeRates()
    for _ in range(5):
        rates.stepped(80, 11.4)
        rates.prefilled(512, 12.0)
    assert rates.step_ms(216) > 15
    admission = Admission(100)
    nodes = Nodes([ModelNode(rates=rates)], [ModelNode(requests=215, rates=rates)])
    for at in range(5):
        ended = entrant()
        assert admission.arrive(ended, nodes, float(at)).begins
        admission.ended(ended, 512, 256, float(at))
    assert admission.arrive(entrant(512, ttft_s=0.2, tpot_s=0.015), nodes, 6.0).begins
    for _ in range(20):
        rates.stepped(200, 16.0)
    assert refusal(admission.arrive(entrant(512, ttft_s=0.2, tpot_s=0.015), nodes, 7.0)).reason == "ttft"


def test_without_anything_under_way_the_first_begins_whatever_others_have_there() -> None:
    admission = Admission(10)
    full = Nodes([ModelNode(100, 10**6)], [ModelNode(100, kv_room=0.0)])
    first, second = entrant(), entrant()
    assert admission.arrive(first, full, 0.0).begins
    assert not admission.arrive(second, full, 0.0).begins
    assert admission.next(full) is None
    admission.ended(first, 100, 10, 1.0)
    assert admission.next(full) is second


def test_what_has_begun_counts_until_a_node_counts_it() -> None:
    admission = Admission(10)
    nodes = Nodes([ModelNode()], [ModelNode(requests=1, kv_room=1000.0)])
    begun = [entrant(300) for _ in range(3)]
    assert [admission.arrive(each, nodes, 0.0).begins for each in begun] == [True] * 3
    assert not admission.arrive(entrant(300), nodes, 0.0).begins
    for each in begun:
        admission.placed(each, prefilling=True, decoding=True)
        admission.placed(each, prefilling=True, decoding=True)
    last = admission.next(nodes)  # these nodes say that they have room all the same
    assert last is not None
    for each in (*begun, last):
        admission.ended(each, 300, 10, 1.0)
    assert admission._promised == Promised()


def test_a_first_token_that_a_decode_node_has_in_time_is_not_late() -> None:
    behind = ModelNode(50, 100_000)
    free, sworn_off = ModelNode(1, computes_prompts=True), ModelNode(1)
    late = entrant(100, ttft_s=own_ttft_s(entrant(100), Nodes([behind], [free])) * 3, tpot_s=1.0)
    for decode, conditional, taken in ((free, True, True), (free, False, False), (sworn_off, True, False)):
        arrival = Admission(10).arrive(late, Nodes([behind], [decode], conditional), 0.0)
        assert (arrival.refusal is None) == taken
    close = entrant(100, ttft_s=0.12, tpot_s=1.0)  # there in 101 ms, and not counted on with less than a fifth to spare
    assert refusal(Admission(10).arrive(close, Nodes([behind], [free], True), 0.0)).reason == "ttft"
    without = entrant(100, ttft_s=late.ttft_s)  # of its streams nobody knows how much they can spare
    assert refusal(Admission(10).arrive(without, Nodes([behind], [free], True), 0.0)).reason == "ttft"


def test_what_ends_is_counted_with_a_fading_past() -> None:
    freed = Freed()
    assert freed.tokens_s == 0
    for at in range(300):
        freed.ended(100, float(at))
    assert freed.tokens_s == pytest.approx(100, rel=0.05)
    for at in range(300, 600):
        freed.ended(20, float(at))
    assert freed.tokens_s == pytest.approx(20, rel=0.05)
    assert freed.requests_s == pytest.approx(1, rel=0.05)
