"""The hand-over contract: what a prefill node gives away and what a decode node must know.

On the wire it is one flat JSON object, `KvTransferParams`, under vLLM's names, for third-party
proxies. A lease keeps a ticket's blocks alive on the prefill node; a generation is a fresh id of
each process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvrelay.wire.errors import RequestError
from kvrelay.wire.kv_events import Pin
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.sampling import SamplingDefaults
from kvrelay.wire.versions import Versions

__all__ = [
    "KV_GROUPS",
    "MAX_POOL_BLOCKS",
    "SPILL_REFUSED",
    "ChoiceSoFar",
    "Fingerprint",
    "KvFacts",
    "KvTransferParams",
    "Source",
    "Ticket",
    "packed",
]

SPILL_REFUSED = "spill_refused"
"""Code of a 429 to a leg with `spill` whose prompt would delay others."""

KV_GROUPS = 1
"""KV groups of a model, each with a list of blocks in a ticket."""
MAX_POOL_BLOCKS = 1 << 31
"""No pool has so many; their numbers are below it."""
_ID_BYTES = 4


def packed(token_ids: Iterable[int]) -> bytes:
    """Return token ids as 32 bits each, little-endian."""
    return array("i", token_ids).tobytes()


class ChoiceSoFar(Struct, kw_only=True, omit_defaults=True):
    """A choice that another node continues.

    `generated` are its output tokens, with `logprobs` if the client asks. `sent_text` counts the
    characters that the client has; with None the decode node emits the first token. `finish` is why
    the choice has ended.
    """

    generated: list[int] = []
    logprobs: list[TokenLogprobs] = []
    sent_text: int | None = None
    finish: Finish | None = None


class Ticket(Struct, frozen=True, kw_only=True):
    """A claim on KV of another process: its lease and blocks, signed by kv_transfer/tickets.py."""

    remote_engine_id: str = ""
    remote_block_ids: list[list[int]] = []
    """A list for each KV group, all equally long."""
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

    @property
    def blocks(self) -> list[int]:
        """Return the blocks of all groups, in the order in which they are computed."""
        return [block for row in zip(*self.remote_block_ids, strict=True) for block in row]

    def blocks_each(self) -> int:
        """Return how many blocks each KV group has; 0 if this cannot be what a source holds."""
        groups = self.remote_block_ids
        lengths = {*map(len, groups)}
        good = len(groups) == KV_GROUPS and len(lengths) == 1
        good = good and all(0 < block < MAX_POOL_BLOCKS for group in groups for block in group)
        return lengths.pop() if good else 0


class Source(Struct, frozen=True):
    """A node that likely has KV of a prompt's first tokens in its prefix cache."""

    host: str
    port: Annotated[int, Meta(ge=0, lt=1 << 16)]
    generation: str
    tokens: Annotated[int, Meta(ge=0, lt=1 << 48)]
    """0: what lies below the reader's own pool, of which its engine knows."""
    seal: str = ""
    """KvFacts.seal of that node."""


class KvTransferParams(Struct, kw_only=True, omit_defaults=True):
    """A router's wishes for a request of a hand-over, a ticket, and the answer so far.

    The answer is what the next node would otherwise compute again. Without a default: unknown.
    """

    do_remote_decode: bool = False
    """The role of a prefill node."""
    do_remote_prefill: bool = False
    """The role of a decode node."""
    client_max_tokens: int = 0
    """To a prefill node: the client's limit."""
    pipelined: bool = False
    """To a prefill node: send a TICKET frame before the prompt is computed."""
    tpot_ms: float = 0.0
    """To a decode node: the client's time per token."""
    expected_output: int = 0
    """To a decode node: likely tokens of the answer."""
    spill: bool = False
    """To a decode node: a prefill node could compute the prompt."""
    sources: Annotated[list[Source], Meta(max_length=64)] = []
    """To a node that computes the prompt: where it may get a part of the KV instead."""

    # The fields of Ticket.
    remote_engine_id: str | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int = 1
    generation: str | None = None
    lease_epoch: int = 0
    num_tokens: int = 0
    growing: bool = False
    expires_at: int | None = None
    signature: str | None = None
    adapter: str = ""
    adapter_digest: str = ""

    created: int | None = None
    """Unix second, equal in all chunks."""
    part: bool = False
    """One prompt of several, whose ends are joined elsewhere."""
    first_index: int = 0
    seed: int | None = None
    prompt_token_ids: list[int] | None = None
    packed_prompt: bytes | None = None
    """`prompt_token_ids`, 4 bytes each: routers do not read them."""
    generated: list[int] = []
    """Tokens of the first choice; the next three fields belong to that choice, too."""
    generated_logprobs: list[TokenLogprobs] = []
    sent_text: int | None = None
    finish: Finish | None = None
    other_choices: list[ChoiceSoFar] = []
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    """From the second token on, if the client asks."""
    sampling_defaults: SamplingDefaults | None = None
    """Defaults by which the first token was drawn."""
    pin: Pin = Pin()
    """Whose budget pays for KV that the request wishes to keep."""

    def ticket(self) -> Ticket | None:
        """Return the claim on KV elsewhere, if there is one."""
        if self.remote_request_id is None and self.remote_engine_id is None:
            return None
        values = {name: getattr(self, name) for name in Ticket.__struct_fields__}
        return Ticket(**{name: value for name, value in values.items() if value is not None})

    def with_ticket(self, ticket: Ticket | None) -> KvTransferParams:
        claim = KvTransferParams() if ticket is None else ticket
        values = {name: getattr(claim, name) for name in Ticket.__struct_fields__}
        return replace(self, **values)

    @property
    def choices(self) -> list[ChoiceSoFar]:
        """Return the choices so far, the first one always."""
        first = ChoiceSoFar(
            generated=self.generated,
            logprobs=self.generated_logprobs,
            sent_text=self.sent_text,
            finish=self.finish,
        )
        return [first, *self.other_choices]

    def with_choices(self, choices: list[ChoiceSoFar]) -> KvTransferParams:
        first, *others = choices
        return replace(
            self,
            generated=first.generated,
            generated_logprobs=first.logprobs,
            sent_text=first.sent_text,
            finish=first.finish,
            other_choices=others,
        )

    def so_far(self, count: int) -> list[ChoiceSoFar]:
        """Return the first `count` choices, empty if they have not begun."""
        known = self.choices[:count]
        return known + [ChoiceSoFar() for _ in range(count - len(known))]

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
        return array("i", self.packed_prompt).tolist()


_MAY_DIFFER = ("tp_size", "protocol", "protocol_newest")


class Fingerprint(Struct, frozen=True):
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


class KvFacts(Struct, frozen=True, cache_hash=True):
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
    port: int = 0
    """Port of its control channel; 0 of the previous release, which leases no cached KV."""
    generation: str = ""
    seal: str = ""
    """The cluster secret's mark on address, port and generation; empty without a secret."""
    cache: Source | None = None
    """The process that leases what lies below the pool."""
    compares: bool = False
    """The node compares checksums, without which it may not read what lies below pools."""
