"""A real node that is asked directly: other dialects and tokenization over the tiny model, by the
official clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.cluster.real_cluster import Cluster, Process, counted, tiny_model

pytestmark = pytest.mark.cluster

KEY = "a-key"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)
SAMPLING = {"seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("direct")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    cluster = Cluster(folder, tiny_model(folder))
    try:
        flags = ["--chat-template", str(template), "--served-model-name", "tiny", "--api-key", KEY]
        flags += ["--kv-pin-s", "1"]
        cluster.nodes.append(cluster.start("serve", [*cluster.flags, *flags]))
        cluster.wait_ready(*cluster.nodes)
        yield cluster.nodes[0]
    finally:
        cluster.stop()


@pytest.fixture
def openai_client(node: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def anthropic_client(node: Process) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=node.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def post(node: Process, path: str, body: Any) -> httpx2.Response:
    return httpx2.post(
        node.url + path, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60
    )


def chat_text(client: openai.OpenAI, messages: Any) -> str:
    told = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, extra_body=SAMPLING
    )
    return told.choices[0].message.content or ""


def test_a_response_says_what_the_chat_completion_says(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": "hi",
        "instructions": "Be brief.",
        "max_output_tokens": 6,
    }
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text = chat_text(openai_client, messages)
    with openai_client.responses.stream(**asked, extra_body=SAMPLING) as stream:
        *others, last = stream
    deltas = (event.delta for event in others if event.type == "response.output_text.delta")
    assert "".join(deltas) == text != ""
    assert last.type == "response.incomplete"
    kept = openai_client.responses.retrieve(last.response.id)
    assert (kept.output_text, kept.status) == (text, "incomplete")


def test_a_message_says_what_the_chat_completion_says(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 6,
        "messages": [{"role": "user", "content": "hi"}],
    }
    text = chat_text(openai_client, asked["messages"])
    with anthropic_client.messages.stream(**asked, extra_body=SAMPLING) as stream:
        assert "".join(stream.text_stream) == text
        last = stream.get_final_message()
    assert (last.usage.output_tokens, last.stop_reason) == (6, "max_tokens")
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=asked["messages"])
    assert counted.input_tokens == last.usage.input_tokens + (
        last.usage.cache_read_input_tokens or 0
    )
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(**(asked | {"model": "other"}))


def test_an_operator_resets_the_prefix_cache_and_asks_how_the_node_is(node: Process) -> None:
    prompt = {"model": "tiny", "prompt": "once upon a time " * 20, "max_tokens": 1}

    def cached() -> int:
        told = post(node, "/v1/completions", prompt).json()["usage"]
        return int((told.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    cached()
    assert cached() > 0
    assert httpx2.post(f"{node.url}/reset_prefix_cache", timeout=60).status_code == 401
    assert post(node, "/reset_prefix_cache", {}).json() == {"success": True}
    assert cached() == 0
    assert cached() > 0


def test_a_wish_to_keep_kv_is_told_in_usage_and_ends(
    node: Process, openai_client: openai.OpenAI
) -> None:
    told = openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "keep this " * 20}],
        max_tokens=2,
        prompt_cache_key="mine",
        prompt_cache_retention="24h",
    ).usage
    assert told is not None
    assert told.prompt_tokens_details is not None
    assert told.prompt_tokens_details.cache_write_tokens == told.prompt_tokens // 16 * 16
    counted([node], "kvrelay_blocks_pinned", 0)


def test_tokens_go_to_text_and_back(node: Process) -> None:
    told = post(
        node, "/tokenize", {"prompt": "hé", "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 1024
    assert post(node, "/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "hé"}
    chat = post(
        node, "/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    ).json()
    assert post(node, "/detokenize", {"tokens": chat["tokens"]}).json() == {
        "prompt": "<user>hi<assistant>"
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": ["x", "y"]}, 400, "prompt"),
        ("/detokenize", {"tokens": [320]}, 400, "tokens"),
        ("/v1/responses", {"model": "tiny"}, 400, "input"),
        ("/v1/embeddings", {"input": "x"}, 404, None),
    ],
)
def test_what_is_wrong_is_named(
    node: Process, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = post(node, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_node_is_asked_for_its_key_in_either_header(node: Process) -> None:
    keys = (({}, 401), ({"x-api-key": KEY}, 200), ({"x-api-key": "other"}, 401))
    with httpx2.Client(base_url=node.url, timeout=60) as client:
        for headers, status in keys:
            told = client.post("/tokenize", json={"prompt": "x"}, headers=headers)
            assert told.status_code == status
        assert client.get("/ping").status_code == 200
        wrong = client.get("/tokenize")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert client.get("/openapi.json").json()["info"]["title"] == "kvrelay node"
        refused = client.post("/v1/messages", json={})
        assert refused.json()["error"]["type"] == "authentication_error"
