"""From a request body to a leg: decode, tokenize once, check, and choose what the role does with it.

Pure apart from drawing a seed for a request that has none. Knows no HTTP and no engine.
"""

from __future__ import annotations

import functools
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from decode_node.leg import DecodeLeg
from node.compiling import grammars_for
from openai_api.body import (
    MAX_CHOICES,
    choice_count,
    decode_chat,
    decode_completion,
    prompts_of,
    sampling_params,
    token_limit,
)
from openai_api.json_body import reading
from openai_api.leg import Leg, with_forks
from openai_api.message_stream import message_form
from openai_api.prompt import Prompts
from openai_api.structured import bad_word_ids
from openai_api.tokenize_types import Detokenized, ToDetokenize, Tokenized, ToTokenize
from openai_api.tokenizer import Tokenizer
from openai_api.types import ChatRequest, CompletionRequest, ModelCard
from openai_api.writer import AnswerWriter
from paged_engine.grammar import Grammars
from prefill_node.leg import PrefillLeg
from wire.config import Role
from wire.engine_messages import EngineReady, Submit
from wire.errors import Draining, NotFound, RequestError
from wire.sampling import Constraint
from wire.transfer import KvTransferParams

__all__ = ["INLINE_BODY_BYTES", "Call", "Serving"]

