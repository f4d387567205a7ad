"""Requests with several prompts: a walk for each, one answer of them all."""

from typing import Any

import msgspec
import pytest
from router_doubles import (
    DONE,
    MODEL,
    STREAMS,
    Call,
    broken,
    cluster,
    cut,
    decode,
    parse_job,
    prefill,
    until,
)

from kvrelay.router.request.job import COMPLETIONS_PATH, parts_of
from kvrelay.wire.errors import RequestError
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Finish, Load

PROMPTS = ["first", "second", "third"]


def parts(**fields: Any) -> Any:
    body = msgspec.json.encode({"model": "m", "prompt": PROMPTS, **fields})
    return parts_of(parse_job(body, COMPLETIONS_PATH))


def test_a_given_seed_is_every_prompts_and_a_drawn_one_is_not() -> None:
    assert [job.seed for job in parts(seed=3)] == [3, 3, 3]
    assert [job.seed for job in parts()] == [1234, 1235, 1236]


def test_the_choices_of_a_prompt_come_behind_those_of_the_ones_before() -> None:
    assert [job.first_index for job in parts(n=2)] == [0, 2, 4]


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]], [], None])
def test_one_prompt_in_any_form_is_one_job(prompt: Any) -> None:
    (job,) = parts(prompt=prompt)
    assert not job.part


def test_many_prompts_beside_a_long_field_are_refused_before_any_walk() -> None:
    assert len(parts(prompt=["a"] * 128, user="x" * 200_000)) == 128
    with pytest.raises(RequestError, match=r"128 prompts with .* the limit is 33554432"):
        parts(prompt=["a"] * 128, user="x" * 300_000)


def chunk(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"text": text}) + b"\n\n"


async def first_token(call: Call) -> None:
    prompt = call.body["prompt"]
    await call.send(Frame(FrameKind.TOKENS, chunk(f"{prompt} 1") if call.streams else b"", [11], 1))
    await call.hand_over(
        part=call.params["part"], first_index=call.params["first_index"], prompt_token_ids=None
    )


async def rest(call: Call) -> None:
    prompt, index = call.body["prompt"], call.params.get("first_index", 0)
    usage = (3, 2, 1)
    body = {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": MODEL, "more": 1}
    body["choices"] = [{"index": index, "text": prompt}]
    body["usage"] = {
        "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 2},
    }  # fmt: skip
    payload = chunk(f"{prompt} 2") if call.streams else msgspec.json.encode(body)
    end = Frame(FrameKind.END, payload, [12], 2, finish=Finish.LENGTH, usage=usage, written=2)
    await call.send(end)


SUM = {
    "prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 6},
}  # fmt: skip


async def test_whole_answers_are_joined_in_order_and_usage_is_summed() -> None:
    async with cluster(prefill(first_token), decode(rest), decode(rest)) as c:
        answer = msgspec.json.decode(await c.text({"prompt": PROMPTS}, path=COMPLETIONS_PATH))
    assert answer["choices"] == [{"index": at, "text": prompt} for at, prompt in enumerate(PROMPTS)]
    assert answer["usage"] == SUM
    assert answer["more"] == 1


@pytest.mark.parametrize("usage", [True, False])
async def test_events_come_as_they_are_and_the_end_comes_once(usage: bool) -> None:
    fields = {"prompt": PROMPTS, "stream": True, "stream_options": {"include_usage": usage}}
    async with cluster(prefill(first_token), decode(rest)) as c:
        events = (await c.text(fields, path=COMPLETIONS_PATH)).split("\n\n")
        await until(lambda: c.metric("kvrelay_router_output_tokens_total") == 6)
    assert events[-2:] == ["data: [DONE]", ""]
    sent = [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-2]]
    if usage:
        last = sent.pop()
        assert (last["choices"], last["usage"], last["object"], last["model"]) == (
            [],
            SUM,
            "text_completion",
            MODEL,
        )
    for prompt in PROMPTS:
        assert [event["text"] for event in sent if prompt in event["text"]] == [
            f"{prompt} 1",
            f"{prompt} 2",
        ]
    assert len(sent) == 6


@STREAMS
async def test_one_prompt_that_fails_ends_them_all_with_one_error(stream: bool) -> None:
    async def some(call: Call) -> None:
        if call.body["prompt"] == "second":
            await broken(400)(call)
        else:
            await first_token(call)
            await waits.resume.wait()

    waits = prefill(some)
    async with cluster(waits, decode(rest)) as c:
        answer = await c.asked({"prompt": PROMPTS, "stream": stream}, path=COMPLETIONS_PATH)
        text = answer.text
        assert text.count("it broke") == 1
        assert answer.status == 400 or text.endswith(DONE.decode())
        await until(lambda: not c.node(waits).leases)


async def test_a_part_that_loses_its_node_goes_on_and_the_others_do_not_notice() -> None:
    bad, good = decode(cut), decode(rest, load=Load(running=9))
    async with cluster(prefill(first_token), bad, good) as c:
        answer = msgspec.json.decode(await c.text({"prompt": PROMPTS}, path=COMPLETIONS_PATH))
    assert len(bad.calls) > 0
    assert [choice["text"] for choice in answer["choices"]] == PROMPTS


async def test_prompts_that_are_only_repeated_do_not_wait_for_a_first_token() -> None:
    async def repeats(call: Call) -> None:
        body = {"choices": [{"index": 0, "text": call.body["prompt"]}]}
        await call.send(Frame(FrameKind.END, msgspec.json.encode(body), usage=(3, 0, 0)))

    fields = {"prompt": PROMPTS, "echo": True, "max_tokens": 0}
    async with cluster(prefill(repeats), decode()) as c:
        answer = msgspec.json.decode(await c.text(fields, path=COMPLETIONS_PATH))
    assert [choice["text"] for choice in answer["choices"]] == PROMPTS
