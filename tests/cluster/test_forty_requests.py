"""Forty requests that clients of other servers send, through the router of a 1P1D cluster, with the
official client.

The embedded model answers, so that content means something. Numbers C01 to C40 are those of the
list that the requests were gathered in; requests which need another start-up are in
`test_other_starts.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from real_cluster import EMBEDDED_KEY, Cluster, counted

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


def test_c01_models(client: OpenAI) -> None:
    listed = client.models.list()
    assert [card.id for card in listed.data] == [MODEL]
    assert (listed.object, listed.data[0].object) == ("list", "model")
    assert client.models.retrieve(MODEL).id == MODEL


def test_c02_a_completion_is_the_same_every_time_and_as_one_node_alone_gives_it(
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


def test_c03_sixteen_tokens_by_default(client: OpenAI) -> None:
    answer = complete(client, "San Francisco is a", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_c04_a_chat_ends_by_itself(client: OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        *user("What is the capital of France?"),
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_c05_a_joke(client: OpenAI) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        *user("Tell me a joke."),
    ]
    answer = chat(client, messages, max_tokens=10)
    assert len(answer.choices[0].message.content) > 10
    assert answer.usage.completion_tokens == 10


def test_c06_the_key(client: OpenAI, cluster: Cluster) -> None:
    assert chat(client, user("Hello!"), max_tokens=3).choices[0].message.content
    for key in ("wrong", "token-abc1234"):
        with (
            OpenAI(base_url=f"{cluster.url}/v1", api_key=key) as other,
            pytest.raises(openai.AuthenticationError) as why,
        ):
            chat(other, user("Hello!"))
        assert why.value.body["type"] == "authentication_error" or why.value.status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_c07_guided_choice(client: OpenAI, stream: bool) -> None:
    answer = chat(
        client,
        user("Classify this sentiment: vLLM is wonderful!"),
        stream=stream,
        extra_body={"guided_choice": ["positive", "negative"]},
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text, finish = (
            "".join(chunk.delta.content or "" for chunk in chunks),
            chunks[-1].finish_reason,
        )
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text in ("positive", "negative")
    assert finish == "stop"


def test_c08_an_earlier_turn_is_cached(client: OpenAI) -> None:
    chat(client, BASEBALL[:2])
    answer = chat(client, BASEBALL)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 16
    assert answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_c09_c10_two_choices_with_logprobs(client: OpenAI, stream: bool) -> None:
    fields = {"max_tokens": 6, "n": 2, "logprobs": 3, "temperature": 1.0, "seed": 5, "echo": False}
    whole = complete(client, "A robot may not injure a human being", **fields)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert whole.usage.completion_tokens == sum(
        len(choice.logprobs.tokens) for choice in whole.choices
    )
    for choice in whole.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)
        assert all(3 <= len(top) <= 4 for top in choice.logprobs.top_logprobs)
    if stream:
        seen, ends = ["", ""], [0, 0]
        for chunk in complete(
            client, "A robot may not injure a human being", stream=True, **fields
        ):
            (choice,) = chunk.choices
            seen[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
        assert (seen, ends) == (texts, [1, 1])


def test_c11_one_choice(client: OpenAI) -> None:
    answer = complete(client, "The future of AI is", echo=False, n=1, stream=False, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].text


def test_c12_every_chunk_has_a_choice(client: OpenAI) -> None:
    extra = {"repetition_penalty": 1, "stop_token_ids": []}
    chunks = list(chat(client, BASEBALL, stream=True, temperature=0.8, seed=1, extra_body=extra))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    usage = list(chat(client, BASEBALL, stream=True, stream_options={"include_usage": True}))
    assert [len(chunk.choices) for chunk in usage[-2:]] == [1, 0]
    assert usage[-1].usage.completion_tokens == 12


def test_c13_stop_token_ids(client: OpenAI, cluster: Cluster) -> None:
    free = complete(
        client,
        "One, two, three,",
        max_tokens=8,
        logprobs=0,
        extra_body={"return_tokens_as_token_ids": True},
    )
    ids = [int(token.removeprefix("token_id:")) for token in free.choices[0].logprobs.tokens]
    answer = complete(
        client, "One, two, three,", max_tokens=8, extra_body={"stop_token_ids": [ids[3]]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == ids[3]
    assert answer.usage.completion_tokens == ids.index(ids[3]) + 1


def test_c14_one_token(client: OpenAI, cluster: Cluster) -> None:
    (decode,) = cluster.of("decode")
    before = decode.metric("kvrelay_fetches_total")
    answer = chat(client, user("Hello! What is your name?"), max_tokens=1)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "length")
    counted([decode], "kvrelay_fetches_total", before)


@pytest.mark.parametrize("stream", [False, True])
def test_c15_c16_a_tool_call_of_the_models_own(client: OpenAI, stream: bool) -> None:
    """The model is small: a pattern makes it say what a larger one would, and the parser reads it."""
    arguments = r'\{"city": "Dallas", "state": "TX", "unit": "fahrenheit"\}'
    said = (
        rf'<tool_call>\n\{{"name": "get_current_weather", "arguments": {arguments}\}}\n</tool_call>'
    )
    fields = {
        "tools": [WEATHER],
        "stream": stream,
        "max_tokens": 120,
        "extra_body": {"guided_regex": said},
    }
    answer = chat(client, DALLAS, **fields)
    if stream:
        call, finish = streamed_call(answer)
    else:
        (call_,) = answer.choices[0].message.tool_calls
        call, finish = (
            (call_.id, call_.function.name, call_.function.arguments),
            answer.choices[0].finish_reason,
        )
        assert not answer.choices[0].message.content
    assert call[0]
    assert call[1] == "get_current_weather"
    assert json.loads(call[2]) == {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
    assert finish == "tool_calls"


def streamed_call(stream: Any) -> tuple[tuple[str, str, str], str | None]:
    """(id, name, arguments) of the one tool call of a stream, and how it finished."""
    ids, names, arguments, finish = [], [], "", None
    for chunk in stream:
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            ids += [call.id] if call.id else []
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
    (call_id,), (name,) = ids, names
    return (call_id, name, arguments), finish


def test_c17_a_tools_answer_is_read(client: OpenAI) -> None:
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


@pytest.mark.parametrize("stream", [False, True])
def test_c18_a_named_tool_needs_no_parser(client: OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "get_current_weather"}}
    answer = chat(client, DALLAS, tools=[WEATHER], tool_choice=named, stream=stream, max_tokens=80)
    if stream:
        (_, name, arguments), finish = streamed_call(answer)
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments, finish = (
            call.function.name,
            call.function.arguments,
            answer.choices[0].finish_reason,
        )
    given = json.loads(arguments)
    assert name == "get_current_weather"
    assert set(given) == {"city", "state", "unit"}
    assert given["unit"] in ("celsius", "fahrenheit")
    assert finish == "stop"


def test_c18_required_calls_one_of_the_tools(client: OpenAI) -> None:
    other = {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    }
    answer = chat(
        client,
        DALLAS,
        tools=[WEATHER, other],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=150,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in ("get_current_weather", "get_time")
    assert isinstance(json.loads(call.function.arguments), dict)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_c19_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as why:
        client.completions.create(model="sql-lora", prompt="San Francisco is a", max_tokens=7)
    assert why.value.body["code"] == "model_not_found"
    assert "sql-lora" in why.value.body["message"]


def test_c20_a_stop_string(client: OpenAI) -> None:
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


def test_c21_sampling_parameters(client: OpenAI) -> None:
    answer = complete(
        client, "Hello, my name is", logprobs=1, max_tokens=4, extra_body={"prompt_logprobs": 1}
    )
    of_prompt = answer.choices[0].prompt_logprobs
    assert len(of_prompt) == answer.usage.prompt_tokens
    assert of_prompt[0] is None
    assert all(value["logprob"] <= 0 for entry in of_prompt[1:] for value in entry.values())
    again = complete(
        client, "Hello, my name is", logprobs=1, max_tokens=4, extra_body={"prompt_logprobs": 1}
    )
    assert (
        again.choices[0].prompt_logprobs == of_prompt
    )  # also when the prompt is in the prefix cache
    other = complete(
        client,
        "Hello, my name is",
        temperature=0.8,
        presence_penalty=0.2,
        seed=3,
        max_tokens=8,
        extra_body={"top_k": 5},
    )
    assert other.choices[0].text
    best = complete(
        client,
        "Hello, my name is",
        n=2,
        best_of=5,
        temperature=0.8,
        top_p=0.95,
        frequency_penalty=0.1,
        seed=4,
        max_tokens=6,
    )
    assert [choice.index for choice in best.choices] == [0, 1]
    with pytest.raises(openai.BadRequestError, match="use_beam_search"):
        complete(client, "Hello, my name is", n=3, best_of=3, extra_body={"use_beam_search": True})


def test_c22_four_prompts(client: OpenAI) -> None:
    prompts = [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    answer = complete(client, prompts, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text.strip().startswith("Paris")
    alone = [complete(client, prompt, max_tokens=6) for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone]
    assert answer.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    ids = complete(client, [[1, 2, 3, 4], [5, 6, 7, 8]], max_tokens=2)
    assert [choice.index for choice in ids.choices] == [0, 1]


def test_c23_c24_a_long_prefix_is_computed_once(client: OpenAI) -> None:
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


def test_c25_a_long_answer_streams_to_its_end(client: OpenAI) -> None:
    essay = [
        *BASEBALL[:3],
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    chunks = [
        chunk.choices[0]
        for chunk in chat(client, essay, stream=True, temperature=0.5, seed=2, max_tokens=60)
    ]
    whole = chat(client, essay, temperature=0.5, seed=2, max_tokens=60)
    assert (
        "".join(chunk.delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 1


def test_c27_a_poem(client: OpenAI) -> None:
    answer = chat(
        client,
        user("Compose a poem that explains the concept of recursion in programming."),
        max_tokens=20,
    )
    assert answer.usage.completion_tokens == 20
    assert len(answer.choices[0].message.content.split()) > 8


def test_c31_suffix(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix") as why:
        complete(client, "def f(", suffix="x")
    assert why.value.body["param"] == "suffix"


def test_c32_extra_fields(client: OpenAI) -> None:
    prompt = "Once upon a time"
    plain = complete(client, prompt, max_tokens=10)
    exact = complete(
        client, prompt, max_tokens=10, extra_body={"min_tokens": 10, "ignore_eos": True}
    )
    assert exact.usage.completion_tokens == 10
    cut = complete(client, prompt, max_tokens=2, extra_body={"truncate_prompt_tokens": 2})
    assert cut.usage.prompt_tokens == 2
    sure = complete(
        client, prompt, max_tokens=10, temperature=1.0, seed=9, extra_body={"min_p": 1.0}
    )
    assert sure.choices[0].text == plain.choices[0].text
    repeated = complete(client, "a a a a a a a a a a a a", max_tokens=10)
    varied = complete(
        client, "a a a a a a a a a a a a", max_tokens=10, extra_body={"repetition_penalty": 2.0}
    )
    assert repeated.choices[0].text != varied.choices[0].text
    allowed = complete(
        client,
        prompt,
        max_tokens=5,
        extra_body={"allowed_token_ids": [40, 41], "return_token_ids": True},
    )
    assert set(allowed.choices[0].token_ids) <= {40, 41}
    word = next(re.finditer(r"\w+", plain.choices[0].text)).group()
    without = complete(client, prompt, max_tokens=10, extra_body={"bad_words": [word]})
    assert without.choices[0].text != plain.choices[0].text
    assert not re.search(rf"\b{re.escape(word)}\b", without.choices[0].text)
    special = chat(
        client, user("Say hi."), max_tokens=40, extra_body={"skip_special_tokens": False}
    )
    hidden = chat(client, user("Say hi."), max_tokens=40)
    assert special.choices[0].message.content == hidden.choices[0].message.content + "<|im_end|>"


def test_c33_structured_output(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    ask = user("Describe a person as JSON.")
    by_guide = chat(client, ask, max_tokens=60, extra_body={"guided_json": schema})
    named = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": schema, "strict": True},
    }
    by_format = chat(client, ask, max_tokens=60, response_format=named)
    by_new_name = chat(
        client, ask, max_tokens=60, extra_body={"structured_outputs": {"json": schema}}
    )
    for answer in (by_guide, by_format, by_new_name):
        person = json.loads(answer.choices[0].message.content)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 120
    assert by_guide.choices[0].message.content == by_format.choices[0].message.content
    address = chat(
        client,
        user("An IPv4 address:"),
        max_tokens=30,
        extra_body={"guided_regex": r"(\d{1,3}\.){3}\d{1,3}"},
    )
    assert re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", address.choices[0].message.content)
    grammar = 'start: "SELECT " column " FROM " table\ncolumn: "a" | "b"\ntable: "t" | "u"\n'
    query = chat(client, user("A query:"), max_tokens=30, extra_body={"guided_grammar": grammar})
    assert re.fullmatch("SELECT [ab] FROM [tu]", query.choices[0].message.content)
    pairs = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert json.loads(
        chat(client, ask, max_tokens=40, extra_body={"guided_json": pairs})
        .choices[0]
        .message.content
    )["a"] in (True, False)
    some = chat(
        client,
        user("Say a JSON object with one key."),
        max_tokens=100,
        response_format={"type": "json_object"},
    )
    if some.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(some.choices[0].message.content), dict)
    assert some.choices[0].message.content.lstrip().startswith("{")
    for bad in (
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_json": {"type": "nonsense"}},
        {"guided_regex": "("},
    ):
        with pytest.raises(openai.BadRequestError):
            chat(client, ask, extra_body=bad)


def test_c34_the_last_chunk_says_why(client: OpenAI) -> None:
    chunks = list(chat(client, user("Hello!"), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_c35_c36_health_and_metrics(client: OpenAI, cluster: Cluster) -> None:
    report = httpx2.get(f"{cluster.url}/health").json()
    assert (report["prefill"]["up"], report["decode"]["up"]) == (1, 1)
    (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
    assert prefill.metric("vllm:prompt_tokens_total") > 0
    assert decode.metric("vllm:generation_tokens_total") > 0


def test_c37_c38_routes_that_are_not_there(client: OpenAI, cluster: Cluster) -> None:
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
def test_c39_images_and_audio_are_refused_in_words(client: OpenAI, part: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=part["type"]):
        chat(
            client, [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
        )


def test_c40_templates_and_unfinished_messages(client: OpenAI) -> None:
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
