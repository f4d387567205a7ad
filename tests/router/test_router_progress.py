"""What the next leg is told, from the frames seen so far."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.job import CHAT_PATH, parse_job
from router.progress import Diverged, Place, Progress
from wire.errors import NodeFailed
from wire.frames import Frame, FrameKind
from wire.outputs import TokenLogprobs
from wire.transfer import KvTransferParams

HANDOVER = KvTransferParams(
    do_remote_prefill=True,
    remote_engine_id="e",
    remote_block_ids=[[1]],
    remote_request_id="r",
    remote_host="h",
    remote_port=1,
    generation="g",
    num_tokens=2,
    prompt_token_ids=[1, 2],
    generated=[11],
    generated_logprobs=[TokenLogprobs(11, -0.5)],
    sent_text=1,
    seed=5,
    created=99,
    cached_tokens=2,
)


def progress(**fields: Any) -> Progress:
    body = {"model": "m", "messages": [], "stream": True, "max_tokens": 8, **fields}
    return Progress(parse_job(msgspec.json.encode(body), CHAT_PATH, "id", 99, 5))


def tokens(*ids: int, sent: int, payload: bytes = b"x") -> Frame:
    return Frame(FrameKind.TOKENS, payload, list(ids), sent)


def take(state: Progress, frame: Frame) -> bool:
    """A frame of the leg that goes on where the answer stands."""
    return state.take(frame, Place(len(state.token_ids), decoding=state.handover is not None))


def handed_over(payload: bytes = b"x", **fields: Any) -> Progress:
    state = progress(**fields)
    take(state, tokens(11, sent=1, payload=payload))
    take(state, Frame(FrameKind.HANDOVER, params=HANDOVER))
    return state


def test_the_first_decode_leg_gets_the_hand_over_as_it_is() -> None:
    state = handed_over()
    assert state.decode_params() is HANDOVER
    assert state.tokens_to_compute(HANDOVER) == 0
    assert (state.forwarded, state.settled) == (True, False)


def test_after_tokens_a_decode_leg_resumes_without_remote_ids() -> None:
    state = handed_over()
    take(state, tokens(12, 13, sent=4))
    params = state.decode_params()
    assert (params.generated, params.sent_text, params.prompt_token_ids) == ([11, 12, 13], 4, [1, 2])
    assert (params.do_remote_prefill, params.seed, params.created, params.cached_tokens) == (True, 5, 99, 2)
    remote = (params.remote_engine_id, params.remote_block_ids, params.remote_request_id, params.remote_host)
    assert remote == (None, None, None, None)
    assert (params.remote_port, params.generation, params.num_tokens) == (None, None, 0)
    assert state.settled
    assert state.tokens_to_compute(params) == 5


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), max_size=6))
def test_resumes_after_resumes_lose_and_double_no_token(legs: list[list[int]]) -> None:
    state, expected = handed_over(), [11]
    for ids in legs:
        take(state, tokens(*ids, sent=len(expected)))
        expected += ids
        assert state.decode_params().generated == expected


def test_an_answer_with_logprobs_is_not_resumed_once_the_client_has_seen_more() -> None:
    state = handed_over(logprobs=True)
    assert state.decode_params() is HANDOVER
    take(state, tokens(12, sent=2))
    with pytest.raises(NodeFailed, match="logprobs"):
        state.decode_params()


def test_an_unseen_answer_with_logprobs_starts_again_from_the_hand_over() -> None:
    state = handed_over(payload=b"", logprobs=True, stream=False)
    take(state, tokens(12, sent=0, payload=b""))
    assert state.decode_params() is HANDOVER
    take(state, tokens(12, sent=0, payload=b""))
    assert state.token_ids == [11, 12]


def test_a_broken_prefill_leg_that_nobody_saw_is_forgotten() -> None:
    state = progress()
    take(state, tokens(11, sent=0, payload=b""))
    assert state.start_over()
    assert (state.token_ids, state.sent_text) == ([], None)


def test_after_a_seen_first_token_without_hand_over_a_decode_leg_goes_on_from_it() -> None:
    state = progress()
    take(state, tokens(11, sent=3))
    assert not state.start_over()
    assert state.decode_params() == KvTransferParams(
        do_remote_prefill=True, client_max_tokens=8, created=99, seed=5, generated=[11], sent_text=3
    )
    assert not state.settled


def test_a_seen_first_token_with_logprobs_and_no_hand_over_cannot_go_on() -> None:
    state = progress(logprobs=True)
    take(state, tokens(11, sent=3))
    with pytest.raises(NodeFailed):
        state.decode_params()


TICKET = msgspec.structs.replace(HANDOVER, generated=[], generated_logprobs=[], sent_text=None, growing=True)


def begun(**fields: Any) -> tuple[Progress, Place, Place]:
    """A ticket is there; a prefill leg and a decode leg go on side by side."""
    state, prefill = progress(**fields), Place()
    assert not state.take(Frame(FrameKind.TICKET, params=TICKET), prefill)
    assert state.decode_params() is TICKET
    return state, prefill, Place(0, decoding=True)


@pytest.mark.parametrize("prefill_first", [True, False])
def test_of_two_legs_that_tell_of_the_first_token_one_is_heard(prefill_first: bool) -> None:
    state, prefill, decode = begun()
    legs = (prefill, decode) if prefill_first else (decode, prefill)
    assert [state.take(tokens(11, sent=1), leg) for leg in legs] == [True, False]
    assert state.settled
    state.take(Frame(FrameKind.HANDOVER, params=HANDOVER), prefill)
    assert state.take(tokens(12, sent=2), decode)
    assert state.take(Frame(FrameKind.END, b"x", [13], 3), decode)
    assert state.token_ids == [11, 12, 13]
    assert not state.take(tokens(11, sent=1), prefill)


def test_a_hand_over_that_comes_after_later_tokens_takes_none_back() -> None:
    state, prefill, decode = begun()
    state.take(tokens(11, sent=1), decode)
    state.take(tokens(12, sent=2), decode)
    state.take(Frame(FrameKind.HANDOVER, params=HANDOVER), prefill)
    assert state.token_ids == [11, 12]
    assert state.decode_params().generated == [11, 12]


@pytest.mark.parametrize("seen", [True, False])
def test_a_second_decode_leg_begins_with_the_ticket_too(seen: bool) -> None:
    state, prefill, _ = begun(logprobs=True)
    if seen:
        assert state.take(tokens(11, sent=1), prefill)
    assert state.decode_params() is TICKET
    state.take(Frame(FrameKind.HANDOVER, params=HANDOVER), prefill)
    assert state.decode_params() is HANDOVER


@pytest.mark.parametrize("ids", [(99,), (11, 12)])
def test_a_decode_leg_that_tells_of_other_tokens_than_the_client_has_is_given_up(ids: tuple[int, ...]) -> None:
    state, prefill, decode = begun()
    state.take(tokens(11, sent=1), prefill)
    with pytest.raises(Diverged):
        state.take(tokens(*ids, sent=2), decode)
    params = state.decode_params()
    assert (params.generated, params.sent_text, params.remote_engine_id) == ([11], 1, None)
    state.take(Frame(FrameKind.HANDOVER, params=HANDOVER), prefill)
    assert state.decode_params() is HANDOVER


def test_a_first_token_that_a_decode_leg_has_told_counts_although_the_hand_over_has_another() -> None:
    state, prefill, decode = begun()
    assert state.take(tokens(99, sent=1), decode)
    assert not state.take(tokens(11, sent=1), prefill)
    state.take(Frame(FrameKind.HANDOVER, params=HANDOVER), prefill)
    assert state.take(tokens(12, sent=2), decode)
    assert state.decode_params().generated == [99, 12]


@pytest.mark.parametrize("handed_over", [True, False])
def test_an_unseen_answer_with_logprobs_starts_again_however_far_it_was(handed_over: bool) -> None:
    state, prefill, decode = begun(logprobs=True, stream=False)
    state.take(tokens(11, sent=0, payload=b""), decode)
    state.take(tokens(12, sent=0, payload=b""), decode)
    if handed_over:
        state.take(Frame(FrameKind.HANDOVER, params=HANDOVER), prefill)
    assert state.decode_params() is (HANDOVER if handed_over else TICKET)
