"""A model on disk: its config and weights, in any format, or random weights. Never downloads.

Reading weights needs torch, reading the config does not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from kvrelay.paged_engine.hf_config import parse_model_config
from kvrelay.paged_engine.model_config import DTYPES, ModelConfig
from kvrelay.paged_engine.model_tensors import check_names, quantized_weights, tensor_shapes
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "INDEX",
    "dummy_tensors",
    "read_json",
    "read_model_config",
    "read_tensors",
    "weight_files",
    "weights_digest",
]

log = logging.getLogger("kvrelay.engine")

# For each file; a smaller one is read whole.
_SAMPLES, _SAMPLE_BYTES = 256, 4096


def read_model_config(model: str, load_format: str = "auto") -> ModelConfig:
    """Return the config of a folder, a .gguf file, or (load_format dummy) a config.json.

    Raises ConfigError.
    """
    path = _model_path(model, load_format)
    if path.suffix == ".gguf":
        from kvrelay.paged_engine.gguf_model import GgufFile, gguf_model_config

        return gguf_model_config(GgufFile(path))
    config = path / "config.json" if path.is_dir() else path
    if not config.exists():
        raise ConfigError(
            f"model folder {path} holds no config.json; pass a folder in Hugging Face layout or a "
            f".gguf file"
        )
    generation = config.parent / "generation_config.json"
    found = parse_model_config(
        read_json(config),
        read_json(generation) if generation.exists() else {},
        _served_name(config),
        str(config),
    )
    return replace(found, quantization=None) if load_format == "dummy" else found


def read_tensors(
    model: str, config: ModelConfig, load_format: str = "auto", device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for all names of tensor_shapes(config), in their stored dtype.

    load_format dummy puts them on `device`, others in host memory. GGUF tensors come as float32.
    Raises ConfigError for a file or tensor that is missing, unknown or misshaped.
    """
    shapes = tensor_shapes(config)
    stored = _stored(_model_path(model, load_format), config, load_format, device)
    for name, tensor in stored:
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


def _stored(
    path: Path, config: ModelConfig, load_format: str, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    from kvrelay.paged_engine.quantization import unpacked

    if load_format == "dummy":
        return dummy_tensors(config, device)
    if path.suffix == ".gguf":
        from kvrelay.paged_engine.gguf_model import GgufFile, gguf_tensors

        return gguf_tensors(GgufFile(path), config)
    stored = _safetensors(path, config)
    return stored if config.quantization is None else unpacked(stored, config)


def _model_path(model: str, load_format: str) -> Path:
    path = Path(model).expanduser()
    if not path.exists():
        raise ConfigError(
            f"model {model!r} does not exist; pass a folder in Hugging Face layout or a .gguf file"
        )
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if load_format == "dummy":
        if path.is_dir() or is_gguf or path.suffix == ".json":
            return path
        raise ConfigError(
            f"model {model!r} with load_format dummy must be a config.json, a folder or a "
            f".gguf file"
        )
    if path.is_file() and not is_gguf:
        raise ConfigError(
            f"model {model!r} holds no weights; pass its folder or a .gguf file, or use "
            f"load_format dummy"
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as why:
        raise ConfigError(f"{path} cannot be read as JSON: {why}") from why
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _served_name(config: Path) -> str:
    config = config.parent.resolve() / config.name  # the file is a link in the Hub's cache
    if config.name != "config.json":
        return config.stem
    folder = config.parent
    # Hugging Face's cache: models--org--name/snapshots/<commit>/config.json
    return (
        folder.parents[1].name.rsplit("--", 1)[-1]
        if folder.parent.name == "snapshots"
        else folder.name
    )


INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[str]:
    """Return the names of a model's safetensors: those of its index, if it has one."""
    return _files_in(_weight_map(folder))


def weights_digest(config: EngineConfig) -> str:
    """Return a digest of sizes and samples of a model's weights; nothing of random ones."""
    path, found = Path(config.model).expanduser(), blake2b(digest_size=16)
    if config.load_format == "dummy":
        return ""
    for file in [path / name for name in weight_files(path)] if path.is_dir() else [path]:
        size = file.stat().st_size
        found.update(size.to_bytes(8, "big"))
        with file.open("rb") as content:
            for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                content.seek(start)
                found.update(content.read(_SAMPLE_BYTES))
    return found.hexdigest()


def _files_in(listed: dict[str, str] | None) -> list[str]:
    return ["model.safetensors"] if listed is None else sorted(set(listed.values()))


def _weight_map(folder: Path) -> dict[str, str] | None:
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        listed = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(f"{index} is not a readable safetensors index: {why!r}") from why
    for each in listed.values():
        if not (isinstance(each, str) and each.endswith(".safetensors")):
            raise ConfigError(f"{index} names files that are no safetensors: {each}")
    return listed


def _safetensors(folder: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = {*tensor_shapes(config), *(f"{name}_scale" for name in quantized_weights(config))}
    listed = _weight_map(folder)
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        found: dict[str, tuple[str, str]] = {}
        for shard in _files_in(listed):
            path = folder / shard
            try:
                files[shard] = stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError as why:
                raise ConfigError(
                    f"{path} is missing; download the model again, or convert it to safetensors"
                ) from why
            except (SafetensorError, OSError) as why:
                raise ConfigError(f"{path} cannot be read: {why}") from why
            for name in list(files[shard].keys()):
                if listed is None or listed.get(name) == shard:
                    ours = (
                        re.sub(r"(?<=\.weight_scale)_inv$", "", name)
                        if config.quantization
                        else name
                    )
                    found[ours] = shard, name
        tied = config.tie_embeddings
        check_names([name for name in found if not _is_redundant(name, tied)], wanted, str(folder))
        reading = ""
        for name, (shard, stored) in found.items():
            if shard != reading:
                reading = shard
                log.info("%s: loading %s", config.name, shard)
            if name in wanted:
                try:
                    tensor = files[shard].get_tensor(stored)
                except (SafetensorError, OSError) as why:
                    raise ConfigError(f"{name} in {folder} cannot be read: {why}") from why
                yield name, tensor


def _is_redundant(name: str, tied: bool) -> bool:
    # Checkpoints of 2023 carry the rotary frequencies.
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


_POOL = 4_194_301
_STD = 0.02


def dummy_tensors(
    config: ModelConfig, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the config's dtype: std 0.02, norms around 1.

    Cut from one random pool: seconds, not minutes.
    """
    import torch

    generator, limit = torch.Generator().manual_seed(0), 1 << 16
    pool = torch.randint(limit, (_POOL,), generator=generator).float()
    # Integers: normal numbers would have other last bits on other CPUs.
    values = (pool - (limit - 1) / 2) * (_STD * 12**0.5 / limit)
    dtype: torch.dtype = getattr(torch, config.dtype)
    weights, norms = values.to(dtype).to(device), (1 + values).to(dtype).to(device)
    for name, shape in tensor_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        _fill(tensor.view(-1), norms if name.endswith("norm.weight") else weights, _start(name))
        yield name, tensor


def _start(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") % _POOL


def _fill(flat: torch.Tensor, pool: torch.Tensor, start: int) -> None:
    done = 0
    while done < flat.numel():
        piece = pool[start : start + flat.numel() - done]
        flat[done : done + piece.numel()] = piece
        done, start = done + piece.numel(), 0
