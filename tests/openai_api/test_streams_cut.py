"""Streams are read the same wherever the network cuts them: by the official client, and by the
router.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import APIError, OpenAI

from kvrelay.openai_api import sse
from kvrelay.openai_api.body import decode_chat, sampling_params
from kvrelay.openai_api.dialects.base import KEEP_ALIVE
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.transfer import ChoiceSoFar

TEXT = 'é"😀\n\n'


def stream(tokenizer: Tokenizer) -> list[bytes]:
    """The payloads of a chat's stream with two choices, log-probabilities, usage and a keep-alive
    comment.
    """
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "logprobs": True,
        "top_logprobs": 1,
    }
    request = decode_chat(
        json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    )
    params = sampling_params(
        request, prompt_tokens=5, max_model_len=1000, vocab_size=300, default_seed=1
    )
    writer = AnswerWriter(
        request,
        tokenizer,
        params,
        response_id="chatcmpl-1",
        created=7,
        model="m",
        prompt_tokens=5,
        so_far=[ChoiceSoFar()] * 2,
    )
    payloads = []
    for token in TEXT.encode():
        logprobs = [TokenLogprobs(token, -0.5, (token,), (-0.5,))]
        payloads += [writer.tokens(choice, [token], logprobs) for choice in (0, 1)]
    payloads.insert(5, KEEP_ALIVE)
    ends = [writer.end(choice, Finish.LENGTH) for choice in (0, 1)]
    return [*payloads, *ends, writer.close()]


class Cut(httpx2.SyncByteStream):
    """A body that comes in two pieces."""

    def __init__(self, body: bytes, at: int) -> None:
        self.pieces = [body[:at], body[at:]]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.pieces)


def read(body: bytes, at: int) -> list[dict[str, Any]]:
    """The chunks that the official client makes of a stream that is cut at `at`."""

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, stream=Cut(body, at)
        )

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    with OpenAI(
        base_url="http://127.0.0.1/v1", api_key="-", max_retries=0, http_client=http
    ) as client:
        chunks = client.chat.completions.create(model="m", messages=[], stream=True, n=2)
        return [chunk.model_dump() for chunk in chunks]


def test_the_official_client_reads_the_same_wherever_a_stream_is_cut(bytewise: Tokenizer) -> None:
    body = b"".join(stream(bytewise))
    whole = read(body, 0)
    for choice in (0, 1):
        mine = [c for chunk in whole for c in chunk["choices"] if c["index"] == choice]
        assert "".join(c["delta"]["content"] or "" for c in mine) == TEXT
        assert sum(c["finish_reason"] == "length" for c in mine) == 1
    assert whole[-1]["usage"]["completion_tokens"] == 2 * len(TEXT.encode())
    # Every position of the first events and of the end, and each 13th between: all events have the
    # same shape.
    for at in {*range(500), *range(500, len(body) - 500, 13), *range(len(body) - 500, len(body))}:
        assert read(body, at) == whole, at


def test_the_official_client_sees_an_error_wherever_it_is_cut(bytewise: Tokenizer) -> None:
    body = b"".join(stream(bytewise)[:4]) + sse.error_event(NodeFailed("it broke"))
    for at in range(len(body) - 200, len(body)):
        with pytest.raises(APIError, match="it broke"):
            read(body, at)
