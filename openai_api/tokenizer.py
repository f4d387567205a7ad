"""Text to token ids and back."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

__all__ = ["BYTE_CHARS", "Pieces", "Tokenizer", "TokenizerParts", "piece_bytes"]


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


class Tokenizer:
    """One model's tokenizer, for any number of threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        self.vocab_size: int = parts.backend.get_vocab_size(with_added_tokens=True)
        """Ids from here on mean nothing; a model's own vocabulary may be padded beyond."""
        self.eos_token_ids = parts.eos_token_ids
        self.bos_token, self.eos_token = parts.bos_token, parts.eos_token
        self.chat_template = parts.chat_template
        self.tool_template = parts.tool_template or parts.chat_template
        """For chats with tools; few models have two."""
        self.model_type = parts.model_type
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Control tokens, which are left out of text unless a request asks for them."""
        self._bytes: dict[int, bytes] = {i: token.content.encode() for i, token in added.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. `add_special_tokens` adds what the model wants around a text (its BOS), which
        templates write.
        """
        # As a batch of one: only that call lets other threads run meanwhile (1 MB of text takes 0.7
        # s).
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The inverse of encode: the space that encoding puts before a text is taken away again."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(
            "utf-8", "replace"
        )
        return text[1:] if self._parts.leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The token's part of a text, perhaps a part of a character. Empty for ids outside the
        vocabulary.
        """
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            found = b"" if piece is None else piece_bytes(self._parts.pieces, piece)
            self._bytes[token_id] = found
        return found

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text. Takes about 2 us per token of the vocabulary,
        once.
        """
        return max((len(self.token_bytes(token)) for token in range(self.vocab_size)), default=1)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written like this, if there is one."""
        found = self._backend.token_to_id(text)
        return found if found in self.special_ids else None

    def token_text(self, token_id: int) -> str:
        """How log-probabilities name a token: its text, or `bytes:\\xNN...` (as OpenAI does) where it is not UTF-8."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
