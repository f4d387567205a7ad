"""Text to token ids and back, for any model that can be served. Never imports transformers or
torch.

Encoding is the `tokenizers` library's; decoding is ours (openai_api/token_bytes.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from kvrelay.openai_api.folder_tokenizer import byte_tokenizer, folder_tokenizer
from kvrelay.openai_api.gguf_tokenizer import gguf_tokenizer
from kvrelay.openai_api.token_bytes import TokenizerParts, piece_bytes
from kvrelay.wire.errors import ConfigError

__all__ = ["Tokenizer"]

_WEIGHTS = ("*.safetensors", "*.bin", "tokenizer.model")


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

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """The tokenizer of a folder in Hugging Face layout, a .gguf file or a config. Raises
        ConfigError.
        """
        path = Path(model).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            return cls(gguf_tokenizer(path))
        if path.is_file() and path.name != "config.json":
            return cls(byte_tokenizer(path))
        folder = path.parent if path.is_file() else path
        if (folder / "tokenizer.json").exists():
            return cls(folder_tokenizer(folder))
        if not (folder / "config.json").exists():
            raise ConfigError(
                f"{model!r} holds neither tokenizer.json nor config.json; pass a model's folder "
                f"or file"
            )
        if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
            # Weights that mean something are not served with a tokenizer that does not.
            raise ConfigError(
                f"{model!r} holds weights but no tokenizer.json; add the model's, or write one "
                f"with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        return cls(byte_tokenizer(folder / "config.json"))

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
