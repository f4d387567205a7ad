"""The class LLM: a model in Python without a server, under names that users of vLLM know.

An event loop on its own thread talks to the engine: LLM works in plain code, notebooks and other
event loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from kvrelay.machine import embedded_model
from kvrelay.openai_api.types import CompletionRequest, SamplingFields
from kvrelay.settings import build, convert, nearest, settings_of
from kvrelay.wire.config import NodeConfig, Role
from kvrelay.wire.errors import ConfigError, KvrelayError, RequestError
from kvrelay.wire.json_object import JsonObject
from kvrelay.wire.sampling import SamplingDefaults

if TYPE_CHECKING:
    from kvrelay.openai_api.node_request import NodeRequest

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_T = TypeVar("_T")
_MAX_AT_ONCE = 1024  # requests that the engine knows of
_NOT_OFFLINE = ("role", "host", "port", "api_key", "max_body_bytes")
_NOT_SAMPLING = {"model", "prompt", "stream", "stream_options", "user", "kv_transfer_params"}
_NOT_SAMPLING |= {"logprobs"}  # an output has none
_FIELDS = {*SamplingFields.__struct_fields__, *CompletionRequest.__struct_fields__} - _NOT_SAMPLING
# Given to the node explicitly: it takes none of the model's.
_NEUTRAL = msgspec.structs.asdict(SamplingDefaults(max_tokens=16))
del _NEUTRAL["limit"]


class SamplingParams:
    """A completion request's sampling fields, all optional; `max_tokens` is 16 by default."""

    def __init__(self, **fields: Any) -> None:
        for name in fields.keys() - _FIELDS:
            raise RequestError(
                f"there is no sampling parameter {name!r}{nearest(name, _FIELDS)}", param=name
            )
        given = {name: value for name, value in fields.items() if value is not None}
        self.fields = _NEUTRAL | given


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """An answer to one prompt; `prompt` is None if it was given as token ids or as a chat."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """A model, for the length of a `with` block or until `close`.

    `settings` are the engine's, as in a config file: `LLM("org/name", max_model_len=4096)`.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        """Load the model. Raises ConfigError, EngineDead."""
        from kvrelay.node.offline import offline

        config = _config(model, settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._opened = AsyncExitStack()
        try:
            self._offline = self._wait(self._opened.enter_async_context(offline(config)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._wait(self._opened.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Return the answers to one prompt or several, each a text or token ids, in their order.

        Without `sampling_params` the model's own count. Raises KvrelayError.
        """
        alone = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
        asked = [{"prompt": each} for each in ([prompts] if alone else prompts)]
        return self._wait(self._answers(asked, sampling_params))

    def chat(
        self, messages: Any, sampling_params: SamplingParams | None = None, **fields: Any
    ) -> list[RequestOutput]:
        """Return the answers to one conversation or several, in their order.

        `fields` are further ones of a chat request, such as `tools`. Raises KvrelayError.
        """
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        asked = [{"messages": each, **fields} for each in several]
        return self._wait(self._answers(asked, sampling_params))

    async def _answers(
        self, asked: Sequence[JsonObject], params: SamplingParams | None
    ) -> list[RequestOutput]:
        common = {"model": self._offline.serving.model_name} | (params.fields if params else {})
        seats = asyncio.Semaphore(_MAX_AT_ONCE)

        async def one(body: JsonObject) -> RequestOutput:
            async with seats:
                made, _ = await self._offline.run("messages" in body, msgspec.json.encode(body))
            return _output(body.get("prompt"), made[0])

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(common | each)) for each in asked]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_closed():
            work.close()
            raise KvrelayError("this LLM was closed; make another one")
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except KeyboardInterrupt:
            done.cancel()
            raise


def _config(model: str, settings: dict[str, Any]) -> NodeConfig:
    from kvrelay.preflight import with_model_here

    known = settings_of(NodeConfig, _NOT_OFFLINE)
    for name in settings.keys() - known.keys():
        raise ConfigError(f"there is no setting {name!r}{nearest(name, known)}")
    values = {name: convert(known[name], value, name) for name, value in settings.items()}
    values |= {"model": model or str(embedded_model()), "role": Role.AGGREGATED}
    return with_model_here(build(NodeConfig, values))


def _output(prompt: Any, made: NodeRequest) -> RequestOutput:
    choices = [(each.whole(), list(each.token_ids)) for each in made.writer.choices]
    outputs = [
        CompletionOutput(str(whole.text), ids, whole.finish_reason or "") for whole, ids in choices
    ]
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(text, list(made.submits[0].prompt_token_ids), outputs)
