"""Where a request is read: here, or by a child with limits; and that what its answer must match was
compiled there.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_doubles import engine_info, serving_of

from kvrelay.node.preprocess import detokenize, prepare
from kvrelay.node.sandbox import Sandbox
from kvrelay.node.serving import Call, Serving
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.wire.engine_messages import RequestUpdate
from kvrelay.wire.errors import Overloaded, RequestError
from kvrelay.wire.outputs import Finish, Load
from kvrelay.wire.sampling import Constraint, SamplingDefaults

LARGE = "x" * (257 << 10)


class StandInSandbox(Sandbox):
    """Says what was given to it, and answers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[bool, bool]] = []

    async def token_ids(self, chat: bool, body: bytes, *, fits: bool = True) -> list[list[int]]:
        self.read.append((chat, fits))
        return [[97]]

    async def as_lark(self, constraint: Constraint) -> Constraint:
        return Constraint("lark", f"of {constraint.text}", field=constraint.field)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Serving:
    info = engine_info(1_000_000)
    return serving_of(tmp_path_factory.mktemp("bytewise"), info, trusts_request_templates=True)


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def deep(levels: int, values: int) -> dict[str, Any]:
    """Few bytes of JSON, of which a template that indents it makes 4 * levels * values."""
    inside: Any = [0] * values
    for _ in range(levels):
        inside = [inside]
    return {"x": inside}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def called(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("fields", "in_sandbox"),
    [
        ({"messages": said("x" * 100_000)}, False),
        ({"messages": said(LARGE)}, True),
        ({"messages": said("x") * 64}, False),
        ({"messages": said("x") * 65}, True),
        ({"messages": [{**said("x")[0], "tool_calls": [{"function": {"name": "f"}}] * 64}]}, True),
        ({"messages": said("x"), "tools": [tool(deep(4, 1000))], "tool_choice": "none"}, False),
        ({"messages": said("x"), "tools": [tool(deep(100, 1000))], "tool_choice": "none"}, True),
        ({"messages": [called(json.dumps(deep(100, 1000)))]}, True),
        ({"messages": said("x"), "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"messages": said("x"), "chat_template_kwargs": {"loops": [1]}}, True),
        ({"messages": said("x"), "chat_template": "{{ messages[0].content }}"}, True),
        ({"prompt": LARGE}, True),
        ({"prompt": [97] * 200_000}, False),
        ({"prompt": LARGE, "kv_transfer_params": {"prompt_token_ids": [97]}}, False),
    ],
)
async def test_what_could_be_endless_is_read_by_a_child(
    serving: Serving, fields: dict[str, Any], in_sandbox: bool
) -> None:
    sandbox, chat = StandInSandbox(), "messages" in fields
    body = json.dumps({"model": "m", "max_tokens": 1, **fields}).encode()
    legs, _ = await prepare(serving, sandbox, Call(chat, body, "r"))
    assert sandbox.read == ([(chat, True)] if in_sandbox else [])
    if in_sandbox:
        assert all(leg.submits[0].prompt_token_ids == [97] for leg in legs)


@pytest.mark.parametrize(
    ("fields", "here"),
    [
        ({"messages": said("x"), "tools": [tool(deep(40, 150))], "tool_choice": "none"}, False),
        ({"prompt": "x" * 7_000}, True),
        ({"prompt": "x" * 9_000}, False),
    ],
)
async def test_only_what_takes_some_milliseconds_is_rendered_and_tokenized_on_the_event_loop(
    serving: Serving, fields: dict[str, Any], here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    token_ids = serving.token_ids

    def noting(*args: Any, **kwargs: Any) -> list[list[int]]:
        threads.append(threading.current_thread() is threading.main_thread())
        return token_ids(*args, **kwargs)

    monkeypatch.setattr(serving, "token_ids", noting)
    body = json.dumps({"model": "m", "max_tokens": 1, **fields}).encode()
    await prepare(serving, StandInSandbox(), Call("messages" in fields, body, "r"))
    assert threads == [here]


async def test_a_long_body_that_waits_too_long_is_refused(serving: Serving) -> None:
    sandbox = StandInSandbox()
    sandbox._start_deadline_s = 0.01
    body = json.dumps({"model": "m", "prompt": "x" * 1_100_000}).encode()
    async with sandbox.body_slot(len(body)):
        with pytest.raises(Overloaded, match="too many long requests"):
            await prepare(serving, sandbox, Call(False, body, "r"))
    await prepare(serving, sandbox, Call(False, body, "r"))


@pytest.mark.parametrize("asked", [{"messages": said("x")}, {"prompt": LARGE}])
async def test_a_grammar_that_is_too_large_is_refused_before_a_child_reads_it(
    serving: Serving, asked: dict[str, Any]
) -> None:
    sandbox = StandInSandbox()
    body = json.dumps({"model": "m", **asked, "structured_outputs": {"grammar": LARGE}}).encode()
    with pytest.raises(RequestError, match=r"grammar has 263168 characters; the limit is 32768"):
        await prepare(serving, sandbox, Call("messages" in asked, body, "r"))
    assert sandbox.read == []


async def test_no_more_tokens_become_text_than_a_context_holds(serving: Serving) -> None:
    body = json.dumps({"tokens": [97] * 1_000_001}).encode()
    with pytest.raises(
        RequestError, match="1000001 token ids; the limit is this model's context"
    ) as refused:
        await detokenize(serving, body)
    assert refused.value.param == "tokens"
    assert msgspec.json.decode(await detokenize(serving, b'{"tokens": [97, 98]}')) == {
        "prompt": "ab"
    }


async def test_a_request_keeps_the_sampling_defaults_of_the_node_where_it_began(
    tmp_path: Path,
) -> None:
    ours, others = SamplingDefaults(temperature=0.5, max_tokens=6), SamplingDefaults(max_tokens=3)
    prefill = serving_of(tmp_path, engine_info(), defaults=ours)
    decode = serving_of(tmp_path, engine_info(), defaults=others)
    asked: dict[str, Any] = {"model": "m", "messages": said("hi")}

    async def prepared(serving: Serving, params: Any) -> NodeRequest:
        body = msgspec.json.encode(asked | {"kv_transfer_params": params})
        ((request,), _) = await prepare(serving, StandInSandbox(), Call(True, body, "r"))
        return request

    first = await prepared(prefill, {"do_remote_decode": True})
    update = RequestUpdate(first.submits[0].request_id, [97], finish=Finish.LENGTH)
    handover = list(first.frames(update, Load()))[-1].params
    params = (await prepared(decode, handover)).submits[0].params
    assert (params.temperature, params.max_tokens) == (0.5, 6)
    alone = (await prepared(decode, {})).submits[0].params
    assert (alone.temperature, alone.max_tokens) == (1.0, 3)
