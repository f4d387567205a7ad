"""The hand-over contract: what a prefill node gives away and what a decode node must know to take
it.

`KvTransferParams` is the JSON object `kv_transfer_params` of the field (vLLM's names first, ours
behind them), so that a third-party proxy can drive our nodes. A ticket is a claim on finished KV,
signed by its source (see `kvrelay.kv_transfer.tickets`); a lease keeps the ticket's blocks alive on the
prefill node; a generation is a fresh id made at every process start.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec

from kvrelay.wire.errors import RequestError
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.sampling import SamplingDefaults
from kvrelay.wire.versions import PACKS_PROMPTS, Versions

__all__ = ["SPILL_REFUSED", "ChoiceSoFar", "Fingerprint", "KvFacts", "KvTransferParams", "packed"]

SPILL_REFUSED = "spill_refused"
"""The code of a 429 to a leg with `spill`: its prompt would delay others too much, and is to go the
other way.
"""

_ID_BYTES = 4


def packed(token_ids: Iterable[int]) -> bytes:
    """Token ids as `packed_prompt` has them: 32 bits each, little-endian."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


class ChoiceSoFar(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One choice of an answer that another node goes on with.

    `generated` are its output tokens so far: after the prefill node the first one, after a
    fail-over all that the client may have seen; `logprobs` those of these tokens, if the client
    asks for any. `sent_text` are the characters of their text that the client already has (None:
    nobody has sent the first token, the decode node emits it), and `finish` why it has ended, if
    the client knows that it has.
    """

    generated: list[int] = []
    logprobs: list[TokenLogprobs] = []
    sent_text: int | None = None
    finish: Finish | None = None


class KvTransferParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Travels prefill node -> router -> decode node, as JSON.

    The role is always one of the two booleans, never guessed from `max_tokens == 1`. Block ids are
    a list per KV group. Fields from `generation` on are ours; a third-party proxy copies them
    without knowing them.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int = 1

    # To the prefill node: the client's own max_tokens, so that it knows when token 1 ends the
    # request (0: not said).
    client_max_tokens: int = 0
    # To the prefill node: send a TICKET frame before the prompt is computed.
    pipelined: bool = False
    # To both nodes: the version that this leg is of (wire/versions.py, LEGS). The prefill node
    # answers in its words.
    leg_version: int = 1
    # To both nodes: made once by the router and carried on, so that all chunks of a stream agree.
    created: int | None = None
    # Of a request with several prompts this is one: its choices are counted from here, and what
    # ends the answer (usage and [DONE] of a stream) is left to whoever joins the parts.
    part: bool = False
    first_index: int = 0

    # From the prefill node: which process holds the KV, under which of its leases, and how much of
    # it there is.
    generation: str | None = None
    lease_epoch: int = 0
    num_tokens: int = 0
    # The prompt is still being computed: the source says which blocks can be read already.
    growing: bool = False
    # Unix second after which the ticket leads nowhere, and the source's signature of it
    # (hexadecimal). None without a cluster secret.
    expires_at: int | None = None
    signature: str | None = None
    # The LoRA adapter that has made the KV, by name and by content; empty: the model alone. What
    # another adapter of the same name has made is not taken.
    adapter: str = ""
    adapter_digest: str = ""
    # What the decode node would otherwise compute twice: the answer so far. Of its first choice in
    # four fields, of the others (after a fail-over) as a list.
    prompt_token_ids: list[int] | None = None
    # The same in legs of version 2, 4 bytes each (base64 in JSON): a router passes them on and
    # reads none.
    packed_prompt: bytes | None = None
    generated: list[int] = []
    generated_logprobs: list[TokenLogprobs] = []
    sent_text: int | None = None
    finish: Finish | None = None
    other_choices: list[ChoiceSoFar] = []
    seed: int | None = None
    cached_tokens: int = 0
    # Of the prompt's tokens from the second one on, if the request asks for any.
    prompt_logprobs: list[TokenLogprobs] | None = None
    # To a node where the answer is generated: the time per token that its client wants and the
    # tokens that are expected of it (0: not said); and that its prompt is computed there though a
    # prefill node could, without `cached_tokens` as far as the router knows. The node may refuse
    # that.
    tpot_ms: float = 0.0
    expected_output: int = 0
    spill: bool = False
    # The defaults of the node that has drawn the first token: the others are drawn by the same
    # ones. None: not told.
    sampling_defaults: SamplingDefaults | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """How many the prompt has, if they are told."""
        if self.packed_prompt is not None:
            return len(self.packed_prompt) // _ID_BYTES
        return None if self.prompt_token_ids is None else len(self.prompt_token_ids)

    def prompt(self) -> list[int] | None:
        """The prompt's token ids, if they are told. Raises RequestError if they are malformed."""
        if self.packed_prompt is None:
            return self.prompt_token_ids
        if len(self.packed_prompt) % _ID_BYTES:
            raise RequestError(
                f"packed_prompt has {len(self.packed_prompt)} bytes, and each token has "
                f"{_ID_BYTES}; pass on what the "
                "prefill node answered",
                param="kv_transfer_params",
            )
        ids = array("i", self.packed_prompt)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tolist()

    def in_version(self, version: int) -> KvTransferParams:
        """The same for a leg of this version. Raises RequestError if what it says is malformed."""
        if version >= PACKS_PROMPTS or self.packed_prompt is None:
            return msgspec.structs.replace(self, leg_version=version)
        return msgspec.structs.replace(
            self, leg_version=version, prompt_token_ids=self.prompt(), packed_prompt=None
        )

    def so_far(self, choices: int) -> list[ChoiceSoFar]:
        """The first `choices` choices of the answer; those that have not begun are empty."""
        first = ChoiceSoFar(
            generated=self.generated,
            logprobs=self.generated_logprobs,
            sent_text=self.sent_text,
            finish=self.finish,
        )
        known = [first, *self.other_choices][:choices]
        return known + [ChoiceSoFar()] * (choices - len(known))


_MAY_DIFFER = ("tp_size", "protocol", "protocol_newest")


class Fingerprint(msgspec.Struct, frozen=True):
    """What must be equal on both ends of a transfer, compared at the handshake: refuse, never
    corrupt.

    Two may differ: `tp_size`, because `kv_heads` are those of all ranks and a rank reads the heads
    that it holds; and the versions of the protocol, as long as one is common.
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
        """All versions of the protocol that are spoken."""
        return Versions(self.protocol, max(self.protocol, self.protocol_newest))

    def difference(self, other: Fingerprint) -> str | None:
        """None if KV may be exchanged, else one clause naming the first field that differs and both
        values.
        """
        if self.protocols.common(other.protocols) is None:
            return f"protocol is {self.protocols} here and {other.protocols} there"
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and name not in _MAY_DIFFER:
                return f"{name} is {mine!r} here and {theirs!r} there"
        return None


class KvFacts(msgspec.Struct, frozen=True, cache_hash=True):
    """What a node says of its KV in its health report, so that a router pairs nodes that can
    exchange it.
    """

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
