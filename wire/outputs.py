"""What an engine says about a request: tokens, log-probabilities, and the one way it ended."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Finish", "Load", "PromptBlocks", "TokenLogprobs"]


class Finish(enum.StrEnum):
    """Why a request ended. Every request ends exactly once."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities before any penalty, temperature or mask: the chosen token and the k most likely."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """Of a prompt's token: 1 if none is likelier, and so on. 0 is not known."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What a node reports on every reply; the router's choice is made of these and its own leases."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    """Tokens of KV in a block; 0 from a node that does not say."""
    context_tokens: int = 0
    """Tokens of KV that the running requests have, together."""

    def header(self) -> str:
        """The value of the `x-kvrelay-load` header."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, header: str) -> Load:
        """The inverse of header(); raises msgspec.DecodeError on anything else."""
        return msgspec.json.decode(header, type=cls)


class PromptBlocks(msgspec.Struct, frozen=True, array_like=True):
    """What the full blocks of a prompt are called: their hashes (wire/hashes.py), one behind the other."""

    block_size: int
    hashes: bytes
