"""The door to a model on disk: its config and weights, in any format. Never downloads, never
imports transformers.

The weights need torch, the config does not.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.paged_engine.hf_config import model_config_of
from kvrelay.paged_engine.model_config import DTYPES, ModelConfig
from kvrelay.paged_engine.model_tensors import quantized_weights, tensor_shapes
from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["read_model_config", "read_tensors"]

log = logging.getLogger("kvrelay.engine")

PROGRESS_INTERVAL_S = 5.0


def read_model_config(model: str, load_format: str = "auto") -> ModelConfig:
    """The config of a folder in Hugging Face layout, of a .gguf file, or (with load_format dummy)
    of a config.json.

    Raises ConfigError if there is no such model, or if it needs what the engine does not have.
    """
    path = _model_path(model, load_format)
    if path.suffix == ".gguf":
        # Only GGUF models need the gguf package.
        from kvrelay.paged_engine.gguf_file import GgufFile
        from kvrelay.paged_engine.gguf_model import gguf_model_config

        return gguf_model_config(GgufFile(path))
    config = path / "config.json" if path.is_dir() else path
    if not config.exists():
        raise ConfigError(
            f"model folder {path} holds no config.json; pass a folder in Hugging Face layout or a "
            f".gguf file"
        )
    generation = config.parent / "generation_config.json"
    return model_config_of(
        _read_json(config),
        _read_json(generation) if generation.exists() else {},
        _served_name(config),
        str(config),
    )


def read_tensors(
    model: str, config: ModelConfig, load_format: str = "auto", device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for all names of tensor_shapes(config), one at a time, in the dtype they
    are stored in.

    Those of load_format dummy are on `device`, all others in host memory.

    Quantized GGUF tensors come as float32, fp8 weights as paged_engine/quantization.py says. Logs
    how far it is. Raises ConfigError, while iterating, if a file or tensor is missing, unknown or
    of another shape than the config says.
    """
    shapes = tensor_shapes(config)
    stored = _stored(_model_path(model, load_format), config, load_format, device)
    for name, tensor in _with_progress(stored, sum(map(math.prod, shapes.values())), config.name):
        if tuple(tensor.shape) != shapes[name]:
            raise ConfigError(
                f"model {model}: tensor {name} is {tuple(tensor.shape)}, the config says "
                f"{shapes[name]}"
            )
        dtypes = ("float8_e4m3fn",) if f"{name}_scale" in shapes else DTYPES
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in dtypes:
            raise ConfigError(
                f"model {model}: tensor {name} is {dtype}; {', '.join(dtypes)} is what it may be"
            )
        yield name, tensor


def _with_progress(
    tensors: Iterator[tuple[str, torch.Tensor]], total: int, model: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, and every few seconds a line with the share of the `total` elements that
    has passed.
    """
    began = said = time.monotonic()
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += tensor.numel()
        if (now := time.monotonic()) - said >= PROGRESS_INTERVAL_S:
            said = now
            log.info(
                "%s: loading weights, %d %% after %.0f s", model, 100 * done // total, now - began
            )


def _stored(
    path: Path, config: ModelConfig, load_format: str, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    from kvrelay.paged_engine.dummy_weights import dummy_tensors
    from kvrelay.paged_engine.quantization import (
        canonical_name,
        is_passed_over,
        quantized,
        unpacked,
    )
    from kvrelay.paged_engine.safetensors_files import safetensors_tensors

    if load_format == "dummy":
        return quantized(dummy_tensors(replace(config, quantization=None), device), config)
    if path.suffix == ".gguf":
        from kvrelay.paged_engine.gguf_file import GgufFile
        from kvrelay.paged_engine.gguf_model import gguf_tensors

        return gguf_tensors(GgufFile(path), config)
    if config.quantization is None:
        return safetensors_tensors(path, tensor_shapes(config), tied=config.tie_embeddings)
    wanted = {*tensor_shapes(config), *(f"{name}_scale" for name in quantized_weights(config))}
    stored = safetensors_tensors(
        path,
        wanted,
        tied=config.tie_embeddings,
        canonical=canonical_name,
        passed_over=is_passed_over,
    )
    return unpacked(stored, config)


def _model_path(model: str, load_format: str) -> Path:
    """The path, after checking that it is there and can be what load_format says."""
    path = Path(model).expanduser()
    if not path.exists():
        raise ConfigError(
            f"model {model!r} does not exist; pass a folder in Hugging Face layout or a .gguf file"
        )
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if load_format == "dummy":
        if not (path.is_dir() or is_gguf or path.suffix == ".json"):
            raise ConfigError(
                f"model {model!r} with load_format dummy must be a config.json, a folder or a "
                f".gguf file"
            )
    elif path.is_file() and not is_gguf:
        raise ConfigError(
            f"model {model!r} holds no weights; pass its folder or a .gguf file, or use "
            f"load_format dummy"
        )
    elif load_format == ("safetensors" if is_gguf else "gguf"):
        raise ConfigError(
            f"model {model!r} is a {'GGUF file' if is_gguf else 'folder'}; load_format "
            f"{load_format} does not read it, "
            "auto does"
        )
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} cannot be read as JSON: {why}") from why
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _served_name(config: Path) -> str:
    """The folder's name, or the file's if it is not called config.json."""
    config = (
        config.parent.resolve() / config.name
    )  # the file itself is a link in Hugging Face's cache
    if config.name != "config.json":
        return config.stem
    folder = config.parent
    # Hugging Face's cache: models--org--name/snapshots/<commit>/config.json
    return (
        folder.parents[1].name.rsplit("--", 1)[-1]
        if folder.parent.name == "snapshots"
        else folder.name
    )
