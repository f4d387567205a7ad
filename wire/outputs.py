"""Outputs of an engine: tokens with their log-probabilities, ends, and its load."""

from __future__ import annotations

import enum
import math
from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["Finish", "Load", "PromptBlocks", "TokenLogprobs"]


_NAME_BYTES = 16


class Finish(enum.StrEnum):
    """A reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """A token's natural log-probability before penalties, temperature and masks, and the likeliest
    ones.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """Rank of a prompt's token, from 1; 0: unknown."""


class Load(Struct, frozen=True, array_like=True):
    """A node's load, in every reply."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    """Tokens of KV in a block; 0: unknown."""
    context_tokens: int = 0
    """Tokens of KV of the running requests."""
    # From here on: what a price of a leg is made of. Prompts and tokens are reckoned by the node's
    # card times its pace; a mean is over the last seconds (wire/step_costs.py).
    legs: int = 0
    """Requests that the engine has taken, and one; 0: not counted."""
    leg: int = 0
    """In an answer to a leg: its last request's number among those."""
    pace: float = 0.0
    """Steps take so many times as long as the card says; 0: not measured."""
    backlog_ms: float = 0.0
    """Time of prompts to compute."""
    token_rate: float = 0.0
    """Expected tokens per millisecond of new decodes."""
    prompt_share: float = 0.0
    """Share of its time for new prompts."""
    row_weight: float = 0.0
    """Cost of a millisecond for all decodes: sum of 1 / (time per token * expected tokens)."""
    strictest_tpot_ms: float = 0.0
    """Least time per token that one of them wants; 0: none."""
    spill_ms: float = 0.0
    """Time for prompts that a prefill node could compute."""
    promised_tokens: int = 0
    """Expected tokens of KV beyond present blocks."""
    max_num_seqs: int = 0
    """Most running requests; 0: unknown."""
    pull_ms: float = 0.0
    pull_token_ms: float = 0.0
    """Time to take KV from another node's prefix cache: once, and per token (0: none is taken)."""
    host_ms: float = 0.0
    host_token_ms: float = 0.0
    """The same from below its own pool."""
    store_token_ms: float = 0.0
    """Time that a token in files takes besides."""

    def peer_ms(self, tokens: float) -> float:
        """Return the time to take KV of so many tokens from another node."""
        return self.pull_ms + tokens * self.pull_token_ms if self.pull_token_ms else math.inf

    def tier_ms(self, tokens: float, stored: float = 0.0) -> float:
        """Return the time to take KV from below the own pool, of which `stored` tokens in files."""
        ms = self.host_ms + tokens * self.host_token_ms + stored * self.store_token_ms
        return ms if self.host_token_ms else math.inf

    @property
    def kv_usage(self) -> float:
        """Return the share of KV blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def retry_after_s(self) -> int:
        """Return the seconds until waiting prompts are computed, 1 to 60."""
        return min(60, max(1, math.ceil(self.backlog_ms / 1e3)))


class PromptBlocks(Struct, frozen=True, array_like=True):
    """A prompt's full blocks, by name, and perhaps those behind it."""

    block_size: Annotated[int, Meta(ge=1)]
    hashes: bytes

    @property
    def names(self) -> list[bytes]:
        return [
            self.hashes[at : at + _NAME_BYTES] for at in range(0, len(self.hashes), _NAME_BYTES)
        ]
