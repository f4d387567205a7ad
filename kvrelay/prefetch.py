"""`kvrelay prefetch`: the files of a model, on this machine and whole, before a node needs them.

Owns which files a node would read, and whether they are whole as far as their headers say. How they are downloaded, and
gone on with, is paged_engine/hub.py's. Runs where there is no torch (an init container): whether a GPU can serve the
model is the node's to say.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paged_engine.hub import SMALL_FILES, DownloadFailed, resolve_model, weight_files
from paged_engine.model_config import ARCHITECTURES
from wire.config import EngineConfig
from wire.errors import ConfigError, KvrelayError
from wire.gguf_header import TensorPlace, read_gguf_header

__all__ = ["PrefetchFailed", "prefetch"]

_MAX_HEADER_BYTES = 100 << 20


class PrefetchFailed(KvrelayError):
    """The files could not be had this time, or are not whole."""


def prefetch(config: EngineConfig) -> dict[str, Any]:
    """`path`, `bytes` and `files` of the model, all of which are on this machine when it returns.

    Raises ConfigError for a model that no node would serve, PrefetchFailed if trying again may help.
    """
    try:
        path = resolve_model(config, _check_config)
    except DownloadFailed as why:
        raise PrefetchFailed(why.message) from why
    files = _checked_file(path) if path.is_file() else _checked_folder(path, config)
    return {"path": str(path), "bytes": sum(file.stat().st_size for file in files), "files": [str(f) for f in files]}


def _checked_folder(folder: Path, config: EngineConfig) -> list[Path]:
    """The files of a folder that a node would read."""
    files = [folder / name for name in SMALL_FILES if (folder / name).exists()]
    if config.load_format == "dummy":
        _check_architecture(folder)
        return files
    _check_config(replace(config, model=str(folder)))
    weights = [folder / name for name in weight_files(folder)]
    missing = [file.name for file in weights if not file.exists()]
    if missing:
        raise PrefetchFailed(f"{folder} lacks {', '.join(missing)}; download it again")
    for file in weights:
        _check_whole(file, _end_of_safetensors)
    return files + weights


def _checked_file(file: Path) -> list[Path]:
    _check_whole(file, _end_of_gguf)
    return [file]


def _check_config(config: EngineConfig) -> None:
    """What no node on any machine would serve. Raises ConfigError."""
    folder = Path(config.model)
    _check_architecture(folder)
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(
            f"{folder} holds no tokenizer.json; add one (transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
        )


def _check_architecture(folder: Path) -> None:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = content["architectures"]
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no config.json; pass a folder in Hugging Face layout") from None
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(f"{folder / 'config.json'} does not say which architecture it is of: {why!r}") from why
    if not any(name in ARCHITECTURES for name in names):
        raise ConfigError(f"{folder}: architecture {', '.join(names)} is not served; {', '.join(ARCHITECTURES)} are")


def _check_whole(file: Path, end_of: Callable[[mmap.mmap], int]) -> None:
    """Raise PrefetchFailed if a file ends before its last tensor does, or is none of its kind."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end, size = end_of(content), len(content)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as why:
        raise PrefetchFailed(f"{file} is damaged ({why}); delete it and start again") from why
    if size < end:
        raise PrefetchFailed(f"{file} has {size} bytes of {end}; delete it and start again")


def _end_of_safetensors(content: mmap.mmap) -> int:
    """Where the last tensor ends, in bytes from the start of the file."""
    length = int(struct.unpack_from("<Q", content)[0])
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
    header: Mapping[str, Any] = json.loads(content[8 : 8 + length])
    ends = (each["data_offsets"][1] for name, each in header.items() if name != "__metadata__")
    return 8 + length + max(map(int, ends), default=0)


def _end_of_gguf(content: mmap.mmap) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    def end(place: TensorPlace) -> int:
        elements, (block, block_bytes) = 1, GGML_QUANT_SIZES[GGMLQuantizationType(place.kind)]
        for size in place.shape:
            elements *= size
        return place.start + elements // block * block_bytes

    return max(map(end, read_gguf_header(content, string_lists=False).tensors.values()), default=0)
