"""Requests that clients of other servers send, by the official client to 1P1D of the embedded model.

It is a model whose content means something. What needs no meaning is tested with the tiny model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from real_cluster import EMBEDDED_KEY, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

KEY, MODEL = EMBEDDED_KEY, "SmolLM2-135M-Instruct"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "state": {"type": "string", "maxLength": 2},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "state", "unit"],
            "additionalProperties": False,
        },
    },
}
DALLAS: list[Any] = [
    {"role": "user", "content": "Hi! How are you doing today?"},
    {"role": "assistant", "content": "I'm doing well! How can I help you?"},
    {
        "role": "user",
        "content": "Can you tell me what the temperature will be in dallas, in fahrenheit?",
    },
]
BASEBALL: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who won the world series in 2020?"},
    {"role": "assistant", "content": "The Los Angeles Dodgers won the World Series in 2020."},
    {"role": "user", "content": "Where was it played?"},
]


@pytest.fixture(scope="module")
def cluster(embedded: Cluster) -> Cluster:
    return embedded


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0, timeout=120) as ours:
        yield ours


def chat(client: OpenAI, messages: list[Any], **fields: Any) -> Any:
    fields = {"max_tokens": 12, "temperature": 0} | fields
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, **({"temperature": 0} | fields))


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models(client: OpenAI) -> None:
    listed = client.models.list()
    assert [card.id for card in listed.data] == [MODEL]
    assert (listed.object, listed.data[0].object) == ("list", "model")
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_completion_is_the_same_every_time_and_as_one_node_alone_gives_it(
    client: OpenAI, cluster: Cluster
) -> None:
    answers = [complete(client, "San Francisco is a", max_tokens=7) for _ in range(2)]
    (decode,) = cluster.of("decode")
    with OpenAI(base_url=f"{decode.url}/v1", api_key="-", max_retries=0, timeout=120) as alone:
        answers.append(complete(alone, "San Francisco is a", max_tokens=7))
    assert len({answer.choices[0].text for answer in answers}) == 1
    first = answers[0]
    assert first.choices[0].text.strip()
    assert first.choices[0].finish_reason in ("length", "stop")
    assert 0 < first.usage.completion_tokens <= 7
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens


def test_a_chat_ends_by_itself(client: OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        *user("What is the capital of France?"),
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_the_key(client: OpenAI, cluster: Cluster) -> None:
    assert chat(client, user("Hello!"), max_tokens=3).choices[0].message.content
    for key in ("wrong", "token-abc1234"):
        with (
            OpenAI(base_url=f"{cluster.url}/v1", api_key=key) as other,
            pytest.raises(openai.AuthenticationError) as why,
        ):
            chat(other, user("Hello!"))
        assert why.value.body["type"] == "authentication_error"


def test_every_chunk_has_a_choice(client: OpenAI) -> None:
    extra = {"repetition_penalty": 1, "stop_token_ids": []}
    chunks = list(chat(client, BASEBALL, stream=True, temperature=0.8, seed=1, extra_body=extra))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    usage = list(chat(client, BASEBALL, stream=True, stream_options={"include_usage": True}))
    assert [len(chunk.choices) for chunk in usage[-2:]] == [1, 0]
    assert usage[-1].usage.completion_tokens == 12


def test_a_tools_answer_is_read(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function"}
    function = {
        "name": "get_current_weather",
        "arguments": '{"city": "Dallas", "state": "TX", "unit": "fahrenheit"}',
    }
    messages = [
        *DALLAS,
        {"role": "assistant", "tool_calls": [call | {"function": function}]},
        {
            "role": "tool",
            "content": "It is 85 degrees in Dallas.",
            "tool_call_id": "call_1",
            "name": function["name"],
        },
    ]
    answer = chat(client, messages, tools=[WEATHER])
    longer = chat(client, DALLAS, tools=[WEATHER])
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > longer.usage.prompt_tokens


def test_a_stop_string(client: OpenAI) -> None:
    free = (
        complete(client, "[user] Count to ten. [/user] [assistant] one, two,", max_tokens=24)
        .choices[0]
        .text
    )
    stop = free[5:9]
    answer = complete(
        client, "[user] Count to ten. [/user] [assistant] one, two,", max_tokens=24, stop=[stop]
    )
    assert answer.choices[0].text == free[: free.index(stop)]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)
    kept = complete(
        client,
        "[user] Count to ten. [/user] [assistant] one, two,",
        max_tokens=24,
        stop=[stop],
        extra_body={"include_stop_str_in_output": True},
    )
    assert kept.choices[0].text == free[: free.index(stop)] + stop


def test_a_long_prefix_is_computed_once(client: OpenAI) -> None:
    rows = "\n".join(f"| {i} | name-{i} | {20 + i} | city-{i % 7} |" for i in range(30))
    table = f"You are a helpful assistant. Read this table.\n{rows}\nQuestion: "
    tails = ["what is the age of name-3? Answer:", "what is the city of name-9? Answer:"]
    first, second = (complete(client, table + tail, max_tokens=4) for tail in tails)
    assert second.usage.prompt_tokens_details.cached_tokens > 0.8 * second.usage.prompt_tokens
    again = complete(client, table + tails[0], max_tokens=4)
    assert again.choices[0].text == first.choices[0].text
    salted = complete(
        client, table + tails[0], max_tokens=4, extra_body={"cache_salt": "somebody else"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].text == first.choices[0].text


def test_special_tokens_are_hidden_by_default(client: OpenAI) -> None:
    special = chat(
        client, user("Say hi."), max_tokens=40, extra_body={"skip_special_tokens": False}
    )
    hidden = chat(client, user("Say hi."), max_tokens=40)
    assert special.choices[0].message.content == hidden.choices[0].message.content + "<|im_end|>"


def test_routes_that_are_not_there(client: OpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.NotFoundError) as why:
        client.embeddings.create(model=MODEL, input=["one", "two"])
    assert set(why.value.body) >= {"message", "type"}
    old = httpx2.post(f"{cluster.url}/generate", json={"prompt": "a"})
    assert (old.status_code, set(old.json()["error"])) == (
        404,
        {"message", "type", "param", "code"},
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
def test_images_and_audio_are_refused_in_words(client: OpenAI, part: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=part["type"]):
        chat(
            client, [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
        )


def test_templates_and_unfinished_messages(client: OpenAI) -> None:
    started = [
        *user("What is the capital of France?"),
        {"role": "assistant", "content": "The capital of France is"},
    ]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    answer = chat(client, started, extra_body=extra)
    assert answer.choices[0].message.content.strip().startswith("Paris")
    assert answer.choices[0].message.role == "assistant"
    echoed = chat(client, started, extra_body=extra | {"echo": True})
    assert (
        echoed.choices[0].message.content
        == started[1]["content"] + answer.choices[0].message.content
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tail }}"
    shown = chat(
        client,
        user("1 2 3"),
        extra_body={
            "chat_template": template,
            "chat_template_kwargs": {"tail": " 4 5"},
            "return_token_ids": True,
        },
    )
    plain = complete(client, "1 2 3 4 5", max_tokens=12)
    assert shown.choices[0].message.content == plain.choices[0].text
    documents = [{"title": "A", "text": "alpha"}]
    listing = "{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}"
    read = chat(client, user("x"), extra_body={"chat_template": listing, "documents": documents})
    assert (
        read.usage.prompt_tokens == complete(client, "A: alpha", max_tokens=1).usage.prompt_tokens
    )
