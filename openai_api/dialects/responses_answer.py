"""The answer of POST /v1/responses, made of a chat completion. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.openai_api.dialects.base import KEEP_ALIVE, ChatAnswer, named_event, openai_error
from kvrelay.openai_api.dialects.responses_request import ResponsesRequest
from kvrelay.openai_api.types import ToolCallDelta
from kvrelay.wire.errors import ErrorBody, NodeFailed

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

Finished = Callable[[dict[str, Any]], None]
"""Called with the whole response once, unless it failed."""


@dataclass
class _Item:
    at: int
    value: dict[str, Any]
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.value["id"], "output_index": self.at}


class ResponsesAnswer(ChatAnswer):
    """An answer of the Responses API; ids of items end as the response's."""

    begins_at_once = True
    kinds = ("reasoning", "message")

    def __init__(self, request: ResponsesRequest, response_id: str, created_at: int) -> None:
        super().__init__()
        self._head = _head(request, response_id, created_at)
        self._suffix = response_id.removeprefix("resp_")
        self.finished: Finished | None = None
        self._number = 0
        self._items: list[_Item] = []
        self._open: list[_Item] = []
        self._calls: dict[int, _Item] = {}

    def keep_alive(self) -> bytes:
        """Return the unsent first events, else a comment."""
        self._begin_once()
        return self._flush() or KEEP_ALIVE

    def error(self, status: int, error: ErrorBody) -> bytes:
        param = _PARAMS.get(error.param or "", error.param)
        return openai_error(status, msgspec.structs.replace(error, param=param))

    def _send(self, kind: str, **values: Any) -> None:
        self._sent.append(named_event(kind, sequence_number=self._number, **values))
        self._number += 1

    def _begin(self) -> None:
        for kind in ("created", "in_progress"):
            self._send(f"response.{kind}", response=self._response("in_progress"))

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> None:
        item = self._open[-1] if self._open else None
        if item is None or item.value["type"] != kind:
            item = self._open_text(kind)
        item.text.append(text)
        item.logprobs += logprobs
        if kind == "message":
            place = {**item.place, "content_index": 0}
            self._send("response.output_text.delta", **place, delta=text, logprobs=logprobs)
        else:
            self._send("response.reasoning_text.delta", **item.place, content_index=0, delta=text)

    def _open_text(self, kind: str) -> _Item:
        self._close("completed")
        if kind == "message":
            item = self._new(kind, "msg", role="assistant", content=[])
        else:
            item = self._new(kind, "rs", summary=[], content=[])
        self._send(
            "response.content_part.added", **item.place, content_index=0, part=_part(kind, "", [])
        )
        return item

    def _call(self, index: int, call: ToolCallDelta) -> None:
        item = self._calls.get(index)
        if item is None:
            if self._open and self._open[-1].value["type"] != "function_call":
                self._close("completed")
            name, call_id = call.function.name or "", call.id or f"call_{self._suffix}{index}"
            item = self._calls[index] = self._new(
                "function_call", "fc", arguments="", call_id=call_id, name=name
            )
        if item.value["status"] != "in_progress":
            raise NodeFailed(
                "a node went on with a function call that had ended; send the request again"
            )
        if call.function.arguments:
            item.text.append(call.function.arguments)
            self._send(
                "response.function_call_arguments.delta",
                **item.place,
                delta=call.function.arguments,
            )

    def _new(self, kind: str, prefix: str, **values: Any) -> _Item:
        at = len(self._items)
        item = _Item(
            at,
            {"id": f"{prefix}_{self._suffix}{at}", "type": kind, "status": "in_progress", **values},
        )
        self._items.append(item)
        self._open.append(item)
        self._send("response.output_item.added", output_index=at, item=item.value)
        return item

    def _close(self, status: str) -> None:
        for item in self._open:
            kind, text = item.value["type"], "".join(item.text)
            if kind == "function_call":
                item.value = {**item.value, "status": status, "arguments": text}
                self._send(
                    "response.function_call_arguments.done",
                    **item.place,
                    name=item.value["name"],
                    arguments=text,
                )
            else:
                part = _part(kind, text, item.logprobs)
                item.value = {**item.value, "status": status, "content": [part]}
                place = {**item.place, "content_index": 0}
                if kind == "message":
                    self._send(
                        "response.output_text.done", **place, text=text, logprobs=item.logprobs
                    )
                else:
                    self._send("response.reasoning_text.done", **place, text=text)
                self._send("response.content_part.done", **place, part=part)
            self._send("response.output_item.done", output_index=item.at, item=item.value)
        self._open.clear()

    def _end(self) -> dict[str, Any]:
        if not self._items:
            self._open_text("message")  # an empty answer is a message without text
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

    def _response(self, status: str) -> dict[str, Any]:
        usage: dict[str, Any] | None = None
        if status in ("completed", "incomplete"):
            counts = self._usage
            usage = {
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": counts.cached_tokens,
                    "cache_write_tokens": counts.cache_write_tokens,
                },
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
                "total_tokens": counts.prompt_tokens + counts.completion_tokens,
            }
        return {
            **self._head,
            "status": status,
            "output": [item.value for item in self._items],
            "usage": usage,
        }


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _head(request: ResponsesRequest, response_id: str, created_at: int) -> dict[str, Any]:
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
