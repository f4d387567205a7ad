"""Tokenizers from a model's folder, or byte by byte for a config without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvrelay.openai_api.gguf_tokenizer import gguf_tokenizer
from kvrelay.openai_api.tokenizer import BYTE_CHARS, Pieces, Tokenizer, TokenizerParts
from kvrelay.wire.errors import ConfigError

__all__ = ["load_tokenizer", "byte_tokenizer", "folder_tokenizer", "read_object"]

_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


_WEIGHTS = ("*.safetensors", "*.bin", "tokenizer.model")


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face layout, a .gguf file or a config. Raises
    ConfigError.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Tokenizer(gguf_tokenizer(path))
    if path.is_file() and path.name != "config.json":
        return Tokenizer(byte_tokenizer(path))
    folder = path.parent if path.is_file() else path
    if (folder / "tokenizer.json").exists():
        return Tokenizer(folder_tokenizer(folder))
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{model!r} holds neither tokenizer.json nor config.json; pass a model's folder or file"
        )
    if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        # Weights that mean something are not served with a tokenizer that does not.
        raise ConfigError(
            f"{model!r} holds weights but no tokenizer.json; add the model's, or write one "
            f"with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return Tokenizer(byte_tokenizer(folder / "config.json"))


def folder_tokenizer(folder: Path) -> TokenizerParts:
    """Read tokenizer.json and what lies beside it. Raises ConfigError if it is broken or of an
    unknown kind.
    """
    file = folder / "tokenizer.json"
    try:
        backend = Backend.from_file(str(file))
    except Exception as why:  # the library raises bare Exception for every defect of the file
        raise ConfigError(f"{file} cannot be read: {why}") from why
    # Set by some training scripts and saved with the file; a server must not cut prompts.
    backend.no_truncation()
    backend.no_padding()
    pieces, leading_space = _pieces(backend, file)
    config = read_object(folder / "tokenizer_config.json")
    special = read_object(folder / "special_tokens_map.json") | {
        k: v for k, v in config.items() if v is not None
    }
    eos_token = _token(special.get("eos_token"))
    eos_token_ids = _eos_token_ids(folder / "config.json")
    if not eos_token_ids and (found := backend.token_to_id(eos_token)) is not None:
        eos_token_ids = (found,)
    template, tool_template = _chat_templates(folder, config)
    return TokenizerParts(
        backend,
        pieces,
        eos_token_ids,
        bos_token=_token(special.get("bos_token")),
        eos_token=eos_token,
        chat_template=template,
        tool_template=tool_template,
        leading_space=leading_space,
        model_type=_model_type(read_object(folder / "config.json")),
    )


def byte_tokenizer(config: Path) -> TokenizerParts:
    """A stand-in for a model without a tokenizer: ids below 256 are bytes, those above are words of
    their own.

    Every id has a text, so that streams of a model with random weights show every token. A byte
    whose id is a stop token, or not below the model's vocab_size, is left out of prompts. Raises
    ConfigError without vocab_size.
    """
    values = read_object(config)
    vocab_size = values.get("vocab_size") or values.get("text_config", {}).get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{config} names no vocab_size, and there is no tokenizer.json beside it")
    eos = [token for token in _eos_token_ids(config) if 0 <= token < vocab_size]
    names = [*BYTE_CHARS, *(f"{BYTE_CHARS[32]}t{token}" for token in range(256, vocab_size))][
        :vocab_size
    ]
    for token in eos:
        names[token] = f"<|end{token}|>"
    vocab = {name: token for token, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(names[token], normalized=False) for token in eos])
    model_type = _model_type(values)
    return TokenizerParts(
        backend, Pieces.BYTE_LEVEL, tuple(eos), chat_template=_PLAIN_TEMPLATE, model_type=model_type
    )


def _model_type(config: dict[str, Any]) -> str:
    found = config.get("model_type")
    return found if isinstance(found, str) else ""


def _pieces(backend: Backend, file: Path) -> tuple[Pieces, bool]:
    """(kind of vocabulary, whether encoding puts a space before a text), read from the decoder."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps: dict[str, dict[str, Any]] = {
        step["type"]: step for step in decoder.get("decoders", [decoder]) if step
    }
    if "ByteLevel" in steps:
        return Pieces.BYTE_LEVEL, False
    if "Metaspace" in steps:
        return Pieces.SENTENCEPIECE, steps["Metaspace"].get("prepend_scheme", "always") != "never"
    if "Replace" in steps or "ByteFallback" in steps:
        return Pieces.SENTENCEPIECE, bool(steps.get("Strip", {}).get("start", 0))
    raise ConfigError(
        f"{file}: decoder {decoder.get('type')!r} is not supported; byte-level and "
        f"SentencePiece-like tokenizers are"
    )


def _eos_token_ids(config: Path) -> tuple[int, ...]:
    """By the engine's rule: generation_config.json, else the model's config."""
    for values in (read_object(config.parent / "generation_config.json"), read_object(config)):
        found = values.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _chat_templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """(the template, one for chats with tools). Files win over the config, which holds one or a
    list of named ones.
    """
    named: dict[str, Any] = {}
    for name, path in (
        ("default", "chat_template.jinja"),
        ("tool_use", "additional_chat_templates/tool_use.jinja"),
    ):
        if (folder / path).exists():
            named[name] = (folder / path).read_text(encoding="utf-8")
    if "default" not in named:
        template = read_object(folder / "chat_template.json").get("chat_template") or config.get(
            "chat_template"
        )
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template} | named
        else:
            named["default"] = template
    found = [
        template if isinstance(template := named.get(name), str) else None
        for name in ("default", "tool_use")
    ]
    return found[0], found[1]


def _token(value: Any) -> str:
    """A token is written as a text or as an object with its text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file, empty if there is no such file. Raises ConfigError."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{file} cannot be read as JSON: {why}") from why
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
