"""Requests of several choices: what they submit, and their frames before, while and after the
engine runs.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from node_doubles import EOS, VOCAB, engine_info, ticket, write_config

from kvrelay.decode_node.request import DecodeRequest
from kvrelay.openai_api.body import decode_completion, sampling_params, token_limit
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.prefill_node.request import PrefillRequest
from kvrelay.wire.engine_messages import RequestUpdate, Submit
from kvrelay.wire.errors import KvNotLoaded, RequestError
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Finish, Load, PromptBlocks, TokenLogprobs
from kvrelay.wire.transfer import ChoiceSoFar, KvTransferParams

PROMPT = [7] * 20
TICKET: dict[str, Any] = {**ticket(20), "prompt_token_ids": PROMPT}
OVER = {"generated": [65], "sent_text": 1, "finish": Finish.STOP}
"""A first choice whose client knows that it has ended."""
SCORES = [TokenLogprobs(7, -1.5, (7,), (-1.5,), rank=1)] * 19
LOAD = Load()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_config(tmp_path_factory.mktemp("bytewise")))


def parts(
    tokenizer: Tokenizer, params: KvTransferParams | None = None, **fields: Any
) -> tuple[Submit, AnswerWriter]:
    params = params or KvTransferParams()
    body = {"prompt": "x", "max_tokens": 9, "stream": True, **fields}
    request = decode_completion(json.dumps(body).encode())
    sampling = sampling_params(
        request, limit=token_limit(request, 20, 1000), vocab_size=VOCAB, default_seed=1
    )
    writer = AnswerWriter(
        request,
        tokenizer,
        sampling,
        response_id="id",
        created=7,
        model="m",
        prompt_tokens=20,
        so_far=params.so_far(request.n or 1),
    )
    return Submit("call-1", PROMPT, sampling), writer


def prefill(tokenizer: Tokenizer, *, pipelined: bool = False, **fields: Any) -> PrefillRequest:
    submit, writer = parts(tokenizer, **fields)
    asked = KvTransferParams(do_remote_decode=True, client_max_tokens=9, pipelined=pipelined)
    return PrefillRequest(submit, asked, writer)


def decode(tokenizer: Tokenizer, params: KvTransferParams, **fields: Any) -> DecodeRequest:
    submit, writer = parts(tokenizer, params, **fields)
    return DecodeRequest(submit, params, writer, engine_info())


def chunks(frame: Frame) -> list[Any]:
    lines = (line for line in frame.payload.decode().split("\n\n") if "{" in line)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts(frame: Frame) -> list[tuple[str, str | None]]:
    choices = [choice for chunk in chunks(frame) for choice in chunk["choices"]]
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


@pytest.mark.parametrize("n", [1, 2])
def test_a_first_token_that_ends_its_choice_ends_the_request_of_one_choice_only(
    tokenizer: Tokenizer, n: int
) -> None:
    request = prefill(tokenizer, n=n)
    (submit,) = request.submits
    assert (submit.hold, submit.hold_stopped, submit.params.max_tokens) == (True, n == 2, 1)
    held = KvTransferParams(**TICKET).ticket() if n == 2 else None
    update = RequestUpdate("call-1", [EOS], finish=Finish.STOP, held=held)
    frames = list(request.frames(update, LOAD))
    assert request.finish is not None
    assert frames[0].finish is Finish.STOP
    if n == 1:
        assert [frame.kind for frame in frames] == [FrameKind.END]
        return
    assert [frame.kind for frame in frames] == [FrameKind.TOKENS, FrameKind.HANDOVER]
    assert frames[1].params is not None
    assert frames[1].params.so_far(2) == [
        ChoiceSoFar(generated=[EOS], sent_text=0, finish=Finish.STOP),
        ChoiceSoFar(),
    ]


def test_the_first_choice_that_is_not_over_fetches_and_ends_that_nobody_knows_are_told(
    tokenizer: Tokenizer,
) -> None:
    others = [
        ChoiceSoFar(generated=[66, EOS], sent_text=0),
        ChoiceSoFar(generated=[67, 68], sent_text=1),
    ]
    request = decode(tokenizer, KvTransferParams(**TICKET, **OVER, other_choices=others), n=4)
    assert [(s.params.choice, s.generated, s.fetch is None) for s in request.submits] == [
        (2, [67, 68], False),
        (3, [], True),
    ]
    frames = list(request.opening_frames(LOAD))
    assert {frame.kind for frame in frames} == {FrameKind.TOKENS}
    assert [(f.choice, f.finish, texts(f)) for f in frames] == [
        (1, Finish.STOP, [("B", "stop")]),
        (2, None, [("D", None)]),
    ]
    assert request.finish is None


def test_an_answer_that_is_over_needs_no_engine_and_gives_its_claim_up(
    tokenizer: Tokenizer,
) -> None:
    others = [ChoiceSoFar(generated=[66, EOS], sent_text=1)]
    params = KvTransferParams(**TICKET, **OVER, other_choices=others)
    request = decode(tokenizer, params, n=2)
    assert list(request.submits) == []
    assert request.unneeded is not None
    assert request.unneeded.fetch == params.ticket()
    (frame,) = request.opening_frames(LOAD)
    assert (frame.kind, frame.choice, frame.usage) == (FrameKind.END, 1, (20, 3, 0))
    assert frame.payload.endswith(b"data: [DONE]\n\n")


def test_log_probabilities_of_the_prompt_are_handed_over_and_no_ticket_goes_before_them(
    tokenizer: Tokenizer,
) -> None:
    wants = {"stream": False, "echo": True, "logprobs": 1}
    request = prefill(tokenizer, pipelined=True, **wants)
    ticket = KvTransferParams(**TICKET).ticket()
    assert list(request.frames(RequestUpdate("call-1", [], held=ticket), LOAD)) == []
    update = RequestUpdate(
        "call-1",
        [65],
        finish=Finish.LENGTH,
        held=ticket,
        logprobs=SCORES[:1],
        prompt_logprobs=SCORES,
    )
    handover = list(request.frames(update, LOAD))[-1].params
    assert handover is not None
    assert handover.prompt_logprobs == SCORES
    behind = decode(tokenizer, handover, **wants)
    assert [submit.params.prompt_logprobs for submit in behind.submits] == [None]
    (end,) = behind.frames(
        RequestUpdate("call-1", [66], finish=Finish.LENGTH, logprobs=SCORES[:1]), LOAD
    )
    (choice,) = json.loads(end.payload)["choices"]
    assert choice["text"].endswith("AB")
    listed = choice["logprobs"]["token_logprobs"]
    assert (len(listed), listed[0], listed[1]) == (22, None, -1.5)
    with pytest.raises(RequestError, match="kv_transfer_params lacks its prompt_logprobs"):
        decode(tokenizer, msgspec.structs.replace(handover, prompt_logprobs=None), **wants)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("generation", ""),
        ("remote_port", 65536),
        ("lease_epoch", -1),
        ("remote_request_id", "r" * 257),
        ("remote_block_ids", [[1]]),
        ("remote_block_ids", [[1, 0]]),
        ("remote_block_ids", [[1, 2], [3, 4]]),
    ],
)
def test_a_ticket_that_can_lead_nowhere_is_refused(
    tokenizer: Tokenizer, field: str, value: object
) -> None:
    with pytest.raises(RequestError):
        decode(tokenizer, KvTransferParams(**(TICKET | {field: value})))


def test_kv_that_did_not_come_is_told_once_with_its_cause(tokenizer: Tokenizer) -> None:
    params = KvTransferParams(**TICKET, generated=[65], sent_text=1)
    request, why = decode(tokenizer, params), "PeerLost: 10.0.0.1 is gone"
    name = request.submits[0].request_id
    (first,) = request.frames(RequestUpdate(name, [66], fetch_error=why), LOAD)
    (second,) = request.frames(RequestUpdate(name, [67], fetch_error=why), LOAD)
    assert (first.kv_error, second.kv_error) == ("PeerLost", "")
    failing = decode(tokenizer, params)
    failed = RequestUpdate(name, [], finish=Finish.ERROR, error="no KV", fetch_error=why)
    with pytest.raises(KvNotLoaded) as raised:
        list(failing.frames(failed, LOAD))
    assert failing.error(raised.value).kv_error == "PeerLost"


@pytest.mark.parametrize("thinks", [True, False])
def test_an_end_names_the_blocks_that_the_next_turn_has(
    tokenizer: Tokenizer, *, thinks: bool
) -> None:
    it, blocks = decode(tokenizer, KvTransferParams()), PromptBlocks(16, b"x" * 32)
    it.writer.choices[0].message.thinks = thinks
    last = RequestUpdate("call-1", [65], finish=Finish.LENGTH, blocks=blocks)
    *_, frame = it.frames(last, LOAD)
    assert (frame.kind, frame.blocks) == (FrameKind.END, None if thinks else blocks)


def test_an_answer_that_fills_the_prompts_last_block_adds_nothing_to_what_is_written(
    tokenizer: Tokenizer,
) -> None:
    request = decode(tokenizer, KvTransferParams(), stream_options={"include_usage": True})
    list(request.frames(RequestUpdate("call-1", [65]), LOAD))
    last = RequestUpdate("call-1", [65], finish=Finish.LENGTH, pinned_tokens=32)
    *_, frame = request.frames(last, LOAD)
    assert chunks(frame)[-1]["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 20
