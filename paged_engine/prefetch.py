"""`kvrelay prefetch`: the files of a model, on this machine and whole, before a node needs them.

Owns which files a node would read, and whether they are whole as far as their headers say. How they
are downloaded, and gone on with, is paged_engine/hub.py's. Runs where there is no torch (an init
container): whether a GPU can serve the model is the node's to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrelay.paged_engine.hub import SMALL_FILES, resolve_model, weight_files
from kvrelay.paged_engine.model_config import ARCHITECTURES
from kvrelay.paged_engine.whole_files import check_gguf, check_safetensors
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError, KvrelayError

__all__ = ["PrefetchFailed", "model_files", "prefetch"]


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
    """The files of a folder that a node would read."""
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
    """What no node on any machine would serve. Raises ConfigError."""
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
