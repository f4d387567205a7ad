"""What the last frame of a leg changes of its node's rates."""

import random

import pytest

from router.nodes.measured import learn
from router.nodes.node import HealthReport, Lease, Node
from router.nodes.pool import Pool
from router.policies.policy import Ask
from wire.config import Role
from wire.frames import Frame, FrameKind
from wire.outputs import Load
from wire.transfer import KvTransferParams


@pytest.fixture
def prefill() -> Node:
    return Node("http://p", role=Role.PREFILL)


@pytest.fixture
def decode() -> Node:
    return Node("http://d", role=Role.DECODE)


def test_a_prefill_leg_tells_of_prefill_without_what_was_cached(prefill: Node) -> None:
    params = KvTransferParams(prompt_token_ids=[7] * 1_000, cached_tokens=900)
    frame = Frame(FrameKind.HANDOVER, params=params, timing={"queue": 0.0, "prefill": 800.0})
    for _ in range(10):
        learn(Lease(prefill, 1_000), frame, 1, None)
    assert 600 < prefill.rates.prefill_ms(100) < 810
    assert prefill.rates.prefill_ms(1_000) > 2_000


def test_a_decode_leg_tells_of_steps_transfer_and_length(prefill: Node, decode: Node) -> None:
    timing = {"transfer": 90.0, "exposed": 70.0, "decode_queue": 1.0, "first_step": 5.0, "decode": 5_000.0}
    frame = Frame(FrameKind.END, timing=timing, usage=(1_000, 101, 0))
    decode.requests = 8
    for _ in range(10):
        learn(Lease(decode, 0, company=8), frame, 101, prefill)
    assert 40 < decode.rates.step_ms(8) < 51
    assert 55 < decode.rates.transfer_ms("http://p", 1_000) < 80
    assert 55 < prefill.rates.transfer_ms("", 1_000) < 80
    assert 101 < decode.rates.output_tokens() < 170


@pytest.mark.parametrize(("company", "now", "ran"), [(0, 1, 1), (0, 3, 2), (4, 1, 3), (7, 8, 8)])
def test_a_leg_counts_itself_among_those_that_run(decode: Node, company: int, now: int, ran: float) -> None:
    """Alone it is one and not half a one, of which nothing would be learnt."""
    frame = Frame(FrameKind.END, timing={"exposed": 1.0, "decode": 5_000.0}, usage=(1_000, 101, 0))
    decode.requests = now
    lease = Lease(decode, 0, company=company)
    assert lease.running == ran
    for _ in range(30):
        learn(lease, frame, 101, None)
    assert 45 < decode.rates.step_ms(ran) < 51


def test_speeds_are_known_once_one_request_was_served_alone(prefill: Node, decode: Node) -> None:
    """So that short prompts can be computed on the decode node, however seldom requests come."""
    decode.requests = 1
    timing = {"exposed": 7.0, "decode": 500.0}
    learn(Lease(decode, 0), Frame(FrameKind.END, timing=timing, usage=(100, 11, 0)), 11, prefill)
    decode.rates.prefills_like(prefill.rates)
    params = KvTransferParams(prompt_token_ids=[7] * 100)
    learn(Lease(prefill, 100), Frame(FrameKind.HANDOVER, params=params, timing={"queue": 0.0, "prefill": 9.0}), 1, None)
    assert decode.rates.measured


def known(prefill: Node, decode: Node) -> None:
    """Of prompts alone and of decodes alone, as on an H200."""
    decode.rates.prefills_like(prefill.rates)
    for _ in range(30):
        for tokens, ms in ((64, 5.0), (512, 12.0), (2_048, 47.0)):
            prefill.rates.prefilled(tokens, ms)
        for running, ms in ((1, 4.0), (181, 11.0)):
            decode.rates.stepped(running, ms)


