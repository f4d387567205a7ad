"""From a request body to a NodeRequest: decode, tokenize once, check, choose what the role does."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvrelay.decode_node.request import DecodeRequest
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.sandbox import Sandbox, Setup
from kvrelay.openai_api.body import (
    decode_chat,
    decode_completion,
    prompts_of,
    sampling_params,
    token_limit,
)
from kvrelay.openai_api.constraints import bad_word_ids
from kvrelay.openai_api.generation_config import sampling_defaults
from kvrelay.openai_api.json_body import read_json
from kvrelay.openai_api.message_stream import message_form
from kvrelay.openai_api.model_formats import (
    ReasoningFormat,
    ToolFormat,
    load_plugin,
    reasoning_format,
    tool_format,
)
from kvrelay.openai_api.model_types import (
    DetokenizeRequest,
    ModelCard,
    TokenizeRequest,
    TokenizeResponse,
)
from kvrelay.openai_api.node_request import NodeRequest, fork_submits
from kvrelay.openai_api.prompt import Prompts, check_template
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.openai_api.types import MAX_CHOICES, AnyRequest, CompletionRequest
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.prefill_node.request import PrefillRequest
from kvrelay.wire.config import EngineConfig, NodeConfig, Role
from kvrelay.wire.engine_messages import EngineReady, Submit
from kvrelay.wire.errors import ConfigError, Draining, NotFound, RequestError
from kvrelay.wire.sampling import PLAIN_SAMPLING, SamplingDefaults, SamplingParams
from kvrelay.wire.transfer import KvTransferParams

__all__ = ["Call", "Serving", "check_model_name", "load_serving", "read_template"]

log = logging.getLogger("kvrelay.node")

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)
_TPOT_RANGE_MS = (0.1, 1e9)


@dataclass(frozen=True, slots=True)
class Call:
    chat: bool
    body: bytes
    id: str
    trace: Mapping[str, str] = field(default_factory=dict)

    @property
    def response_id(self) -> str:
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"


class Serving:
    """A request builder of a ready node. Call `parse`, `token_ids` and `requests` in this order."""

    def __init__(
        self,
        role: Role,
        model_name: str,
        chat_template: str | None,
        tokenizer: Tokenizer,
        info: EngineReady,
        *,
        tool_format: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        trusts_request_templates: bool = False,
        defaults: SamplingDefaults = PLAIN_SAMPLING,
    ) -> None:
        self.defaults = defaults
        self.role, self.model_name = role, model_name
        self._role_changed = False
        self.serve(info)
        self._tokenizer = tokenizer
        self._prompts = Prompts(
            tokenizer,
            info.max_model_len,
            chat_template=chat_template,
            trusts_request_templates=trusts_request_templates,
        )
        self._tool_format, self._reasoning = tool_format, reasoning

    def serve(self, info: EngineReady) -> None:
        self.info = info
        self.adapters = {adapter.name: adapter for adapter in info.adapters}
        """Names that clients may use beside the model."""

    def set_role(self, role: Role) -> None:
        self.role, self._role_changed = role, True

    def parse(self, call: Call) -> AnyRequest:
        """Return the request of a call, its prompts unchecked. Raises RequestError, Draining."""
        request = decode_chat(call.body) if call.chat else decode_completion(call.body)
        self._check_model(request.model)
        params = request.kv_transfer_params or KvTransferParams()
        self._check_role(params)
        # A third-party proxy's prefill request with several prompts holds nothing: its decode
        # request comes without a ticket, and is served whole.
        if params.do_remote_prefill and _has_several_prompts(request):
            raise RequestError("a hand-over has one prompt; send one for each", param="prompt")
        return request

    def token_ids(self, request: AnyRequest, *, fits: bool = True) -> list[list[int]]:
        """Return each prompt's token ids; with `fits` each must fit. Raises RequestError."""
        prompt = self.handed_over_prompt(request)
        return [prompt] if prompt is not None else self._prompts.token_ids(request, fits=fits)

    def handed_over_prompt(self, request: AnyRequest) -> list[int] | None:
        if request.kv_transfer_params is None or _has_several_prompts(request):
            return None
        return request.kv_transfer_params.prompt()

    def requests(
        self, call: Call, request: AnyRequest, prompts: list[list[int]]
    ) -> list[NodeRequest]:
        params = request.kv_transfer_params or KvTransferParams()
        if not isinstance(request, CompletionRequest):
            return [self._request(call, request, params, prompts[0])]
        given, created = prompts_of(request), int(time.time())
        found = []
        for at, prompt in enumerate(prompts):
            one = replace(request, prompt=given[at])
            if len(given) > 1:
                first = at * (request.n or 1)
                params = KvTransferParams(created=created, part=True, first_index=first)
            found.append(self._request(call, one, params, prompt))
        return found

    def _request(
        self,
        call: Call,
        request: AnyRequest,
        params: KvTransferParams,
        prompt: list[int],
    ) -> NodeRequest:
        defaults = params.sampling_defaults or self.defaults
        params = replace(params, sampling_defaults=defaults)
        # Before looking at each of a million tokens.
        limit = token_limit(request, len(prompt), self.info.max_model_len, defaults)
        generated = [token for each in params.so_far(MAX_CHOICES) for token in each.generated]
        self._check_tokens([*prompt, *generated])
        form = message_form(
            request,
            self._tokenizer,
            prompt,
            tool_format=self._tool_format,
            reasoning=self._reasoning,
        )
        sampling = sampling_params(
            request,
            bad_words=bad_word_ids(
                request.bad_words, lambda word: self._tokenizer.encode(word, False)
            ),
            limit=limit,
            vocab_size=self.info.vocab_size,
            defaults=defaults,
            # 53 bits: a proxy may read numbers as floats.
            default_seed=params.seed if params.seed is not None else random.getrandbits(53),
        )
        sampling = replace(sampling, constraint=form.guided(sampling.constraint))
        writer = AnswerWriter(
            request,
            self._tokenizer,
            sampling,
            response_id=call.response_id,
            created=params.created if params.created is not None else int(time.time()),
            model=request.model or self.model_name,
            prompt_tokens=len(prompt),
            cached_tokens=params.cached_tokens,
            so_far=params.so_far(request.n or 1),
            part=params.part,
            first_index=params.first_index,
            beginning=self._prompts.beginning(request, prompt),
            message_form=form,
        )
        submit = self._submit(call, request, prompt, sampling, params)
        if params.do_remote_prefill:
            return DecodeRequest(submit, params, writer, self.info)
        if params.do_remote_decode and limit > 1:
            return PrefillRequest(submit, params, writer)
        choices: dict[int, list[int]] = {choice: [] for choice in range(len(writer.choices))}
        return NodeRequest(fork_submits(submit, choices), writer)

    def _submit(
        self,
        call: Call,
        request: AnyRequest,
        prompt: list[int],
        sampling: SamplingParams,
        params: KvTransferParams,
    ) -> Submit:
        known = len(prompt) + len(params.generated)
        low, high = _TPOT_RANGE_MS
        return Submit(
            # Our own id: a retry must not meet its first try's leftovers.
            f"{call.id}-{uuid.uuid4().hex[:8]}",
            prompt,
            sampling,
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
            adapter="" if request.model == self.model_name else request.model or "",
            at=time.monotonic(),
            tpot_ms=min(max(low, params.tpot_ms), high) if params.tpot_ms else 0.0,
            expected_output=min(max(0, params.expected_output), self.info.max_model_len),
            spill_tokens=max(1, known - max(0, params.cached_tokens)) if params.spill else 0,
            sources=params.sources,
            pin=replace(params.pin, seconds=request.pin_s),
        )

    def parse_tokenize(self, body: bytes) -> tuple[TokenizeRequest, AnyRequest]:
        """Return the body of POST /tokenize, and the request that it means. Raises RequestError."""
        asked = read_json(body, _tokenize)
        self._check_model(asked.model, needed=False)
        request = decode_chat(body) if asked.is_chat else decode_completion(body)
        if isinstance(request, CompletionRequest) and (count := len(prompts_of(request))) != 1:
            raise RequestError(
                f"prompt holds {count} prompts; send one request for each", param="prompt"
            )
        return asked, request

    def tokenize_response(self, asked: TokenizeRequest, tokens: list[int]) -> TokenizeResponse:
        texts = None
        if asked.return_token_strs:
            texts = [self._tokenizer.token_text(token) for token in tokens]
        return TokenizeResponse(len(tokens), self.info.max_model_len, tokens, texts)

    def detokenize(self, body: bytes) -> dict[str, str]:
        """Return the answer to POST /detokenize. Raises RequestError."""
        asked = read_json(body, _detokenize)
        self._check_model(asked.model, needed=False)
        if len(asked.tokens) > self.info.max_model_len:
            raise RequestError(
                f"tokens holds {len(asked.tokens)} token ids; the limit is this model's context, "
                f"{self.info.max_model_len}",
                param="tokens",
            )
        self._check_tokens(asked.tokens, "tokens")
        return {"prompt": self._tokenizer.decode(asked.tokens, skip_special_tokens=False)}

    def cards(self, created: int) -> list[ModelCard]:
        base = ModelCard.create(self.model_name, created, self.info.max_model_len)
        return [base, *(base.named(name, parent=base.id) for name in self.adapters)]

    def check_served(self, name: str) -> None:
        if name not in (self.model_name, *self.adapters):
            served = ", ".join(map(repr, (self.model_name, *self.adapters)))
            raise NotFound(
                f"model {name!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )

    def _check_model(self, name: str | None, *, needed: bool = True) -> None:
        if name is not None:
            self.check_served(name)
        elif needed:
            raise RequestError(
                f"model is missing; {self.model_name!r} is served here", param="model"
            )

    def _check_role(self, params: KvTransferParams) -> None:
        if params.do_remote_decode and params.do_remote_prefill:
            raise RequestError(
                "do_remote_decode and do_remote_prefill exclude each other; a request is for a "
                "prefill node or for a decode node",
                param="kv_transfer_params",
            )
        refused = {Role.DECODE: params.do_remote_decode, Role.PREFILL: params.do_remote_prefill}
        if refused.get(self.role):
            other = "prefill" if params.do_remote_decode else "decode"
            why = f"this node's role is {self.role}; send the {other} request to a {other} node"
            if self._role_changed:  # the sender does not know yet
                raise Draining(why)
            raise RequestError(why, param="kv_transfer_params")

    def _check_tokens(self, tokens: list[int], param: str = "prompt") -> None:
        for token in tokens:
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.info.vocab_size} tokens",
                    param=param,
                )


