"""The class LLM: a model in Python without a server, under names that users of vLLM know.

An event loop on a thread of its own talks to the engine, so it works from plain code, notebooks and
other event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress

from kvrelay.machine import embedded_model
from kvrelay.openai_api.types import CompletionRequest, SamplingFields
from kvrelay.settings import build, convert, nearest, settings_of
from kvrelay.wire.config import NodeConfig, Role
from kvrelay.wire.errors import ConfigError, KvrelayError, RequestError
from kvrelay.wire.frames import Frame
from kvrelay.wire.outputs import TokenLogprobs
from kvrelay.wire.sampling import SamplingDefaults

if TYPE_CHECKING:
    from kvrelay.node.offline import Offline
    from kvrelay.openai_api.node_request import NodeRequest

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

_T = TypeVar("_T")
_MAX_AT_ONCE = 1024  # requests that the engine knows of
_NOT_OFFLINE = ("role", "host", "port", "api_key", "max_body_bytes", "kv_events_config")
# Set by the call itself.
_NOT_SAMPLING = {
    "model",
    "stream",
    "stream_options",
    "user",
    "kv_transfer_params",
    "include_metrics",
}

# Given to the node in so many words, so that it takes none of the model's.
_NEUTRAL = msgspec.structs.asdict(SamplingDefaults(max_tokens=16))
del _NEUTRAL["limit"]

Prompt = str | Sequence[int] | dict[str, Any]
Message = dict[str, Any]


class SamplingParams:
    """A completion request's sampling fields, all optional.

    `max_tokens` is 16 by default; the model's own defaults are those of
    `LLM.get_default_sampling_params`.
    """

    def __init__(self, **fields: Any) -> None:
        known = {*SamplingFields.__struct_fields__, *CompletionRequest.__struct_fields__} - {
            *_NOT_SAMPLING,
            "prompt",
        }
        for name in fields:
            if name not in known:
                raise RequestError(
                    f"there is no sampling parameter {name!r}{nearest(name, known)}", param=name
                )
        self.fields = _NEUTRAL | {
            name: value for name, value in fields.items() if value is not None
        }

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        return f"SamplingParams({given})"


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability; `rank` 1 is the most likely, None was not asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """A choice; `logprobs` has for each token those that were asked for, and its own."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None

    def finished(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """An answer to one prompt; `prompt` is None if it was given as token ids or as a chat."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


class LLM:
    """A model, for the length of a `with` block or until `close`.

    `settings` are the engine's, as in a config file: `LLM("org/name", max_model_len=4096)`.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        """Load the model. Raises ConfigError, EngineDead."""
        from kvrelay.node.offline import offline

        config = _config(model, settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvrelay-llm", daemon=True
        )
        self._thread.start()
        self._running: AbstractAsyncContextManager[Offline] | None = None
        try:
            self._running = offline(config)
            self._offline = self._wait(self._running.__aenter__())
        except BaseException:
            self._running = None  # it has cleaned up after itself
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._wait(running.__aexit__(None, None, None))
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling, the default of `generate` and `chat`."""
        own = msgspec.structs.asdict(self._offline.serving.defaults)
        return SamplingParams(**{name: value for name, value in own.items() if name in _NEUTRAL})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Return the answers to prompts, in their order.

        A prompt is a text, token ids, or a dict with `prompt` or `prompt_token_ids`. Raises
        KvrelayError for the first that cannot be answered.
        """
        several = _several_prompts(prompts)
        bodies = [
            {"model": self._offline.serving.model_name, "prompt": _prompt(prompt), **params.fields}
            for prompt, params in zip(
                several, self._each(sampling_params, len(several)), strict=True
            )
        ]
        texts = [body["prompt"] if isinstance(body["prompt"], str) else None for body in bodies]
        return self._answers(False, bodies, texts, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Return the answers to one conversation or several, in their order.

        `fields` are further ones of a chat request, such as `tools`. Raises KvrelayError.
        """
        several = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        bodies = [
            {
                "model": self._offline.serving.model_name,
                "messages": each,
                **_chat_fields(params.fields),
                **fields,
            }
            for each, params in zip(several, self._each(sampling_params, len(several)), strict=True)
        ]
        return self._answers(True, bodies, [None] * len(bodies), use_tqdm)

    def _each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if len(params) != count:
            raise RequestError(
                f"{len(params)} sampling_params were given for {count} prompts; give one, or one "
                f"for each"
            )
        return params

    def _answers(
        self, chat: bool, bodies: Sequence[dict[str, Any]], texts: Sequence[str | None], shown: bool
    ) -> list[RequestOutput]:
        if self._running is None:
            raise KvrelayError("this LLM was closed; make another one")
        with _progress(len(bodies), shown) as told:
            return self._wait(self._all(chat, bodies, texts, told))

    async def _all(
        self,
        chat: bool,
        bodies: Sequence[dict[str, Any]],
        texts: Sequence[str | None],
        told: Callable[[], None],
    ) -> list[RequestOutput]:
        seats = asyncio.Semaphore(_MAX_AT_ONCE)

        async def one(body: dict[str, Any], text: str | None) -> RequestOutput:
            async with seats:
                legs, frames = await self._offline.run(chat, msgspec.json.encode(body))
            told()
            return _output(legs[0], frames, text, self._offline)

        tasks = [
            asyncio.ensure_future(one(body, text)) for body, text in zip(bodies, texts, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()  # of those that still run because another has failed
            await asyncio.gather(*tasks, return_exceptions=True)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except KeyboardInterrupt:
            done.cancel()
            raise


def _config(model: str, settings: dict[str, Any]) -> NodeConfig:
    from kvrelay.preflight import with_model_here

    known = settings_of(NodeConfig, _NOT_OFFLINE)
    for name in settings:
        if name not in known:
            raise ConfigError(f"there is no setting {name!r}{nearest(name, known)}")
    checked = {name: convert(known[name], value, name) for name, value in settings.items()}
    config = build(
        NodeConfig, {**checked, "model": model or str(embedded_model()), "role": Role.AGGREGATED}
    )
    return with_model_here(config)


def _several_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _prompt(prompt: Prompt) -> str | list[int]:
    value = (
        prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, dict) else prompt
    )
    if value is None:
        raise RequestError(
            "a prompt that is a dict needs `prompt` or `prompt_token_ids`", param="prompt"
        )
    return value if isinstance(value, str) else list(value)


def _chat_fields(fields: dict[str, Any]) -> dict[str, Any]:
    if "logprobs" not in fields:
        return fields
    return {**fields, "logprobs": True, "top_logprobs": fields["logprobs"]}


def _output(
    leg: NodeRequest, frames: Sequence[Frame], text: str | None, made_by: Offline
) -> RequestOutput:
    outputs = []
    for choice in leg.writer.choices:
        count = len(choice.token_ids)  # tokens behind a stop string are not the answer's
        told = [
            each
            for frame in frames
            if frame.choice == choice.index
            for each in frame.logprobs or ()
        ][:count]
        asked = bool(told)
        reasons = choice.whole()
        outputs.append(
            CompletionOutput(
                choice.index,
                choice.text,
                list(choice.token_ids),
                sum(each.logprob for each in told) if asked else None,
                [_logprobs(each, made_by) for each in told] if asked else None,
                reasons.finish_reason,
                reasons.stop_reason,
            )
        )
    first = leg.submits[0]
    return RequestOutput(
        first.request_id, text, list(first.prompt_token_ids), outputs, leg.writer.cached_tokens
    )


def _logprobs(each: TokenLogprobs, made_by: Offline) -> dict[int, Logprob]:
    ranks = {token: at + 1 for at, token in enumerate(each.top_ids)}
    known = {each.token_id: each.logprob, **dict(zip(each.top_ids, each.top_logprobs, strict=True))}
    text = made_by.serving.token_text
    return {
        token: Logprob(logprob, ranks.get(token), text(token)) for token, logprob in known.items()
    }


@contextlib.contextmanager
def _progress(count: int, shown: bool) -> Iterator[Callable[[], None]]:
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("prompts", total=count)
        yield lambda: bar.advance(task)
