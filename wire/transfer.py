"""The hand-over contract: what a prefill node gives away and what a decode node must know.

A router and its nodes speak of a `HandoverRequest`, a `Ticket` and an `AnswerState`. On the wire
they are one flat JSON object, `KvTransferParams`, under vLLM's names, for third-party proxies. A
lease keeps a ticket's blocks alive on the prefill node; a generation is a fresh id of each process.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from kvrelay.wire.errors import RequestError
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.sampling import SamplingDefaults
from kvrelay.wire.versions import Versions

__all__ = [
    "SPILL_REFUSED",
    "AnswerState",
    "ChoiceSoFar",
    "Fingerprint",
    "HandoverRequest",
    "KvFacts",
    "KvTransferParams",
    "Ticket",
    "packed",
]

SPILL_REFUSED = "spill_refused"
"""Code of a 429 to a leg with `spill` whose prompt would delay others."""

_ID_BYTES = 4


def packed(token_ids: Iterable[int]) -> bytes:
    """Return token ids as 32 bits each, little-endian."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


class ChoiceSoFar(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A choice that another node continues.

    `generated` are its output tokens, with `logprobs` if the client asks. `sent_text` counts the
    characters that the client has; with None the decode node emits the first token. `finish` is why
    the choice has ended.
    """

    generated: list[int] = []
    logprobs: list[TokenLogprobs] = []
    sent_text: int | None = None
    finish: Finish | None = None


class HandoverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A router's wishes for one of the two requests of a hand-over.

    One of the two booleans is the role.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    client_max_tokens: int = 0
    """To a prefill node: the client's limit. 0: unknown."""
    pipelined: bool = False
    """To a prefill node: send a TICKET frame before the prompt is computed."""
    tpot_ms: float = 0.0
    """To a decode node: the client's time per token. 0: unknown."""
    expected_output: int = 0
    """To a decode node: likely tokens of the answer. 0: unknown."""
    spill: bool = False
    """To a decode node: a prefill node could compute the prompt."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A claim on KV of another process: its lease and blocks, signed by kv_transfer/tickets.py."""

    remote_engine_id: str = ""
    remote_block_ids: list[list[int]] = []
    """A list for the one KV group."""
    remote_request_id: str = ""
    remote_host: str = ""
    remote_port: int = 0
    tp_size: int = 1
    generation: str = ""
    lease_epoch: int = 0
    num_tokens: int = 0
    growing: bool = False
    """The prompt is still being computed."""
    expires_at: int | None = None
    """Unix second; None without a cluster secret, as `signature` is."""
    signature: str | None = None
    adapter: str = ""
    """LoRA adapter that made the KV; empty for the model alone."""
    adapter_digest: str = ""


class AnswerState(msgspec.Struct, frozen=True, kw_only=True):
    """An answer so far: what the next node would otherwise compute again."""

    created: int | None = None
    """Unix second, equal in all chunks."""
    part: bool = False
    """One prompt of several, whose ends are joined elsewhere."""
    first_index: int = 0
    seed: int | None = None
    prompt_token_ids: list[int] | None = None
    packed_prompt: bytes | None = None
    """The same, 4 bytes each: routers do not read them."""
    choices: list[ChoiceSoFar] = []
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    """From the second token on, if the client asks."""
    sampling_defaults: SamplingDefaults | None = None
    """Defaults by which the first token was drawn."""

    @property
    def prompt_tokens(self) -> int | None:
        if self.packed_prompt is not None:
            return len(self.packed_prompt) // _ID_BYTES
        return None if self.prompt_token_ids is None else len(self.prompt_token_ids)

    def prompt(self) -> list[int] | None:
        """Return the prompt's token ids, if known. Raises RequestError if they are malformed."""
        if self.packed_prompt is None:
            return self.prompt_token_ids
        if len(self.packed_prompt) % _ID_BYTES:
            raise RequestError(
                f"packed_prompt has {len(self.packed_prompt)} bytes, and each token has "
                f"{_ID_BYTES}; pass on what the prefill node answered",
                param="kv_transfer_params",
            )
        ids = array("i", self.packed_prompt)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tolist()

    def so_far(self, choices: int) -> list[ChoiceSoFar]:
        """Return the first `choices` choices, empty if they have not begun."""
        known = self.choices[:choices]
        return known + [ChoiceSoFar() for _ in range(choices - len(known))]


class KvTransferParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request, a ticket and an answer's state as one JSON object."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int = 1

    client_max_tokens: int = 0
    pipelined: bool = False
    tpot_ms: float = 0.0
    expected_output: int = 0
    spill: bool = False

    generation: str | None = None
    lease_epoch: int = 0
    num_tokens: int = 0
    growing: bool = False
    expires_at: int | None = None
    signature: str | None = None
    adapter: str = ""
    adapter_digest: str = ""

    created: int | None = None
    part: bool = False
    first_index: int = 0
    seed: int | None = None
    prompt_token_ids: list[int] | None = None
    packed_prompt: bytes | None = None
    generated: list[int] = []
    generated_logprobs: list[TokenLogprobs] = []
    sent_text: int | None = None
    finish: Finish | None = None
    other_choices: list[ChoiceSoFar] = []
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    sampling_defaults: SamplingDefaults | None = None

    @classmethod
    def of(
        cls, request: HandoverRequest, answer: AnswerState, ticket: Ticket | None = None
    ) -> KvTransferParams:
        values = msgspec.structs.asdict(request) | msgspec.structs.asdict(answer)
        if ticket is not None:
            values |= msgspec.structs.asdict(ticket)
        first, *others = values.pop("choices") or [ChoiceSoFar()]
        return cls(
            generated=first.generated,
            generated_logprobs=first.logprobs,
            sent_text=first.sent_text,
            finish=first.finish,
            other_choices=others,
            **values,
        )

    def request(self) -> HandoverRequest:
        return HandoverRequest(**self._given(HandoverRequest))

    def ticket(self) -> Ticket | None:
        """Return the claim on KV elsewhere, if there is one."""
        if self.remote_request_id is None and self.remote_engine_id is None:
            return None
        return Ticket(**self._given(Ticket))

    def answer(self) -> AnswerState:
        """Return the answer's state; it always has a first choice."""
        first = ChoiceSoFar(
            generated=self.generated,
            logprobs=self.generated_logprobs,
            sent_text=self.sent_text,
            finish=self.finish,
        )
        return AnswerState(choices=[first, *self.other_choices], **self._given(AnswerState))

    def _given(self, kind: type[msgspec.Struct]) -> dict[str, Any]:
        values = {name: getattr(self, name, None) for name in kind.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}


_MAY_DIFFER = ("tp_size", "protocol", "protocol_newest")


class Fingerprint(msgspec.Struct, frozen=True):
    """A description of a node's KV, compared at the handshake.

    `tp_size` may differ, because `kv_heads` are those of all ranks; so may versions with a common
    one.
    """

    protocol: int
    """The oldest version that is spoken. Code of version 1 looks at nothing else, and wants its
    own.
    """
    model: str
    kv_dtype: str
    block_size: int = msgspec.field(name="block_tokens")
    kv_heads: int
    head_dim: int
    layers: int
    window: int
    tp_size: int
    rope: str = ""
    """Rotary frequencies that depend on a node's own limit."""
    protocol_newest: int = 0
    """The newest version that is spoken; 0 says nothing: then it is `protocol`."""

    @property
    def protocols(self) -> Versions:
        return Versions(self.protocol, max(self.protocol, self.protocol_newest))

    def difference(self, other: Fingerprint) -> str | None:
        """Return a clause with the first field that differs and both values."""
        if self.protocols.common(other.protocols) is None:
            return f"protocol is {self.protocols} here and {other.protocols} there"
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and name not in _MAY_DIFFER:
                return f"{name} is {mine!r} here and {theirs!r} there"
        return None


class KvFacts(msgspec.Struct, frozen=True, cache_hash=True):
    """A node's facts about its KV, by which a router pairs nodes."""

    fingerprint: Fingerprint
    planes: tuple[str, ...] = ()
    """Open data planes, the best first."""
    host: str = ""
    """Equal on all nodes of one host; empty if unknown."""
    address: str = ""
    """Address of its control channel."""
    lease_s: float = 0.0
    """Unrenewed KV is held so long."""
    computes_prompts: bool = True
    """The node computes a prompt whose KV does not come."""
