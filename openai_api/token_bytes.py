"""What the tokens of a vocabulary are in bytes. Pure: pieces of text in, bytes out.

An answer's text is the concatenation of its tokens' bytes, read as UTF-8. That holds for every
byte-level and every byte-fallback vocabulary, costs a list look-up per token, and unlike a decoder
library it has no state to hand over.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

__all__ = ["BYTE_CHARS", "Pieces", "TokenizerParts", "piece_bytes"]


class Pieces(enum.Enum):
    """How a vocabulary writes bytes: each as one printable character, or as text with a marked
    space and <0xNN>.
    """

    BYTE_LEVEL = enum.auto()
    SENTENCEPIECE = enum.auto()


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a model's files say about its tokenizer. `leading_space`: encoding puts a space before a
    text.

    `tool_template` is for chats with tools, if the model has one of its own for them. `model_type`
    is its family, by config.json or the architecture in a GGUF file; empty if they do not say.
    """

    backend: Backend
    pieces: Pieces
    eos_token_ids: tuple[int, ...]
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None
    tool_template: str | None = None
    leading_space: bool = False
    model_type: str = ""


def _byte_chars() -> list[str]:
    """Byte -> character in byte-level vocabularies: printable Latin-1 is itself, the rest counts up
    from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_CHARS = _byte_chars()
_CHAR_BYTES = {char: byte for byte, char in enumerate(BYTE_CHARS)}


def piece_bytes(kind: Pieces, piece: str) -> bytes:
    """The bytes of one vocabulary entry that is not an added token."""
    if kind is Pieces.SENTENCEPIECE:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()
    try:
        return bytes([_CHAR_BYTES[char] for char in piece])
    except KeyError:  # not written in byte characters, so it means itself
        return piece.encode()
