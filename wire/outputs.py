"""Outputs of an engine: tokens with their log-probabilities, ends, and its load."""

from __future__ import annotations

import enum
import math

import msgspec

__all__ = ["Finish", "Load", "PromptBlocks", "TokenLogprobs"]


class Finish(enum.StrEnum):
    """A reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """A token's natural log-probabilities before any penalty, temperature or mask: the chosen token
    and the k most likely.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """Of a prompt's token: 1 if none is likelier, and so on. 0 is not known."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A node's load, reported on every reply: what a router places by, beside its own leases."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    """Tokens of KV in a block; 0 from a node that does not say."""
    context_tokens: int = 0
    """Tokens of KV that the running requests have, together."""
    # From here on: what a price of a leg is made of. Prompts and tokens are reckoned by the node's
    # own card times its pace; a mean is over the last seconds (wire/step_costs.py).
    legs: int = 0
    """Requests that the engine has taken since it started, and one; 0 from a node that does not
    count them.
    """
    leg: int = 0
    """In an answer to a leg, the number of its last request among those: a load with as many `legs`
    contains it.
    """
    pace: float = 0.0
    """How many times as long steps take as the node's card says; 0: not measured."""
    backlog_ms: float = 0.0
    """Time of prompts that are not computed yet, without what was cached or is fetched."""
    token_rate: float = 0.0
    """Tokens per millisecond that are expected of the requests that come to be decoded here."""
    prompt_share: float = 0.0
    """Of its time, what the prompts take that come."""
    row_weight: float = 0.0
    """What a millisecond costs all that decode here: the sum of 1 / (time per token * expected
    tokens).
    """
    strictest_tpot_ms: float = 0.0
    """The least time per token that one of them wants; 0: there are none."""
    spill_ms: float = 0.0
    """Time of prompts that it takes now although a prefill node could compute them."""
    promised_tokens: int = 0
    """Tokens of KV that all requests here are still expected to take beyond the blocks that they
    have.
    """
    max_num_seqs: int = 0
    """Requests that it runs at most at once; 0 from a node that does not say."""

    @property
    def retry_after_s(self) -> int:
        """Return the whole seconds until the prompts that wait are computed, 1 to 60: the value of
        Retry-After.
        """
        return min(60, max(1, math.ceil(self.backlog_ms / 1e3)))

    def header(self) -> str:
        """Return the value of the `x-kvrelay-load` header."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, header: str) -> Load:
        """Return the load of a header. Raises msgspec.DecodeError."""
        return msgspec.json.decode(header, type=cls)


class PromptBlocks(msgspec.Struct, frozen=True, array_like=True):
    """A prompt's full blocks, by name."""

    block_size: int
    hashes: bytes
