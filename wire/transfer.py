"""The hand-over contract: what a prefill node gives away and what a decode node must know.

A router and its nodes speak of a `HandoverRequest`, a `Ticket` and an `AnswerState`. On the wire
they are one flat JSON object, `KvTransferParams`, under the names that vLLM uses, so that a
third-party proxy can drive our nodes. A lease keeps a ticket's blocks alive on the prefill node; a
generation is a fresh id made at every process start.
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
"""The code of a 429 to a leg with `spill`: its prompt would delay others too much, and is to go the
other way.
"""

_ID_BYTES = 4


def packed(token_ids: Iterable[int]) -> bytes:
    """Return token ids as `packed_prompt` has them: 32 bits each, little-endian."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


class ChoiceSoFar(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A choice of an answer that another node goes on with.

    `generated` are its output tokens so far, with `logprobs` if the client asks for any.
    `sent_text` are the characters of their text that the client already has (None: nobody has sent
    the first token, the decode node emits it), and `finish` why the choice has ended, if the client
    knows.
    """

    generated: list[int] = []
    logprobs: list[TokenLogprobs] = []
    sent_text: int | None = None
    finish: Finish | None = None


class HandoverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A router's wishes for one of the two requests that make a hand-over.

    The role is always one of the two booleans, never guessed from `max_tokens == 1`.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    client_max_tokens: int = 0
    """To a prefill node: the client's own limit, in case token 1 ends the answer. 0: unknown."""
    pipelined: bool = False
    """To a prefill node: send a TICKET frame before the prompt is computed."""
    tpot_ms: float = 0.0
    """To a decode node: the time per token that the client wants. 0: unknown."""
    expected_output: int = 0
    """To a decode node: tokens that the answer is likely to have. 0: unknown."""
    spill: bool = False
    """To a decode node: a prefill node could compute the prompt, so this one may refuse."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A claim on finished KV: the process and the lease that hold it, and its blocks.

    `kvrelay.kv_transfer.tickets` signs it.
    """

    remote_engine_id: str = ""
    remote_block_ids: list[list[int]] = []
    """A list per KV group, and there is one group."""
    remote_request_id: str = ""
    remote_host: str = ""
    remote_port: int = 0
    tp_size: int = 1
    generation: str = ""
    lease_epoch: int = 0
    num_tokens: int = 0
    growing: bool = False
    """The prompt is still being computed; the source tells which blocks can be read."""
    expires_at: int | None = None
    """Unix second; None without a cluster secret, as `signature` (hexadecimal) is."""
    signature: str | None = None
    adapter: str = ""
    """LoRA adapter that made the KV; empty for the model alone."""
    adapter_digest: str = ""


class AnswerState(msgspec.Struct, frozen=True, kw_only=True):
    """An answer so far: all that the next node would otherwise compute again."""

    created: int | None = None
    """Unix second, made once by the router, so that all chunks of a stream agree."""
    part: bool = False
    """One prompt of several: usage and [DONE] of a stream are left to whoever joins the parts."""
    first_index: int = 0
    """Index of the first choice in the client's answer."""
    seed: int | None = None
    prompt_token_ids: list[int] | None = None
    packed_prompt: bytes | None = None
    """The same, 4 bytes each, as tickets have it: routers pass them on and read none."""
    choices: list[ChoiceSoFar] = []
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For the prompt's tokens from the second one on, if the client asks for any."""
    sampling_defaults: SamplingDefaults | None = None
    """Defaults by which the first token was drawn, so that the others are drawn by the same."""

    @property
    def prompt_tokens(self) -> int | None:
        """Number of prompt tokens, if the prompt is known."""
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
        """Return the first `choices` choices; those that have not begun are empty."""
        known = self.choices[:choices]
        return known + [ChoiceSoFar() for _ in range(choices - len(known))]


class KvTransferParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request, a ticket and an answer's state, flat: the JSON object `kv_transfer_params`.

    The fields are explained at the three values; the first of `AnswerState.choices` has four of its
    own. A third-party proxy copies all of them.
    """

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
        """Return the flat form of these values."""
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
        """Return what the router wants of this leg."""
        return HandoverRequest(**self._given(HandoverRequest))

    def ticket(self) -> Ticket | None:
        """Return the claim on KV elsewhere, or None without one."""
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
    """A description of a node's KV, compared at the handshake: refuse, never corrupt.

    `tp_size` may differ, because `kv_heads` are those of all ranks and a rank reads the heads that
    it holds; so may the versions of the protocol, as long as one is common.
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
    """What of the rotary frequencies depends on a node's own limit: keys turned by others would be
    nonsense.
    """
    protocol_newest: int = 0
    """The newest version that is spoken; 0 says nothing: then it is `protocol`."""

    @property
    def protocols(self) -> Versions:
        """Return all versions of the protocol that are spoken."""
        return Versions(self.protocol, max(self.protocol, self.protocol_newest))

    def difference(self, other: Fingerprint) -> str | None:
        """Return one clause that names the first field that differs, and both values; else None."""
        if self.protocols.common(other.protocols) is None:
            return f"protocol is {self.protocols} here and {other.protocols} there"
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and name not in _MAY_DIFFER:
                return f"{name} is {mine!r} here and {theirs!r} there"
        return None


class KvFacts(msgspec.Struct, frozen=True, cache_hash=True):
    """A node's facts about its KV, in its health report: a router pairs nodes by them."""

    fingerprint: Fingerprint
    planes: tuple[str, ...] = ()
    """Data planes that it has open, the best first."""
    host: str = ""
    """Equal on all nodes of one host; empty if that is not known."""
    address: str = ""
    """Where peers dial its control channel."""
    lease_s: float = 0.0
    """KV that nobody renews is held for so long."""
    computes_prompts: bool = True
    """Whether it may compute a prompt itself when the KV does not come (kv_load_failure_policy)."""
