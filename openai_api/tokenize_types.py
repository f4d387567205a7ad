"""POST /tokenize and /detokenize: what is asked and answered, in vLLM's shapes.

A /tokenize body is that of a completion (`prompt`) or of a chat (`messages`), with these fields
beside it. Light.
"""

from __future__ import annotations

import msgspec

__all__ = ["Detokenized", "ToDetokenize", "ToTokenize", "Tokenized"]


class ToTokenize(msgspec.Struct, frozen=True):
    """What is read before the prompt: which of the two kinds it is, and what to tell beside the
    ids.
    """

    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    return_token_strs: bool | None = None

    @property
    def is_chat(self) -> bool:
        """It has messages."""
        return bytes(self.messages).strip() not in (b"", b"null")


class Tokenized(msgspec.Struct, frozen=True):
    """The answer. `token_strs` are the tokens' texts, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class ToDetokenize(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The answer: the text of the tokens, special ones too."""

    prompt: str
