"""`kvrelay prefetch`: bring a model's files to this machine and check that they are whole.

Runs without torch, in an init container for example. Whether a GPU can serve the model is the
node's to say.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kvrelay.paged_engine.hub import SMALL_FILES, resolve_model, weight_files
from kvrelay.paged_engine.model_files import read_model_config
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError, KvrelayError

__all__ = ["PrefetchFailed", "model_files", "prefetch"]


class PrefetchFailed(KvrelayError):
    """A file of a model is missing or damaged; another download may help."""


def prefetch(config: EngineConfig) -> dict[str, Any]:
    """Download a model and return its `path`, its size in `bytes` and its `files`.

    Raises ConfigError for a model that no node would serve, DownloadFailed and PrefetchFailed if
    another try may help.
    """
    path = resolve_model(config, _check_config)
    files = model_files(path, config)
    _check_config(replace(config, model=str(path)))
    return {
        "path": str(path),
        "bytes": sum(file.stat().st_size for file in files),
        "files": [str(file) for file in files],
    }


def model_files(path: Path, config: EngineConfig, *, tokenizer: bool = True) -> list[Path]:
    """Return the files of a model that a node would read; a rank reads no `tokenizer`.

    Raises ConfigError, and PrefetchFailed if one is missing or damaged.
    """
    dummy = config.load_format == "dummy"
    if not path.is_dir():
        if path.suffix == ".gguf" and not dummy:
            _check_gguf(path)
        return [path]
    files = [path / name for name in SMALL_FILES if (path / name).exists()]
    if dummy:
        return files
    if tokenizer and path / "tokenizer.json" not in files:
        raise ConfigError(
            f"{path} holds no tokenizer.json; add one (transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
        )
    weights = [path / name for name in weight_files(path)]
    missing = [file.name for file in weights if not file.exists()]
    if missing:
        raise PrefetchFailed(f"{path} lacks {', '.join(missing)}; download it again")
    for file in weights:
        try:
            safe_open(file, framework="np")  # compares the header with the file's size
        except (SafetensorError, OSError) as why:
            raise _damaged(file, why) from why
    return files + weights


def _check_config(config: EngineConfig) -> None:
    read_model_config(config.model, config.load_format)


def _check_gguf(file: Path) -> None:
    from kvrelay.paged_engine.gguf_model import GgufFile

    try:
        GgufFile(file)
    except ConfigError as why:
        raise _damaged(file, why) from why


def _damaged(file: Path, why: Exception) -> PrefetchFailed:
    return PrefetchFailed(f"{file} is damaged ({why}); delete it and start again")