@pytest.mark.parametrize(("tokens", "alone_ms", "beside_ms"), [(64, 5.0, 12.0), (512, 12.0, 23.0), (2_048, 47.0, 58.0)])
def test_what_decodes_beside_a_prompt_is_not_its_time(
    prefill: Node, decode: Node, tokens: int, alone_ms: float, beside_ms: float
) -> None:
    """Else prompts of one length beside many decodes would make those of another beside few seem too long to be tried,
    or too short to hurt. Who decodes beside it is who was there when it came: it is told of at the answer's end."""
    known(prefill, decode)
    timing = {"queue": 9.0, "prefill": beside_ms}
    for _ in range(30):
        frame = Frame(FrameKind.END, timing=timing, usage=(tokens, 1, 0))
        learn(Lease(decode, tokens, company=181), frame, 1, None)
    assert decode.rates.prefill_ms(tokens) == pytest.approx(alone_ms, rel=0.15)
    assert decode.rates.prefill_ms(2_048) == pytest.approx(47, rel=0.15)


def test_who_came_later_did_not_decode_beside_a_prompt(prefill: Node, decode: Node) -> None:
    known(prefill, decode)
    decode.requests = 182
    for _ in range(30):
        frame = Frame(FrameKind.END, timing={"queue": 0.0, "prefill": 12.0}, usage=(512, 1, 0))
        learn(Lease(decode, 512), frame, 1, None)
    assert decode.rates.prefill_ms(512) == pytest.approx(12, rel=0.15)


def test_of_a_guess_nothing_is_subtracted(decode: Node) -> None:
    timing = {"queue": 0.0, "prefill": 20.0}
    for _ in range(30):
        learn(Lease(decode, 512, company=181), Frame(FrameKind.END, timing=timing, usage=(512, 1, 0)), 1, None)
    assert decode.rates.prefill_ms(512) > 17


def test_a_prompt_takes_something_even_if_steps_are_thought_to_take_all_of_it(prefill: Node, decode: Node) -> None:
    known(prefill, decode)
    timing = {"queue": 0.0, "prefill": 6.0}
    for _ in range(30):
        learn(Lease(decode, 64, company=181), Frame(FrameKind.END, timing=timing, usage=(64, 1, 0)), 1, None)
    assert 0.5 < decode.rates.prefill_ms(64) < 1.5


def test_a_wait_for_steps_that_decode_is_no_queue_of_prompts(prefill: Node, decode: Node) -> None:
    for node in (prefill, decode):
        before = node.rates.prompts_ms(4_000)
        timing = {"queue": 200.0, "prefill": 40.0}
        for _ in range(30):
            lease = Lease(node, 1_000, expected_queue_ms=20.0)
            learn(lease, Frame(FrameKind.END, timing=timing, usage=(1_000, 1, 0)), 1, None)
        assert (node.rates.prompts_ms(4_000) > 2 * before) == (node is prefill)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_who_decodes_is_ahead_in_no_queue(role: Role) -> None:
    pool = Pool(["http://p"], ["http://d"], random.Random(1))
    node = next(node for node in pool.nodes if node.role is role)
    pool.report(node, HealthReport(role, "m", load=Load(running=50)), 0.0, 0.0)
    assert node.requests == 50
    waits_ms = pool.hold(Ask(role, "m", 1_000), [node]).expected_queue_ms
    assert (waits_ms > 100) == (role is Role.PREFILL)


def test_a_leg_of_several_choices_and_a_short_one_say_nothing_of_steps(decode: Node) -> None:
    frame = Frame(FrameKind.END, timing={"queue": 0.0, "prefill": 1.0, "decode": 5_000.0}, usage=(1_000, 2, 0))
    before = decode.rates.step_ms(1)
    for generated in (0, 2):
        learn(Lease(decode, 0), frame, generated, None)
    assert decode.rates.step_ms(1) == before


def test_a_frame_without_timing_says_nothing(decode: Node) -> None:
    learn(Lease(decode, 0), Frame(FrameKind.END, usage=(10, 10, 0)), 10, None)
    assert not decode.rates._prefill.measured
