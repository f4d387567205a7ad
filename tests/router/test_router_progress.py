"""What the next leg is told, from the frames seen so far."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import parse_job

from kvrelay.router.request.job import CHAT_PATH
from kvrelay.router.request.progress import AnswerProgress, FramePosition
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.transfer import ChoiceSoFar, KvTransferParams

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


def progress(**fields: Any) -> AnswerProgress:
    body = {"model": "m", "messages": [], "stream": True, "max_tokens": 8, **fields}
    return AnswerProgress(parse_job(msgspec.json.encode(body), CHAT_PATH))


def tokens(*ids: int, sent: int, payload: bytes = b"x", **more: Any) -> Frame:
    return Frame(FrameKind.TOKENS, payload, list(ids), sent, **more)


def take(state: AnswerProgress, frame: Frame) -> bool:
    """A frame of the leg that goes on where the answer stands."""
    at = {choice: len(each.generated) for choice, each in state._choices.items()}
    return state.take(frame, FramePosition(at, decoding=state.told is not None))


def handed_over(payload: bytes = b"x", **fields: Any) -> AnswerProgress:
    state = progress(**fields)
    take(state, tokens(11, sent=1, payload=payload))
    take(state, Frame(FrameKind.HANDOVER, params=HANDOVER))
    return state


def test_after_tokens_a_decode_leg_resumes_without_remote_ids() -> None:
    state = handed_over()
    take(state, tokens(12, 13, sent=4))
    so_far = ChoiceSoFar(generated=[11, 12, 13], logprobs=HANDOVER.generated_logprobs, sent_text=4)
    assert state.decode_params() == HANDOVER.with_ticket(None).with_choices([so_far])


TICKET = msgspec.structs.replace(
    HANDOVER, generated=[], generated_logprobs=[], sent_text=None, growing=True
)


def begun(**fields: Any) -> tuple[AnswerProgress, FramePosition, FramePosition]:
    """A ticket is there; a prefill leg and a decode leg go on side by side."""
    state, prefill = progress(**fields), FramePosition()
    assert not state.take(Frame(FrameKind.TICKET, params=TICKET), prefill)
    assert state.decode_params() is TICKET
    return state, prefill, FramePosition.behind(TICKET)


def test_a_first_token_that_a_decode_leg_has_told_counts_although_the_hand_over_has_another() -> (
    None
):
    state, prefill, decode = begun()
    assert state.take(tokens(99, sent=1), decode)
    assert not state.take(tokens(11, sent=1), prefill)
    state.take(Frame(FrameKind.HANDOVER, params=HANDOVER), prefill)
    assert state.take(tokens(12, sent=2), decode)
    assert state.decode_params().generated == [99, 12]


def test_a_first_choice_that_its_first_token_has_ended_ends_once() -> None:
    state, prefill, decode = begun(n=2)
    end = tokens(11, sent=1, finish=Finish.STOP)
    assert state.take(end, prefill)
    assert state.decode_params() is TICKET
    assert not state.take(end, decode)
    over = msgspec.structs.replace(HANDOVER, finish=Finish.STOP)
    state.take(Frame(FrameKind.HANDOVER, params=over), prefill)
    assert state.decode_params() is over
    assert state.take(tokens(21, sent=1, choice=1), decode)
    assert state.decode_params().so_far(2) == [
        ChoiceSoFar(
            generated=[11], logprobs=[TokenLogprobs(11, -0.5)], sent_text=1, finish=Finish.STOP
        ),
        ChoiceSoFar(generated=[21], sent_text=1),
    ]


def test_of_an_answer_whose_choices_have_all_ended_only_the_end_is_missing() -> None:
    state = handed_over()
    take(state, tokens(12, sent=2, finish=Finish.LENGTH))
    params = state.decode_params()
    assert (params.generated, params.finish) == ([11, 12], Finish.LENGTH)
    assert state.take(Frame(FrameKind.END, b"[DONE]"), FramePosition.behind(params))
    assert state.ended


LEG = st.tuples(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=4), st.lists(LEG, max_size=5), st.data())
def test_whatever_breaks_no_token_of_any_choice_is_lost_or_doubled(
    lengths: list[int], legs: list[Any], data: st.DataObject
) -> None:
    """Choice i is i0, i1, ...; decode legs tell of it in pieces and break anywhere, the last one
    does not.
    """
    answer = {
        choice: [choice * 10 + at for at in range(length)] for choice, length in enumerate(lengths)
    }
    state, prefill, heard = (
        progress(n=len(lengths)),
        FramePosition(),
        {choice: [] for choice in answer},
    )  # type: ignore[var-annotated]
    ends = dict.fromkeys(answer, 0)

    def tell(frame: Frame, place: FramePosition) -> None:
        if state.take(frame, place):
            heard[frame.choice] += frame.token_ids
            ends[frame.choice] += frame.finish is not None

    first = tokens(0, sent=1, logprobs=[TokenLogprobs(0, -1.0)])
    ticket = msgspec.structs.replace(TICKET, generated=[])
    over = msgspec.structs.replace(
        HANDOVER,
        generated=[0],
        generated_logprobs=[TokenLogprobs(0, -1.0)],
        sent_text=1,
        finish=None,
    )
    late = [(first, prefill), (Frame(FrameKind.HANDOVER, params=over), prefill)]
    state.take(Frame(FrameKind.TICKET, params=ticket), prefill)
    for pieces, *_ in [*legs, ([(choice, 3) for choice in range(4)] * 5, False)]:
        params = state.decode_params()
        place = FramePosition.behind(params)
        said = {
            choice: len(each.generated) for choice, each in enumerate(params.so_far(len(lengths)))
        }
        over_already = {
            choice for choice, each in enumerate(params.so_far(len(lengths))) if each.finish
        }
        for each in params.so_far(len(lengths)):
            assert len(each.logprobs) == len(each.generated)
        for choice, count in pieces:
            if late and data.draw(st.booleans()):
                tell(*late.pop(0))
            if choice >= len(lengths) or choice in over_already or (choice and not said[0]):
                continue
            ids = answer[choice][said[choice] : said[choice] + count]
            if choice == 0 and not said[0]:
                ids = ids[:1]
            if not ids:
                continue
            said[choice] += len(ids)
            finish = Finish.LENGTH if said[choice] == lengths[choice] else None
            logprobs = [TokenLogprobs(token, -1.0) for token in ids]
            tell(
                tokens(*ids, sent=said[choice], choice=choice, finish=finish, logprobs=logprobs),
                place,
            )
    assert heard == answer
    assert ends == dict.fromkeys(answer, 1)
