"""The answer of POST /v1/responses, made of a chat completion. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvrelay.openai_api.dialects.base import (
    KEEP_ALIVE,
    AnswerPart,
    ChatAnswer,
    named_event,
    openai_error,
)
from kvrelay.openai_api.dialects.responses_request import ResponsesRequest
from kvrelay.wire.errors import ErrorBody
from kvrelay.wire.json_object import JsonObject

__all__ = ["ResponsesAnswer"]

# What a chat completion's fields are called in a request of this API.
_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
# By our error's type; of any other: server_error.
_CODES = {"overloaded_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}

Finished = Callable[[JsonObject], None]
"""Called with the whole response once, unless it failed."""


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_EMPTY: dict[str, JsonObject] = {
    "reasoning": {"summary": [], "content": []},
    "message": {"role": "assistant", "content": []},
    "function_call": {"arguments": ""},
}
# Names of the events of an item's text.
_TEXTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


class ResponsesAnswer(ChatAnswer):
    """An answer of the Responses API; ids of items end as the response's."""

    begins_at_once = True
    kinds = ("reasoning", "message", "function_call")
    call_prefix = "call"

    def __init__(self, request: ResponsesRequest, response_id: str, created_at: int) -> None:
        super().__init__(response_id)
        self._head = _head(request, response_id, created_at)
        self.finished: Finished | None = None
        self._number = 0

    def keep_alive(self) -> bytes:
        """Return the unsent first events, else a comment."""
        self._begin_once()
        return self._flush() or KEEP_ALIVE

    def error(self, status: int, error: ErrorBody) -> bytes:
        param = _PARAMS.get(error.param or "", error.param)
        return openai_error(status, replace(error, param=param))

    def _send(self, kind: str, **values: Any) -> None:
        self._sent.append(named_event(kind, sequence_number=self._number, **values))
        self._number += 1

    def _begin(self) -> None:
        for kind in ("created", "in_progress"):
            self._send(f"response.{kind}", response=self._response("in_progress"))

    def _opened(self, part: AnswerPart, call: JsonObject) -> JsonObject:
        item = part.value = {
            "id": f"{_PREFIXES[part.kind]}_{self._suffix}{part.at}",
            "type": part.kind,
            "status": "in_progress",
            **_EMPTY[part.kind],
        }
        if call:
            item |= {"call_id": call["id"], "name": call["name"]}
        self._send("response.output_item.added", output_index=part.at, item=item)
        if not call:
            empty = _part(part.kind, "", [])
            self._send("response.content_part.added", **_place(part), part=empty)
        return item

    def _grown(self, part: AnswerPart, piece: str, logprobs: list[JsonObject]) -> None:
        more = {"logprobs": logprobs} if part.kind == "message" else {}
        self._send(f"{_TEXTS[part.kind]}.delta", **_place(part), delta=piece, **more)

    def _closed(self, part: AnswerPart, text: str, status: str) -> JsonObject:
        kind, place = part.kind, _place(part)
        if kind == "function_call":
            whole: JsonObject = {"arguments": text}
            self._send(f"{_TEXTS[kind]}.done", **place, **whole, name=part.value["name"])
        else:
            content = _part(kind, text, part.logprobs)
            whole = {"content": [content]}
            more = {"logprobs": part.logprobs} if kind == "message" else {}
            self._send(f"{_TEXTS[kind]}.done", **place, text=text, **more)
            self._send("response.content_part.done", **place, part=content)
        item = {**part.value, "status": status, **whole}
        self._send("response.output_item.done", output_index=part.at, item=item)
        return item

    def _end(self) -> JsonObject:
        if not self._parts:
            self._add("message", {})  # an empty answer is a message without text
        cut = self._finish == "length"
        status = "incomplete" if cut else "completed"
        self._close(status)
        response = self._response(status)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._send(f"response.{status}", response=response)
        if self.finished is not None:
            self.finished(response)
        return response

    def _fail(self, error: ErrorBody) -> None:
        self._close("incomplete")
        response = self._response("failed")
        response["error"] = {
            "code": _CODES.get(error.type, "server_error"),
            "message": error.message,
        }
        self._send("response.failed", response=response)

    def _response(self, status: str) -> JsonObject:
        usage: JsonObject | None = None
        if status in ("completed", "incomplete"):
            counts = self._usage
            usage = {
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": counts.detail("cached_tokens"),
                    "cache_write_tokens": counts.detail("cache_write_tokens"),
                },
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": counts.detail("reasoning_tokens")},
                "total_tokens": counts.prompt_tokens + counts.completion_tokens,
            }
        return {
            **self._head,
            "status": status,
            "output": [part.value for part in self._parts],
            "usage": usage,
        }


def _place(part: AnswerPart) -> JsonObject:
    place = {"item_id": part.value["id"], "output_index": part.at}
    return place if part.kind == "function_call" else {**place, "content_index": 0}


def _part(kind: str, text: str, logprobs: list[JsonObject]) -> JsonObject:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _head(request: ResponsesRequest, response_id: str, created_at: int) -> JsonObject:
    format_ = request.text.format if request.text and request.text.format else {"type": "text"}
    reasoning = request.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,  # None: the model's own, which this side does not know
        "text": {"format": format_},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
