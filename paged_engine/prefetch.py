"""`kvrelay prefetch`: the files of a model, on this machine and whole, before a node needs them.

Owns which files a node would read, and whether they are whole as far as their headers say. How they
are downloaded, and gone on with, is paged_engine/hub.py's. Runs where there is no torch (an init
container): whether a GPU can serve the model is the node's to say.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrelay.paged_engine.hub import SMALL_FILES, resolve_model, weight_files
from kvrelay.paged_engine.model_config import ARCHITECTURES
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError, KvrelayError
from kvrelay.wire.gguf_header import TensorPlace, read_gguf_header

__all__ = ["PrefetchFailed", "check_gguf", "check_safetensors", "model_files", "prefetch"]

_MAX_HEADER_BYTES = 100 << 20


def check_safetensors(file: Path) -> None:
    """Raise ValueError, saying how it is not whole, or none of its kind."""
    _check(file, _end_of_safetensors)


def check_gguf(file: Path) -> None:
    """Raise ValueError, saying how it is not whole, or none of its kind."""
    _check(file, _end_of_gguf)


def _check(file: Path, end_of: Callable[[mmap.mmap], int]) -> None:
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            end, size = end_of(content), len(content)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as why:
        raise ValueError(f"is damaged ({why})") from why
    if size < end:
        raise ValueError(f"has {size} bytes of {end}")


def _end_of_safetensors(content: mmap.mmap) -> int:
    length = int(struct.unpack_from("<Q", content)[0])
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
    header: Mapping[str, Any] = json.loads(content[8 : 8 + length])
    last = 0
    for name, each in header.items():
        if name != "__metadata__":
            last = max(last, int(each["data_offsets"][1]))
    return 8 + length + last


def _end_of_gguf(content: mmap.mmap) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    def end(place: TensorPlace) -> int:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(place.kind)]
        return int(place.start + math.prod(place.shape) // block * block_bytes)

    return max(map(end, read_gguf_header(content, string_lists=False).tensors.values()), default=0)


class PrefetchFailed(KvrelayError):
    """The files are not whole."""


def prefetch(config: EngineConfig) -> dict[str, Any]:
    """`path`, `bytes` and `files` of the model, all of which are on this machine when it returns.

    Raises ConfigError for a model that no node would serve, DownloadFailed and PrefetchFailed if
    another try may help.
    """
    path = resolve_model(config, _check_config)
    files = model_files(path, config)
    return {
        "path": str(path),
        "bytes": sum(file.stat().st_size for file in files),
        "files": [str(f) for f in files],
    }


def model_files(path: Path, config: EngineConfig, *, tokenizer: bool = True) -> list[Path]:
    """List the files of the model at `path` that a node would read, or a rank without a
    `tokenizer`.

    Raises ConfigError, and PrefetchFailed if one is missing or not whole.
    """
    if path.is_dir():
        return _checked_folder(path, config, tokenizer=tokenizer)
    if path.suffix == ".gguf" and config.load_format != "dummy":
        _check_whole(path, check_gguf)
    return [path]


def _checked_folder(folder: Path, config: EngineConfig, *, tokenizer: bool) -> list[Path]:
    files = [folder / name for name in SMALL_FILES if (folder / name).exists()]
    if config.load_format == "dummy":
        _check_architecture(folder)
        return files
    _check_config(replace(config, model=str(folder)), tokenizer=tokenizer)
    weights = [folder / name for name in weight_files(folder)]
    missing = [file.name for file in weights if not file.exists()]
    if missing:
        raise PrefetchFailed(f"{folder} lacks {', '.join(missing)}; download it again")
    for file in weights:
        _check_whole(file, check_safetensors)
    return files + weights


def _check_config(config: EngineConfig, *, tokenizer: bool = True) -> None:
    folder = Path(config.model)
    _check_architecture(folder)
    if tokenizer and not (folder / "tokenizer.json").exists():
        raise ConfigError(
            f"{folder} holds no tokenizer.json; add one (transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
        )


def _check_architecture(folder: Path) -> None:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = content["architectures"]
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no config.json; pass a folder in Hugging Face layout"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(
            f"{folder / 'config.json'} does not say which architecture it is of: {why!r}"
        ) from why
    if not any(name in ARCHITECTURES for name in names):
        raise ConfigError(
            f"{folder}: architecture {', '.join(names)} is not served; {', '.join(ARCHITECTURES)} "
            f"are"
        )


def _check_whole(file: Path, check: Callable[[Path], None]) -> None:
    try:
        check(file)
    except ValueError as why:
        raise PrefetchFailed(f"{file} {why}; delete it and start again") from why
