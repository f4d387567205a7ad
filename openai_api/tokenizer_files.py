"""Tokenizers from a model's folder or GGUF file, or byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvrelay.openai_api.gguf_tokenizer import gguf_tokenizer
from kvrelay.openai_api.tokenizer import BYTE_CHARS, Tokenizer, byte_level, sentencepiece
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.json_object import JsonObject

__all__ = ["byte_tokenizer", "load_tokenizer", "read_object"]

_WEIGHTS = ("*.safetensors", "*.bin", "tokenizer.model")
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load_tokenizer(model: str) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder, a .gguf file or a config. Raises ConfigError."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return gguf_tokenizer(path)
    if path.is_file() and path.name != "config.json":
        return byte_tokenizer(path)
    folder = path.parent if path.is_file() else path
    file = folder / "tokenizer.json"
    if file.exists():
        try:
            return _folder_tokenizer(folder, Backend.from_file(str(file)))
        except ConfigError:
            raise
        except Exception as why:  # the library raises bare Exception for every defect of the file
            raise ConfigError(f"{file} cannot be read: {why}") from why
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{model!r} holds neither tokenizer.json nor config.json; pass a model's folder or file"
        )
    # Weights that mean something are not served with a tokenizer that does not.
    if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise ConfigError(
            f"{str(folder)!r} holds weights but no tokenizer.json; add the model's, or make one with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return byte_tokenizer(folder / "config.json")


def byte_tokenizer(config: Path) -> Tokenizer:
    """Return a stand-in for a model without a tokenizer.

    Ids below 256 are bytes, others words, so that random weights show every token. Raises
    ConfigError.
    """
    values = read_object(config)
    vocab_size = values.get("vocab_size") or values.get("text_config", {}).get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{config} names no vocab_size, and there is no tokenizer.json beside it")
    eos = [token for token in _eos_token_ids(config) if 0 <= token < vocab_size]
    names = [*BYTE_CHARS, *(f"{BYTE_CHARS[32]}t{token}" for token in range(256, vocab_size))]
    del names[vocab_size:]
    for token in eos:
        names[token] = f"<|end{token}|>"
    vocab = {name: token for token, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(names[token], normalized=False) for token in eos])
    return Tokenizer(
        backend,
        byte_level,
        tuple(eos),
        chat_template=_PLAIN_TEMPLATE,
        model_type=_text(values.get("model_type")),
    )


def _folder_tokenizer(folder: Path, backend: Backend) -> Tokenizer:
    # Set by some training scripts and saved with the file; a server must not cut prompts.
    backend.no_truncation()
    backend.no_padding()
    piece_bytes, leading_space = _decoding(folder, backend)
    config = read_object(folder / "tokenizer_config.json")
    special = read_object(folder / "special_tokens_map.json") | {
        name: value for name, value in config.items() if value is not None
    }
    eos_token = _text(special.get("eos_token"))
    eos_token_ids = _eos_token_ids(folder / "config.json")
    if not eos_token_ids and (found := backend.token_to_id(eos_token)) is not None:
        eos_token_ids = (found,)
    templates = _chat_templates(folder, config)
    return Tokenizer(
        backend,
        piece_bytes,
        eos_token_ids,
        bos_token=_text(special.get("bos_token")),
        eos_token=eos_token,
        chat_template=_text(templates.get("default")) or None,
        tool_template=_text(templates.get("tool_use")) or None,
        leading_space=leading_space,
        model_type=_text(read_object(folder / "config.json").get("model_type")),
    )


def _decoding(folder: Path, backend: Backend) -> tuple[Callable[[str], bytes], bool]:
    steps = _steps(backend.decoder)
    known = steps or _steps(backend.pre_tokenizer)
    if "ByteLevel" in known:
        return byte_level, False
    if "Metaspace" in known:
        return sentencepiece, known["Metaspace"].get("prepend_scheme", "always") != "never"
    if "Replace" in steps or "ByteFallback" in steps:
        return sentencepiece, bool(steps.get("Strip", {}).get("start", 0))
    raise ConfigError(
        f"{folder / 'tokenizer.json'} has the decoder {', '.join(steps) or 'none'}, which is not "
        "supported; take a model whose tokenizer has ByteLevel, Metaspace or ByteFallback"
    )


def _steps(part: Any) -> dict[str, JsonObject]:
    state: JsonObject = json.loads(part.__getstate__()) if part else {}
    steps = state.get("decoders") or state.get("pretokenizers") or [state]
    return {step["type"]: step for step in steps if step}


def _eos_token_ids(config: Path) -> tuple[int, ...]:
    # The engine's rule: generation_config.json, else the model's config.
    for values in (read_object(config.parent / "generation_config.json"), read_object(config)):
        found = values.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _chat_templates(folder: Path, config: JsonObject) -> JsonObject:
    # A file of its own replaces all that the older files have, as in transformers.
    default, tool_use = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
    named: JsonObject = {}
    if not (folder / default).exists():
        template = read_object(folder / "chat_template.json").get("chat_template")
        template = template or config.get("chat_template")
        named = {"default": template}
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
    for name, file in (("default", default), ("tool_use", tool_use)):
        if (folder / file).exists():
            named[name] = (folder / file).read_text(encoding="utf-8")
    return named


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def read_object(file: Path) -> JsonObject:
    """Return a file's JSON object, empty without the file. Raises ConfigError."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{file} cannot be read as JSON: {why}") from why
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
