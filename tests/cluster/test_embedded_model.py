"""Requests that clients of other servers send, by the official client to 1P1D of the embedded model.

It is a model whose content means something. What needs no meaning is tested with the tiny model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from real_cluster import EMBEDDED_KEY, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

KEY, MODEL = EMBEDDED_KEY, "SmolLM2-135M-Instruct"


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


def test_a_chat_ends_by_itself(client: OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        *user("What is the capital of France?"),
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_templates_and_unfinished_messages(client: OpenAI) -> None:
    started = [
        *user("What is the capital of France?"),
        {"role": "assistant", "content": "The capital of France is"},
    ]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    answer = chat(client, started, extra_body=extra)
    assert answer.choices[0].message.content.strip().startswith("Paris")
    assert answer.choices[0].message.role == "assistant"
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