def _has_several_prompts(request: AnyRequest) -> bool:
    return isinstance(request, CompletionRequest) and len(prompts_of(request)) != 1


async def load_serving(config: NodeConfig, engine: EngineClient, sandbox: Sandbox) -> Serving:
    """Load all that a node needs beside its engine. Raises ConfigError, EngineDead."""
    if config.tool_parser_plugin:
        await asyncio.to_thread(load_plugin, config.tool_parser_plugin)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.engine.model)
    template = await asyncio.to_thread(read_template, config.chat_template)
    tools = tool_format(
        config.tool_call_parser, template or tokenizer.tool_template, tokenizer.model_type
    )
    reasoning = reasoning_format(
        config.reasoning_parser, template or tokenizer.chat_template, tokenizer.model_type
    )
    names = [row[0] if row else "none" for row in (tools, reasoning)]
    log.info("tool calls are read as %s writes them, reasoning as %s", *names)
    info = await engine.ready(config.start_deadline_s)
    sandbox.open(
        Setup(
            config.engine.model,
            template,
            config.trust_request_chat_template,
            info.max_model_len,
            info.vocab_size,
            list(info.eos_token_ids),
        )
    )
    model_name = config.served_model_name or info.model_name
    check_model_name(model_name, config.engine)
    return Serving(
        config.role,
        model_name,
        template,
        tokenizer,
        info,
        tool_format=tools[1] if tools else None,
        reasoning=reasoning[1] if reasoning else None,
        trusts_request_templates=config.trust_request_chat_template,
        defaults=sampling_defaults(config.engine, info.model_name),
    )


def check_model_name(name: str, engine: EngineConfig) -> None:
    if name in [adapter for adapter, _ in engine.adapters]:
        raise ConfigError(
            f"an adapter is named {name!r}, as the model itself is; give it another name in "
            f"lora_modules"
        )


def read_template(path: str) -> str | None:
    if not path:
        return None
    try:
        template = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"the chat template {path} cannot be read: {why}") from why
    check_template(template)
    return template
