"""A chat by the official client with 1P1D of the embedded model, whose content means something.

What needs no meaning is tested with the tiny model.
"""

from __future__ import annotations

import pytest
from openai import OpenAI
from real_cluster import EMBEDDED_KEY, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]


def test_a_chat_ends_by_itself(embedded: Cluster) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    url = f"{embedded.url}/v1"
    with OpenAI(base_url=url, api_key=EMBEDDED_KEY, max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=messages, temperature=0
        )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