# Tokenizing takes about 1 us per byte: a longer prompt would stall the other streams of this node for that time.
INLINE_BODY_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: its route, body, the id that its answer carries, and W3C's headers of its trace."""

    chat: bool
    body: bytes
    id: str
    trace: Mapping[str, str] = field(default_factory=dict)

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
        trusts_request_templates: bool = False,
    ) -> None:
        """The parsers are named as in NodeConfig."""
        self.role, self.model_name, self.info = role, model_name, info
        self._flipped = False
        self.adapters = {adapter.name: adapter for adapter in info.adapters}
        """What clients may name beside the model; changed as adapters are loaded and unloaded."""
        self._tokenizer = tokenizer
        self._prompts = Prompts(
            tokenizer,
            info.max_model_len,
            chat_template=chat_template or tokenizer.chat_template,
            tool_template=chat_template or tokenizer.tool_template,
            trusts_request_templates=trusts_request_templates,
        )
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser

    def flipped(self, role: Role) -> None:
        """The node has this role from now on."""
        self.role, self._flipped = role, True

    def leg(self, call: Call) -> tuple[Leg, ChatRequest | CompletionRequest]:
        """Of a call with one prompt; see `legs`."""
        legs, request = self.legs(call)
        return legs[0], request

    def legs(self, call: Call) -> tuple[list[Leg], ChatRequest | CompletionRequest]:
        """For each prompt what to submit and how to answer. Raises RequestError, and Draining for a leg of the role
        that the node had before; nothing is taken before it returns."""
        request = decode_chat(call.body) if call.chat else decode_completion(call.body)
        self._check_model(request.model)
        transfer = request.kv_transfer_params or KvTransferParams()
        self._check_role(transfer)
        prompts = prompts_of(request) if isinstance(request, CompletionRequest) else []
        if not isinstance(request, CompletionRequest) or len(prompts) == 1:
            only = msgspec.structs.replace(request, prompt=prompts[0]) if prompts else request
            return [self._leg(call, only, transfer)], request
        # A hand-over has one prompt. Of a prefill leg with several, which a third-party proxy sends, nothing is held:
        # the decode leg comes without a hand-over, and is served whole.
        if transfer.do_remote_prefill:
            raise RequestError("a hand-over has one prompt; send one for each", param="prompt")
        created = int(time.time())
        return [
            self._leg(
                call,
                msgspec.structs.replace(request, prompt=prompt),
                KvTransferParams(created=created, part=True, first_index=at * (request.n or 1)),
            )
            for at, prompt in enumerate(prompts)
        ], request

    def _leg(self, call: Call, request: ChatRequest | CompletionRequest, transfer: KvTransferParams) -> Leg:
        prompt = transfer.prompt() or self._prompts.token_ids(request)
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
            # 53 bits: a proxy on its way to the decode node may read numbers as floats.
            default_seed=transfer.seed if transfer.seed is not None else random.getrandbits(53),
        )
        sampling = msgspec.structs.replace(sampling, constraint=form.guided(sampling.constraint))
        writer = AnswerWriter(
            request,
            self._tokenizer,
            sampling,
            response_id=call.response_id,
            created=transfer.created if transfer.created is not None else int(time.time()),
            model=request.model or self.model_name,
            prompt_tokens=len(prompt),
            cached_tokens=transfer.cached_tokens,
            so_far=transfer.so_far(choice_count(request)),
            part=transfer.part,
            first_index=transfer.first_index,
            beginning=self._prompts.beginning(request, prompt),
            message=lambda choice: form.parser(call.response_id, choice),
        )
        # An id of our own: a retried call must not meet what its first try left behind.
        engine_id = f"{call.id}-{uuid.uuid4().hex[:8]}"
        submit = Submit(
            engine_id,
            prompt,
            sampling,
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
            adapter="" if request.model == self.model_name else request.model or "",
            at=time.monotonic(),
        )
        if transfer.do_remote_prefill:
            return DecodeLeg(submit, transfer, writer, self.info)
        if transfer.do_remote_decode and token_limit(request, len(prompt), self.info.max_model_len) > 1:
            return PrefillLeg(submit, transfer, writer)
        return Leg(with_forks(submit, {choice: [] for choice in range(len(writer.choices))}), writer)

    def tokenized(self, body: bytes) -> Tokenized:
        """POST /tokenize: the prompt that a completion or chat with this body would have. Raises RequestError."""
        with reading():
            asked = msgspec.json.decode(body, type=ToTokenize)
        self._check_model(asked.model, needed=False)
        request = decode_chat(body) if asked.is_chat else decode_completion(body)
        if isinstance(request, CompletionRequest):
            prompts = prompts_of(request)
            if len(prompts) != 1:
                raise RequestError(f"prompt holds {len(prompts)} prompts; send one request for each", param="prompt")
            request = msgspec.structs.replace(request, prompt=prompts[0])
        tokens = self._prompts.token_ids(request)
        texts = [self._tokenizer.token_text(token) for token in tokens] if asked.return_token_strs else None
        return Tokenized(len(tokens), self.info.max_model_len, tokens, texts)

    def detokenized(self, body: bytes) -> Detokenized:
        """POST /detokenize. Raises RequestError."""
        with reading():
            asked = msgspec.json.decode(body, type=ToDetokenize)
        self._check_model(asked.model, needed=False)
        self._check_tokens(asked.tokens, "tokens")
        return Detokenized(self._tokenizer.decode(asked.tokens, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """How log-probabilities name a token."""
        return self._tokenizer.token_text(token_id)

    def cards(self, created: int) -> list[ModelCard]:
        """The model first, then its adapters."""
        base = ModelCard(id=self.model_name, created=created, max_model_len=self.info.max_model_len)
        return [base, *(msgspec.structs.replace(base, id=name, parent=base.id) for name in self.adapters)]

    def check_served(self, name: str) -> None:
        """Raise NotFound, naming what is served, unless `name` is the model's or an adapter's."""
        if name not in (self.model_name, *self.adapters):
            served = ", ".join(map(repr, (self.model_name, *self.adapters)))
            raise NotFound(
                f"model {name!r} is not served here; served: {served}", param="model", code="model_not_found"
            )

    def _check_model(self, name: str | None, *, needed: bool = True) -> None:
        if name is not None:
            self.check_served(name)
        elif needed:
            raise RequestError(f"model is missing; {self.model_name!r} is served here", param="model")

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
            why = f"this node's role is {self.role}; send the {leg} leg to a {leg} node"
            if self._flipped:  # who has sent it does not know yet: nobody's fault
                raise Draining(why)
            raise RequestError(why, param="kv_transfer_params")

    def _check_tokens(self, prompt: list[int], param: str = "prompt") -> None:
        for token in prompt:
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.info.vocab_size} tokens", param=param
                )
