"""A request that has ended, as the console, the log and metrics have it."""

from __future__ import annotations

import msgspec

__all__ = ["EndedRequest"]


class EndedRequest(msgspec.Struct, frozen=True):
    """A request that has ended. `ended` is a Unix time; unknown figures are None."""

    id: str
    path: str
    model: str
    key: str
    """The name of its API key."""
    status: int
    """499: the client went away. A stream that broke has the status it would have had."""
    error: str
    stream: bool
    local: bool
    """A decode node has computed the prompt."""
    ended: float
    ttft_s: float | None
    inter_token_s: float | None
    """The mean time between tokens."""
    prompt_tokens: int | None
    cached_tokens: int
    output_tokens: int
    prefill: str
    decode: str
    """The addresses of the last nodes; `-` is none."""
    kv_bytes: int
    """Bytes that the decode node has fetched; 0 if none, or if it does not say."""
    stages_s: dict[str, float]
    """Stages as openai_api/stages.py names them."""
    placed: str = "-"
    """Where the request was placed, at what price, and the best other way."""
