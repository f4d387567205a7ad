"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kvrelay.openai_api.tokenizer import Pieces, TokenizerParts
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.gguf_header import read_gguf_header

__all__ = ["gguf_tokenizer", "read_gguf_metadata"]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# The same but for digits: runs of up to three in Llama 3, single ones in Qwen 2.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read a .gguf file. Raises ConfigError if it has no tokenizer, or one of a kind that is not
    known here.
    """
    metadata = _Metadata(path)
    model = metadata.text("tokenizer.ggml.model")
    if model == "gpt2":
        backend, pieces = _byte_level(metadata), Pieces.BYTE_LEVEL
    elif model == "llama":
        backend, pieces = _sentencepiece(metadata), Pieces.SENTENCEPIECE
    else:
        raise ConfigError(
            f"{path}: tokenizer {model!r} is not supported; gpt2 and llama are. Use the model's "
            f"folder"
        )
    tokens = metadata.tokens
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    added = [(tokens[i], kind) for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_special_tokens(
        [AddedToken(text, normalized=False) for text, kind in added if kind == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(text, normalized=False) for text, kind in added if kind == _USER_DEFINED]
    )
    _add_bos_and_eos(backend, metadata, model)
    return TokenizerParts(
        backend,
        pieces,
        eos_token_ids=tuple(
            dict.fromkeys(
                i for name in ("eos", "eot") if (i := metadata.token_id(name)) is not None
            )
        ),
        bos_token=metadata.token("bos"),
        eos_token=metadata.token("eos"),
        chat_template=metadata.get("tokenizer.chat_template"),
        tool_template=metadata.get("tokenizer.chat_template.tool_use"),
        leading_space=pieces is Pieces.SENTENCEPIECE and metadata.space_prefix,
        model_type=metadata.text("general.architecture"),
    )


class _Metadata:
    """The keys of one file; errors name it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = read_gguf_metadata(path)
        self.tokens: list[str] = self._values.get("tokenizer.ggml.tokens") or []
        if not self.tokens:
            raise ConfigError(
                f"{path} holds no tokenizer (tokenizer.ggml.tokens); use another file or a folder"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def text(self, key: str) -> str:
        return str(self._values.get(key, ""))

    def token_id(self, name: str) -> int | None:
        found = self._values.get(f"tokenizer.ggml.{name}_token_id")
        return found if isinstance(found, int) and 0 <= found < len(self.tokens) else None

    def token(self, name: str) -> str:
        found = self.token_id(name)
        return "" if found is None else self.tokens[found]

    @property
    def space_prefix(self) -> bool:
        return bool(self._values.get("tokenizer.ggml.add_space_prefix", True))


def _byte_level(metadata: _Metadata) -> Backend:
    vocab = {token: i for i, token in enumerate(metadata.tokens)}
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    pre = metadata.text("tokenizer.ggml.pre") or "default"
    # Llama 3's vocabulary holds words that no merge leads to.
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "smollm":
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), words]
        )
    elif pre in ("llama-bpe", "qwen2"):
        pattern = Regex(_SPLIT.replace("DIGITS", r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(pattern, "isolated"), whole]
        )
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
    elif pre in ("gpt-2", "default"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise ConfigError(
            f"{metadata.path}: pre-tokenizer {pre!r} is not supported; smollm, llama-bpe, qwen2, "
            f"gpt-2 and default "
            "are. Use the model's folder in Hugging Face layout"
        )
    return backend


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(metadata: _Metadata) -> Backend:
    vocab = {token: i for i, token in enumerate(metadata.tokens)}
    scores: list[float] = metadata.get("tokenizer.ggml.scores", [0.0] * len(metadata.tokens))
    merges = [(left, right) for *_, left, right in sorted(_splits(vocab, scores))]
    unknown = metadata.token("unknown") or None
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if metadata.space_prefix:
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _splits(
    vocab: dict[str, int], scores: list[float]
) -> Iterator[tuple[float, int, int, str, str]]:
    """Every way to make a piece of two others, in an order that sorts the likeliest piece first."""
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                yield -scores[i], vocab[left], vocab[right], left, right


def _add_bos_and_eos(backend: Backend, metadata: _Metadata, model: str) -> None:
    """The flags' defaults are llama.cpp's: the file may leave them out."""
    by_default = model == "llama" or metadata.text("tokenizer.ggml.pre") == "llama-bpe"
    bos, eos = metadata.token("bos"), metadata.token("eos")
    with_bos = bool(bos) and metadata.get("tokenizer.ggml.add_bos_token", by_default)
    with_eos = bool(eos) and metadata.get("tokenizer.ggml.add_eos_token", False)
    if with_bos or with_eos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos if with_bos else ''} $A {eos if with_eos else ''}".strip(),
            special_tokens=[(token, vocab_id) for token, vocab_id in _ids(backend, bos, eos)],
        )


def _ids(backend: Backend, *tokens: str) -> Iterator[tuple[str, int]]:
    for token in dict.fromkeys(tokens):
        found = backend.token_to_id(token)
        if token and found is not None:
            yield token, found


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys and values (bool, int, float, str, or a list of one of these). Raises ConfigError
    naming the file.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return read_gguf_header(content).metadata
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} is not a readable GGUF file: {why}") from why
