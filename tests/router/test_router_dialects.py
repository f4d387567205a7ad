"""The router in other dialects: official clients, fail-over under them, keys, shapes of errors,
kept responses.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from kvrelay.router.admission.keys import callers_by_hash, hash_of
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.router_config import KeyConfig
from tests.openai_api.answers import DONE, ROLE, WHOLE_TOOLS, call, chunk, usage_chunk
from tests.router.router_doubles import (
    MODEL,
    Call,
    Cluster,
    broken,
    cluster,
    decode,
    prefill,
    refuse,
)

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


async def prefill_first(asked: Call) -> None:
    """The role chunk with token 11, then the hand-over."""
    payload = ROLE + chunk({"content": "Looking"}) if asked.streams else b""
    await asked.send(Frame(FrameKind.TOKENS, payload, [11], 1))
    await asked.hand_over()


async def decode_tools(asked: Call) -> None:
    """The rest of an answer with a tool call, cut in the middle of an event."""
    if not asked.streams:
        await asked.send(Frame(FrameKind.END, WHOLE_TOOLS))
        return
    rest = (
        chunk({"content": "."})
        + chunk({"tool_calls": [call(0, '{"city": ', "call_a", "weather")]})
        + chunk({"tool_calls": [call(0, '"Rome"}')]})
        + chunk({}, "tool_calls")
        + usage_chunk()
        + DONE
    )
    await asked.send(Frame(FrameKind.TOKENS, rest[:100], [12], 2))
    await asked.send(Frame(FrameKind.END, rest[100:], [13], 3))


def openai_client(started: Cluster, **fields: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{started.url}/v1", api_key="key", max_retries=0, timeout=10, **fields
    )


def anthropic_client(started: Cluster, **fields: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=started.url, api_key="key", max_retries=0, timeout=10, **fields
    )


async def test_a_conversation_goes_on_from_a_kept_response() -> None:
    p, d = prefill(prefill_first), decode(decode_tools)
    async with cluster(p, d) as started, openai_client(started) as client:
        first = await client.responses.create(model=MODEL, input="Rome?")
        output: Any = [{"type": "function_call_output", "call_id": "call_a", "output": "sunny"}]
        second = await client.responses.create(
            model=MODEL, input=output, previous_response_id=first.id
        )
        roles = [message["role"] for message in p.calls[-1].body["messages"]]
        assert roles == ["user", "assistant", "tool"]
        assert (await client.responses.retrieve(second.id)).previous_response_id == first.id
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as why:
            await client.responses.retrieve(first.id)
        assert why.value.code == "response_not_found"
        # What a kept response was made of does not need the ones before it.
        await client.responses.create(model=MODEL, input="Thanks", previous_response_id=second.id)
        assert len(p.calls[-1].body["messages"]) == 5


async def test_a_response_of_another_key_is_as_one_that_there_never_was() -> None:
    keys = (KeyConfig("ann", hash_of("ann")), KeyConfig("bob", hash_of("bob")))
    p, d = prefill(prefill_first), decode(decode_tools)
    async with cluster(p, d, keys=keys) as c:

        async def ask(key: str, method: str, path: str, body: Any = None) -> tuple[int, str]:
            headers = {"authorization": f"Bearer {key}"}
            async with c.http.request(method, c.url + path, headers=headers, json=body) as answer:
                return answer.status, await answer.text()

        asked = {"model": MODEL, "input": "Rome?"}
        mine = json.loads((await ask("ann", "POST", "/v1/responses", asked))[1])["id"]
        for method, path, body in (
            ("GET", "/v1/responses/{}", None),
            ("DELETE", "/v1/responses/{}", None),
            ("POST", "/v1/responses", asked | {"previous_response_id": "{}"}),
        ):
            told = []
            for each in (mine, "resp_" + "0" * 32):
                filled = json.loads(json.dumps(body).replace("{}", each))
                status, text = await ask("bob", method, path.format(each), filled)
                told.append((status, text.replace(each, "ID")))
            assert told[0] == told[1]
            assert told[0][0] == 404
        assert len(d.calls) == 1
        assert (await ask("ann", "GET", f"/v1/responses/{mine}"))[0] == 200
        # The key counts, not its name.
        c.router.callers = callers_by_hash(
            "", (KeyConfig("ann", hash_of("new")), KeyConfig("was-ann", hash_of("ann")))
        )
        assert (await ask("new", "GET", f"/v1/responses/{mine}"))[0] == 404
        assert (await ask("ann", "GET", f"/v1/responses/{mine}"))[0] == 200


async def test_errors_reach_the_anthropic_client_as_its_own() -> None:
    p, d = prefill(refuse(400, "too long")), decode()
    async with cluster(p, d, api_key="key") as started, anthropic_client(started) as client:
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
        }
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked)
        assert refused.value.body == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "too long"},
        }
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**(asked | {"model": "other"}))
        assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        stranger = anthropic.AsyncAnthropic(base_url=started.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(**asked)
        await stranger.close()
        answer = await started.ask("GET", "/v1/messages", headers={"x-api-key": "key"})
        assert answer.status == 405
        assert answer.json["type"] == "error"


@pytest.mark.parametrize(
    ("path", "fields", "last"),
    [
        ("/v1/responses", {"input": "hi"}, "event: response.failed"),
        ("/v1/messages", {"max_tokens": 3}, "event: error"),
    ],
)
async def test_an_answer_that_breaks_ends_with_the_error_event_of_its_dialect(
    path: str, fields: dict[str, Any], last: str
) -> None:
    async with cluster(prefill(prefill_first), decode(broken(500))) as started:
        text = await started.text({"stream": True, **fields}, path=path)
        assert text.rstrip().splitlines()[-2] == last
        assert "no decode node could serve" in text


async def test_version_and_ping_need_no_key_and_unknown_routes_are_404() -> None:
    async with cluster(prefill(), decode(), api_key="key") as started:
        answer = await started.ask("GET", "/version")
        assert list(answer.json) == ["version"]
        for method in ("GET", "POST"):
            assert (await started.ask(method, "/ping")).status == 200
        for path in ("/v1/embeddings", "/v1/nothing", "/v1/responses/x/cancel"):
            answer = await started.ask("POST", path, headers={"authorization": "Bearer key"})
            assert answer.status == 404
            assert answer.error["type"] == "not_found_error"
        answer = await started.ask("GET", "/v1/chat/completions", headers={"x-api-key": "key"})
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert (await started.ask("POST", "/tokenize", json={"prompt": "hi"})).status == 401
    async with cluster(prefill(), ready=False) as started:
        for path, status in (("/ping", 503), ("/live", 200)):
            assert (await started.ask("GET", path)).status == status


async def test_plain_chat_completions_stay_a_move_of_bytes() -> None:
    odd = b"data:   {not json at all}\n\n" + DONE

    async def ends(asked: Call) -> None:
        await asked.send(Frame(FrameKind.END, odd, [12], 2))

    async with cluster(prefill(prefill_first), decode(ends)) as started:
        assert (await started.text({"stream": True})).encode() == ROLE + chunk(
            {"content": "Looking"}
        ) + odd
