"""Text to token ids and back, whole or as tokens come, and the bytes of each token. Pure.

`tokenizers` encodes. Decoding is here: the tokens' bytes as UTF-8, one look-up each, without state
to hand over.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer as Backend

from kvrelay.openai_api.message_parts import beginning_at_end

__all__ = ["BYTE_CHARS", "TextStream", "Tokenizer", "byte_level", "sentencepiece"]


def _byte_chars() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_CHARS = _byte_chars()
"""Byte-level vocabularies' characters: printable Latin-1, the rest from U+0100."""
_CHAR_BYTES = {char: byte for byte, char in enumerate(BYTE_CHARS)}


def byte_level(piece: str) -> bytes:
    try:
        return bytes([_CHAR_BYTES[char] for char in piece])
    except KeyError:  # not written in byte characters
        return piece.encode()


def sentencepiece(piece: str) -> bytes:
    """Return the bytes of an entry with U+2581 for a space or <0xNN> for a byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


class Tokenizer:
    """A model's tokenizer, for any number of threads."""

    def __init__(
        self,
        backend: Backend,
        piece_bytes: Callable[[str], bytes],
        eos_token_ids: tuple[int, ...],
        *,
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
        tool_template: str | None = None,
        leading_space: bool = False,
        model_type: str = "",
    ) -> None:
        """`piece_bytes` returns a vocabulary entry's bytes; added tokens are their own.

        `leading_space`: encoding puts a space before a text.
        """
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Ids from here on mean nothing; a model's own vocabulary may be padded."""
        self.eos_token_ids = eos_token_ids
        self.bos_token, self.eos_token = bos_token, eos_token
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        self.model_type = model_type
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Control tokens, which have no text unless a request asks for it."""
        self._piece_bytes = piece_bytes
        self._leading_space = leading_space
        self._bytes: dict[int, bytes] = {i: token.content.encode() for i, token in added.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return token ids; `add_special_tokens` adds BOS and the like."""
        # A batch of one, because only that call releases the GIL (1 MB of text takes 0.7 s), and the
        # fast one leaves out where each token lies in the text, which takes half of the time.
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(i) for i in ids if i not in skipped)
        text = raw.decode("utf-8", "replace")
        return text[1:] if self._leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            piece = self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            found = b"" if piece is None else self._piece_bytes(piece)
            self._bytes[token_id] = found
        return found

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """Return the most bytes of a token; the first call takes 2 us per token."""
        return max((len(self.token_bytes(token)) for token in range(self.vocab_size)), default=1)

    def special_id(self, text: str) -> int | None:
        found = self.backend.token_to_id(text)
        return found if found in self.special_ids else None

    def token_text(self, token_id: int) -> str:
        """Return a token's text, or `bytes:\\xNN...` if it is not UTF-8."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextStream:
    """A text as its tokens come. Parts of a character and of a stop string are held back.

    No stop string is looked for in the first `min_tokens` tokens. With `skip_special_tokens` only
    those in `rendered` have text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        rendered: frozenset[int] = frozenset(),
    ) -> None:
        self.stop_hit: str | None = None
        """The stop string that ended the text."""
        self.sent = 0
        """Characters released so far."""
        self.decoded = 0
        """Characters decoded so far, with those held back: where the next token's text begins."""
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        if rendered:
            self._skipped -= rendered
        self._stop = stop
        self._beginnings = frozenset("".join(text[:-1] for text in stop))
        self._include_stop = include_stop
        self._unstoppable = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        if self.stop_hit is not None:
            return ""
        text = "" if token_id in self._skipped else self._utf8.decode(self._bytes_of(token_id))
        self.decoded += len(text)
        if self._stop:
            text = self._certain(text)
        self.sent += len(text)
        return text

    def finish(self) -> str:
        if self.stop_hit is not None:
            return ""
        rest = self._utf8.decode(b"", final=True)
        self.decoded += len(rest)
        rest, self._held = self._held + rest, ""
        self.sent += len(rest)
        return rest

    def _certain(self, text: str) -> str:
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return text
        text = self._held + text
        # The one that is complete first, wherever tokens are cut; of several, the longest.
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start, self.stop_hit = min(found)
            self._held = ""
            return text[: end if self._include_stop else start]
        certain = len(text)
        if text and text[-1] in self._beginnings:
            certain -= beginning_at_end(text, self._stop)
        self._held = text[certain:]
        return text[:certain]
