"""From a request body to a leg: decode, tokenize once, check, and choose what the role does with it.

Pure apart from drawing a seed for a request that has none. Knows no HTTP and no engine.
"""

from __future__ import annotations

import functools
import random
import time
import uuid
from dataclasses import dataclass

import msgspec

from decode_node.leg import DecodeLeg
from node.compiling import grammars_for
from openai_api.body import MAX_CHOICES, choice_count, decode_chat, decode_completion, sampling_params, token_limit
from openai_api.chat_template import render
from openai_api.leg import Leg, with_forks
from openai_api.message_stream import message_form
from openai_api.structured import bad_word_ids
from openai_api.tokenizer import Tokenizer
from openai_api.tool_choice import asked_tools
from openai_api.types import ChatRequest, CompletionRequest
from openai_api.writer import AnswerWriter
from paged_engine.grammar import Grammars
from prefill_node.leg import PrefillLeg
from wire.config import Role
from wire.engine_messages import EngineReady, Submit
from wire.errors import NotFound, RequestError
from wire.sampling import Constraint
from wire.transfer import KvTransferParams

__all__ = ["Call", "Serving"]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: its route, body, and the id that its answer carries."""

    chat: bool
    body: bytes
    id: str

    @property
    def response_id(self) -> str:
        """The `id` of the answer."""
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"


class Serving:
    """Made once the engine is ready; `leg` is called for every request."""

    def __init__(
        self,
        role: Role,
        model_name: str,
        chat_template: str | None,
        tokenizer: Tokenizer,
        info: EngineReady,
        *,
        tool_call_parser: str = "",
        reasoning_parser: str = "",
    ) -> None:
        """The parsers are named as in NodeConfig."""
        self.role, self.model_name, self.info = role, model_name, info
        self._tokenizer = tokenizer
        self._chat_template = chat_template or tokenizer.chat_template
        self._tool_template = chat_template or tokenizer.tool_template
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser

    def leg(self, call: Call) -> tuple[Leg, ChatRequest | CompletionRequest]:
        """What to submit and how to answer. Raises RequestError; nothing is taken before it returns."""
        request = decode_chat(call.body) if call.chat else decode_completion(call.body)
        if request.model is None:
            raise RequestError(f"model is missing; {self.model_name!r} is served here", param="model")
        if request.model != self.model_name:
            raise NotFound(
                f"model {request.model!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )
        transfer = request.kv_transfer_params or KvTransferParams()
        self._check_role(transfer)
        prompt = transfer.prompt_token_ids or self._tokenize(request)
        self._check_tokens([*prompt, *(token for each in transfer.so_far(MAX_CHOICES) for token in each.generated)])
        form = message_form(
            request,
            self._tokenizer,
            prompt,
            tool_call_parser=self._tool_call_parser,
            reasoning_parser=self._reasoning_parser,
        )
        sampling = sampling_params(
            request,
            bad_words=bad_word_ids(request.bad_words, lambda word: self._tokenizer.encode(word, False)),
            vocab_size=self.info.vocab_size,
            prompt_tokens=len(prompt),
            max_model_len=self.info.max_model_len,
            default_seed=transfer.seed if transfer.seed is not None else random.getrandbits(63),
        )
        sampling = msgspec.structs.replace(sampling, constraint=form.guided(sampling.constraint))
        writer = AnswerWriter(
            request,
            self._tokenizer,
            sampling,
            response_id=call.response_id,
            created=transfer.created if transfer.created is not None else int(time.time()),
            model=self.model_name,
            prompt_tokens=len(prompt),
            cached_tokens=transfer.cached_tokens,
            so_far=transfer.so_far(choice_count(request)),
            message=lambda choice: form.parser(call.response_id, choice),
        )
        # An id of our own: a retried call must not meet what its first try left behind.
        engine_id = f"{call.id}-{uuid.uuid4().hex[:8]}"
        submit = Submit(engine_id, prompt, sampling, cache_salt=request.cache_salt)
        if transfer.do_remote_prefill:
            return DecodeLeg(submit, transfer, writer, self.info), request
        if transfer.do_remote_decode and token_limit(request, len(prompt), self.info.max_model_len) > 1:
            return PrefillLeg(submit, transfer, writer), request
        return Leg(with_forks(submit, {choice: [] for choice in range(len(writer.choices))}), writer), request

    def knows(self, constraint: Constraint) -> bool:
        """Whether this constraint is known to be one that can be followed."""
        return "_grammars" in self.__dict__ and self._grammars.known(constraint)

    def compile(self, constraint: Constraint) -> None:
        """Try to follow a constraint; takes some milliseconds and more, so not on the event loop.

        Raises RequestError with the grammar library's reason."""
        self._grammars.matcher(constraint)

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return grammars_for(self._tokenizer, self.info.vocab_size, self.info.eos_token_ids)

    def _check_role(self, transfer: KvTransferParams) -> None:
        if transfer.do_remote_decode and transfer.do_remote_prefill:
            raise RequestError(
                "do_remote_decode and do_remote_prefill exclude each other; a leg is one or the other",
                param="kv_transfer_params",
            )
        refused = {Role.DECODE: transfer.do_remote_decode, Role.PREFILL: transfer.do_remote_prefill}
        if refused.get(self.role):
            leg = "prefill" if transfer.do_remote_decode else "decode"
            raise RequestError(
                f"this node's role is {self.role}; send the {leg} leg to a {leg} node", param="kv_transfer_params"
            )

    def _tokenize(self, request: ChatRequest | CompletionRequest) -> list[int]:
        if isinstance(request, CompletionRequest):
            if isinstance(request.prompt, str):
                return self._tokenizer.encode(request.prompt, request.add_special_tokens is not False)
            return [token for token in request.prompt if isinstance(token, int)]
        tools = asked_tools(request).tools
        effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
        text = render(
            self._tool_template if tools else self._chat_template,
            request.messages,
            bos_token=self._tokenizer.bos_token,
            eos_token=self._tokenizer.eos_token,
            tools=list(tools) or None,
            add_generation_prompt=request.add_generation_prompt is not False,
            **effort | (request.chat_template_kwargs or {}),
        )
        # The template has written the special tokens already.
        return self._tokenizer.encode(text, bool(request.add_special_tokens))

    def _check_tokens(self, prompt: list[int]) -> None:
        for token in prompt:
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.info.vocab_size} tokens", param="prompt"
                )
