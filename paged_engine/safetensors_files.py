"""Weights from a folder with model.safetensors, or with shards and their index. Converts and
downloads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.paged_engine.model_tensors import check_names
from kvrelay.wire.errors import ConfigError

__all__ = ["safetensors_tensors"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def safetensors_tensors(
    folder: Path,
    wanted: Collection[str],
    *,
    tied: bool,
    canonical: Callable[[str], str] = str,
    passed_over: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for all wanted names, file by file, each read when it is asked for.

    `canonical` makes a stored name one of the wanted; names that are `passed_over` may be there.
    With `tied` embeddings a stored lm_head is a copy of the embedding and is skipped. Raises
    ConfigError naming the file that is missing or broken, or the tensor that is missing or unknown.
    """
    files = _files(folder)
    found = [canonical(name) for names in files.values() for name in names if not passed_over(name)]
    check_names([name for name in found if not _is_redundant(name, tied)], wanted, str(folder))
    for path, names in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    if canonical(name) in wanted:
                        yield canonical(name), file.get_tensor(name)
        except (SafetensorError, OSError) as why:
            raise ConfigError(f"{path} cannot be read: {why}") from why


def _is_redundant(name: str, tied: bool) -> bool:
    # Checkpoints of 2023 still carry the rotary frequencies, which follow from the config.
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _files(folder: Path) -> dict[Path, list[str]]:
    """Tensor names of each file."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.exists():
        return _sharded(index)
    if not single.exists():
        raise ConfigError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}; download or convert the weights to "
            f"safetensors"
        )
    try:
        with safe_open(single, framework="pt") as file:
            return {single: list(file.keys())}
    except (SafetensorError, OSError) as why:
        raise ConfigError(f"{single} cannot be read: {why}") from why


def _sharded(index: Path) -> dict[Path, list[str]]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[Path, list[str]] = {}
        for name, shard in weight_map.items():
            files.setdefault(index.parent / shard, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as why:
        raise ConfigError(f"{index} is not a readable safetensors index: {why!r}") from why
    for path in files:
        if not path.exists():
            raise ConfigError(
                f"shard {path} is missing, though {_INDEX} names it; download the model again"
            )
    return files
