"""A tokenizer from a GGUF file's metadata, equal to its source's.

GGUF only names the pre-tokenizer (`tokenizer.ggml.pre`), which transformers ignores: SmolLM2's
digits stay unsplit, and ids differ from training.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kvrelay.openai_api.tokenizer import Tokenizer, byte_level
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.gguf_header import read_gguf_header

__all__ = ["gguf_tokenizer", "read_gguf_metadata"]

_KEYS = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# The same but for digits: runs of up to three in Llama 3, single ones in Qwen 2.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file. Raises ConfigError."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return read_gguf_header(content).metadata
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} is not a readable GGUF file: {why}") from why


def gguf_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file. Raises ConfigError for an unknown kind."""
    metadata = read_gguf_metadata(path)
    ggml = {name.removeprefix(_KEYS): value for name, value in metadata.items()}
    tokens: list[str] = ggml.get("tokens") or []
    if not tokens:
        raise ConfigError(
            f"{path} holds no tokenizer ({_KEYS}tokens); use another file or a folder"
        )
    if (model := ggml.get("model")) != "gpt2":
        raise ConfigError(
            f"{path}: tokenizer {model!r} is not supported, gpt2 is; use the model's folder"
        )
    backend = _byte_level_backend(tokens, ggml, path)
    types: list[int] = ggml.get("token_type", [])
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        add([AddedToken(tokens[i], normalized=False) for i, t in enumerate(types) if t == kind])
    _add_bos_and_eos(backend, tokens, ggml)
    ends = [ggml[f"{name}_token_id"] for name in ("eos", "eot") if _token(tokens, ggml, name)]
    return Tokenizer(
        backend,
        byte_level,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token=_token(tokens, ggml, "bos"),
        eos_token=_token(tokens, ggml, "eos"),
        chat_template=metadata.get("tokenizer.chat_template"),
        tool_template=metadata.get("tokenizer.chat_template.tool_use"),
        model_type=str(metadata.get("general.architecture", "")),
    )


def _token(tokens: list[str], ggml: dict[str, Any], name: str) -> str:
    found = ggml.get(f"{name}_token_id")
    return tokens[found] if isinstance(found, int) and 0 <= found < len(tokens) else ""


def _byte_level_backend(tokens: list[str], ggml: dict[str, Any], path: Path) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    # A merge is two pieces around a space; the first may begin with one.
    cuts = ((merge, merge.index(" ", 1)) for merge in ggml.get("merges", []))
    merges = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]
    pre = ggml.get("pre") or "default"
    # Llama 3's vocabulary holds words that no merge leads to.
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre in ("llama-bpe", "qwen2"):
        pattern = _SPLIT.replace("DIGITS", r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}")
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
    elif pre in ("gpt-2", "default"):
        backend.pre_tokenizer = words
    else:
        raise ConfigError(
            f"{path}: pre-tokenizer {pre!r} is not supported; smollm, llama-bpe, qwen2, gpt-2 and "
            "default are. Use the model's folder in Hugging Face layout"
        )
    return backend


def _add_bos_and_eos(backend: Backend, tokens: list[str], ggml: dict[str, Any]) -> None:
    # The flags' defaults are llama.cpp's: a file may leave them out.
    by_default = ggml.get("pre") == "llama-bpe"
    bos = _token(tokens, ggml, "bos") if ggml.get("add_bos_token", by_default) else ""
    eos = _token(tokens, ggml, "eos") if ggml.get("add_eos_token", False) else ""
    if added := {bos, eos} - {""}:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A {eos}".strip(),
            special_tokens=[(token, backend.token_to_id(token)) for token in added],
        )
