"""Legs of several choices: what they submit, and what they say before, while and after the engine
runs.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvrelay.decode_node.request import DecodeRequest
from kvrelay.openai_api.body import choice_count, decode_completion, sampling_params
from kvrelay.openai_api.node_request import NodeRequest, fork_submits
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.prefill_node.request import PrefillRequest
from kvrelay.wire.engine_messages import EngineReady, RequestUpdate, Submit
from kvrelay.wire.errors import KvNotLoaded, RequestError
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Finish, Load, TokenLogprobs
from kvrelay.wire.transfer import AnswerState, ChoiceSoFar, HandoverRequest, KvTransferParams

EOS = 2
INFO = EngineReady("e", "g", "m", 300, 1000, 16, 99, 1, [EOS], "h", 1, 0.0)
PROMPT = [7] * 20
TICKET: dict[str, Any] = {
    "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 1,
    "remote_block_ids": [[1, 2]], "generation": "g", "num_tokens": 20, "prompt_token_ids": PROMPT,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = tmp_path_factory.mktemp("bytewise") / "config.json"
    config.write_text(json.dumps({"vocab_size": 300, "eos_token_id": EOS}))
    return load_tokenizer(str(config))


def parts(
    tokenizer: Tokenizer, transfer: KvTransferParams, **fields: Any
) -> tuple[Submit, AnswerWriter]:
    request = decode_completion(
        json.dumps({"prompt": "x", "max_tokens": 9, "stream": True, **fields}).encode()
    )
    sampling = sampling_params(
        request, prompt_tokens=20, max_model_len=1000, vocab_size=300, default_seed=1
    )
    writer = AnswerWriter(
        request,
        tokenizer,
        sampling,
        response_id="id",
        created=7,
        model="m",
        prompt_tokens=20,
        so_far=transfer.answer().so_far(choice_count(request)),
    )
    return Submit("call-1", PROMPT, sampling), writer


def decode_leg(tokenizer: Tokenizer, transfer: KvTransferParams, **fields: Any) -> DecodeRequest:
    submit, writer = parts(tokenizer, transfer, **fields)
    return DecodeRequest(submit, transfer.ticket(), transfer.answer(), writer, INFO)


def said(frame: Frame) -> list[tuple[str, str | None]]:
    events = [
        json.loads(event.removeprefix("data: "))
        for event in frame.payload.decode().split("\n\n")
        if "{" in event
    ]
    return [(c["text"], c["finish_reason"]) for event in events for c in event["choices"]]


def test_forks_share_a_prompt_and_nothing_else(tokenizer: Tokenizer) -> None:
    submit, _ = parts(tokenizer, KvTransferParams())
    ticket = KvTransferParams(**TICKET).ticket()
    first, second, third = fork_submits(
        msgspec.structs.replace(submit, fetch=ticket), {0: [5], 2: [], 3: [6]}
    )
    assert (first.request_id, first.fetch, first.fork_of, first.generated) == (
        "call-1",
        ticket,
        None,
        [5],
    )
    assert [(s.request_id, s.fetch, s.fork_of) for s in (second, third)] == [
        ("call-1.2", None, "call-1"),
        ("call-1.3", None, "call-1"),
    ]
    assert [(s.params.choice, s.generated) for s in (first, second, third)] == [
        (0, [5]),
        (2, []),
        (3, [6]),
    ]


def test_a_stop_string_ends_one_choice_and_the_leg_with_the_last(tokenizer: Tokenizer) -> None:
    submit, writer = parts(tokenizer, KvTransferParams(), n=2, stop="B")
    leg = NodeRequest(fork_submits(submit, {0: [], 1: []}), writer)
    (frame,) = leg.frames(RequestUpdate("call-1", [65, 66]), Load())
    assert (frame.kind, frame.choice, frame.finish, said(frame)) == (
        FrameKind.TOKENS,
        0,
        Finish.STOP,
        [("A", None), ("", "stop")],
    )
    assert leg.over("call-1")
    assert not leg.over("call-1.1")
    assert not leg.done
    (frame,) = leg.frames(RequestUpdate("call-1.1", [67], finish=Finish.LENGTH), Load())
    assert (frame.kind, frame.choice, frame.finish) == (FrameKind.END, 1, Finish.LENGTH)
    assert frame.usage == (20, 3, 0)
    assert leg.done


@pytest.mark.parametrize("n", [1, 2])
def test_a_first_token_that_ends_its_choice_ends_the_leg_of_one_choice_only(
    tokenizer: Tokenizer, n: int
) -> None:
    asked = HandoverRequest(do_remote_decode=True, client_max_tokens=9)
    submit, writer = parts(tokenizer, KvTransferParams(), n=n)
    leg = PrefillRequest(submit, asked, AnswerState(), writer)
    (sent,) = leg.submits
    assert (sent.hold, sent.hold_stopped, sent.params.max_tokens) == (True, n == 2, 1)
    held = KvTransferParams(**TICKET).ticket() if n == 2 else None
    frames = list(leg.frames(RequestUpdate("call-1", [EOS], finish=Finish.STOP, held=held), Load()))
    assert leg.done
    assert frames[0].finish is Finish.STOP
    assert [frame.kind for frame in frames] == (
        [FrameKind.TOKENS, FrameKind.HANDOVER] if n == 2 else [FrameKind.END]
    )
    if n == 2:
        params = frames[1].params
        assert params is not None
        assert params.answer().so_far(2) == [
            ChoiceSoFar(generated=[EOS], sent_text=0, finish=Finish.STOP),
            ChoiceSoFar(),
        ]


def test_the_first_choice_that_is_not_over_fetches_and_ends_that_nobody_knows_are_said(
    tokenizer: Tokenizer,
) -> None:
    transfer = KvTransferParams(
        **TICKET,
        generated=[65],
        sent_text=1,
        finish=Finish.STOP,
        other_choices=[
            ChoiceSoFar(generated=[66, EOS], sent_text=0),
            ChoiceSoFar(generated=[67, 68], sent_text=1),
        ],
    )
    leg = decode_leg(tokenizer, transfer, n=4)
    assert [(s.params.choice, s.generated, s.fetch is None) for s in leg.submits] == [
        (2, [67, 68], False),
        (3, [], True),
    ]
    frames = list(leg.opening_frames(Load()))
    assert {frame.kind for frame in frames} == {FrameKind.TOKENS}
    assert [(f.choice, f.finish, said(f)) for f in frames] == [
        (1, Finish.STOP, [("B", "stop")]),
        (2, None, [("D", None)]),
    ]
    assert not leg.done


def test_an_answer_that_is_over_needs_no_engine_and_gives_its_claim_up(
    tokenizer: Tokenizer,
) -> None:
    transfer = KvTransferParams(
        **TICKET,
        generated=[65],
        sent_text=1,
        finish=Finish.STOP,
        other_choices=[ChoiceSoFar(generated=[66, EOS], sent_text=1)],
    )
    leg = decode_leg(tokenizer, transfer, n=2)
    assert list(leg.submits) == []
    assert leg.unneeded is not None
    assert leg.unneeded.fetch == transfer.ticket()
    (frame,) = leg.opening_frames(Load())
    assert (frame.kind, frame.choice, frame.usage) == (FrameKind.END, 1, (20, 3, 0))
    assert frame.payload.endswith(b"data: [DONE]\n\n")


def test_an_answer_whose_end_alone_is_missing_gets_it(tokenizer: Tokenizer) -> None:
    transfer = KvTransferParams(
        do_remote_prefill=True,
        prompt_token_ids=PROMPT,
        generated=[65],
        sent_text=1,
        finish=Finish.STOP,
    )
    leg = decode_leg(tokenizer, transfer)
    (frame,) = leg.opening_frames(Load())
    assert (frame.kind, frame.payload, frame.usage) == (
        FrameKind.END,
        b"data: [DONE]\n\n",
        (20, 1, 0),
    )
    assert leg.done


SCORES = [TokenLogprobs(7, -1.5, (7,), (-1.5,), rank=1)] * 19


def test_log_probabilities_of_the_prompt_are_handed_over_and_no_ticket_goes_before_them(
    tokenizer: Tokenizer,
) -> None:
    asked = HandoverRequest(do_remote_decode=True, client_max_tokens=9, pipelined=True)
    wants = {"stream": False, "prompt_logprobs": 1}
    submit, writer = parts(tokenizer, KvTransferParams(), **wants)
    leg = PrefillRequest(submit, asked, AnswerState(), writer)
    ticket = KvTransferParams(**TICKET).ticket()
    assert list(leg.frames(RequestUpdate("call-1", [], held=ticket), Load())) == []
    update = RequestUpdate(
        "call-1", [65], finish=Finish.LENGTH, held=ticket, prompt_logprobs=SCORES
    )
    handover = list(leg.frames(update, Load()))[-1].params
    assert handover is not None
    assert handover.prompt_logprobs == SCORES
    decode = decode_leg(tokenizer, handover, **wants)
    assert [submit.params.prompt_logprobs for submit in decode.submits] == [None]
    (end,) = decode.frames(RequestUpdate("call-1", [66], finish=Finish.LENGTH), Load())
    (choice,) = json.loads(end.payload)["choices"]
    assert (choice["text"], len(choice["prompt_logprobs"]), choice["prompt_logprobs"][0]) == (
        "AB",
        20,
        None,
    )
    with pytest.raises(RequestError, match="kv_transfer_params lacks its prompt_logprobs"):
        decode_leg(tokenizer, msgspec.structs.replace(handover, prompt_logprobs=None), **wants)


def test_a_decode_node_that_computes_the_prompt_scores_it_once_for_all_choices(
    tokenizer: Tokenizer,
) -> None:
    leg = decode_leg(
        tokenizer, KvTransferParams(prompt_token_ids=PROMPT), echo=True, logprobs=1, n=2
    )
    assert [submit.params.prompt_logprobs for submit in leg.submits] == [1, None]
    lists = []
    for request_id in ("call-1", "call-1.1"):
        scores = SCORES if request_id == "call-1" else None
        (frame,) = leg.frames(
            RequestUpdate(request_id, [65], SCORES[:1], prompt_logprobs=scores), Load()
        )
        told = [
            json.loads(event.removeprefix("data: "))
            for event in frame.payload.decode().split("\n\n")[:-1]
        ]
        lists.append([chunk["choices"][0]["logprobs"]["token_logprobs"] for chunk in told])
    assert lists == [[[None] + [-1.5] * 19, [-1.5]]] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_kv_that_did_not_come_is_told_once_with_its_cause(
    tokenizer: Tokenizer, fails: bool
) -> None:
    leg = decode_leg(tokenizer, KvTransferParams(**TICKET, generated=[65], sent_text=1))
    why, name, load = "PeerLost: 10.0.0.1 is gone", leg.submits[0].request_id, Load()
    if fails:
        with pytest.raises(KvNotLoaded) as raised:
            list(
                leg.frames(
                    RequestUpdate(name, [], finish=Finish.ERROR, error="no KV", fetch_error=why),
                    load,
                )
            )
        assert leg.error(raised.value).kv_error == "PeerLost"
        return
    (first,) = leg.frames(RequestUpdate(name, [66], fetch_error=why), load)
    (second,) = leg.frames(RequestUpdate(name, [67], fetch_error=why), load)
    assert (first.kv_error, second.kv_error) == ("PeerLost", "")
