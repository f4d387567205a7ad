"""LoRA adapters on disk, in PEFT's layout: matrices and a digest.

What is not served and would change answers is refused. Never unpickles. Source: Hu et al., "LoRA:
Low-rank adaptation of large language models", 2021.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from safetensors import SafetensorError, safe_open

from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_files import read_json
from kvrelay.paged_engine.model_tensors import stored_weights, weight_shapes
from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Adapter", "Matrices", "check_adapter", "read_adapter"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_BEFORE_LAYERS = ("", "model.", "model.decoder.", "language_model.model.", "model.language_model.")
# Fields that are refused unless empty.
_NOT_SERVED = {
    "use_dora": "DoRA",
    "bias": "biases",
    "lora_bias": "biases",
    "modules_to_save": "whole modules beside its matrices",
    "trainable_token_indices": "embeddings of its own",
    "target_parameters": "parameters other than linear layers (a mixture's experts)",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
}
# Initializations that change the base model's weights.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")

# Fields that change what an adapter computes.
_DECISIVE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")

Matrices: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""A [rank, in] and B [out, rank] of one projection, which adds B (A x); B is scaled."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's matrices by projection, such as model.layers.0.self_attn.q_proj.

    `rank` is the highest of them; `digest` covers what it computes.
    """

    digest: str
    rank: int
    modules: Mapping[str, Matrices]


def check_adapter(path: str, max_rank: int) -> None:
    rank = _read_config(Path(path))["r"]
    if rank > max_rank:
        raise _rank_above(path, rank, max_rank)


def read_adapter(path: str, model: ModelConfig, max_rank: int) -> Adapter:
    """Return the adapter in a folder, checked against the whole model. Raises ConfigError."""
    folder = Path(path)
    config = _read_config(folder)
    decisive = {name: config.get(name) or None for name in _DECISIVE}
    digest = blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=16)
    modules: dict[str, Matrices] = {}
    try:
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            for module, pair in _pairs(list(file.keys()), folder).items():
                read = {half: file.get_tensor(key) for half, key in pair.items()}
                modules |= _placed(module, read["A"], read["B"], config, model, max_rank, folder)
        with (folder / _WEIGHTS).open("rb") as raw:
            while piece := raw.read(1 << 22):
                digest.update(piece)
    except (SafetensorError, OSError, ArithmeticError, RuntimeError, TypeError, ValueError) as why:
        # Also numbers of the config that are none: an engine survives whatever a folder holds.
        raise ConfigError(f"adapter {folder} cannot be read: {why}") from why
    if not modules:
        raise ConfigError(f"adapter {folder} holds no matrices")
    return Adapter(digest.hexdigest(), max(len(a) for a, _ in modules.values()), modules)


def _rank_above(folder: Path | str, rank: int, max_rank: int) -> ConfigError:
    return ConfigError(
        f"adapter {folder} has rank {rank} and max_lora_rank is {max_rank}; raise it to {rank}"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if not os.path.exists(folder / _CONFIG):  # Path.exists raises on names that are too long
        raise ConfigError(f"adapter {folder} has no {_CONFIG}; pass a folder in PEFT's layout")
    if not (folder / _WEIGHTS).exists():
        pickled = (
            " and a .bin file is not read, because it could run code"
            if any(folder.glob("*.bin"))
            else ""
        )
        raise ConfigError(f"adapter {folder} has no {_WEIGHTS}{pickled}; save it as safetensors")
    config = read_json(folder / _CONFIG)
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"adapter {folder} has peft_type {config.get('peft_type')!r}; LORA is served"
        )
    for field, what in _NOT_SERVED.items():
        if config.get(field) not in (None, False, "none", [], {}, ""):
            raise ConfigError(
                f"adapter {folder} has {what} ({field}), which is not served; train it without"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        raise ConfigError(
            f"adapter {folder} was initialized by {start}, which changes the base model's weights; "
            "convert it to a plain LoRA when saving it (path_initial_model_for_weight_conversion)"
        )
    for field, kind in (("r", int), ("lora_alpha", (int, float))):
        if (
            not isinstance(config.get(field), kind)
            or isinstance(config[field], bool)
            or config[field] <= 0
        ):
            raise ConfigError(
                f"{folder / _CONFIG}: {field} must be a positive number, got {config.get(field)!r}"
            )
    return config


def _pairs(keys: list[str], folder: Path) -> dict[str, dict[str, str]]:
    pairs: dict[str, dict[str, str]] = {}
    for key in sorted(keys):
        found = _KEY.fullmatch(key)
        if found is None:
            raise ConfigError(
                f"adapter {folder} has tensor {key}, which is none of a LoRA's matrices; embeddings, "
                "biases, whole modules and DoRA are not served"
            )
        pairs.setdefault(found[1], {})[found[2]] = key
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise ConfigError(
                f"adapter {folder} has only lora_{min(pair)} of {module}; save it again"
            )
    return pairs


def _placed(
    module: str,
    a: torch.Tensor,
    b: torch.Tensor,
    config: Mapping[str, Any],
    model: ModelConfig,
    max_rank: int,
    folder: Path,
) -> dict[str, Matrices]:
    ours = _our_names(module, model, folder)
    rows, columns = [shape[0] for shape in ours.values()], next(iter(ours.values()))[1]
    wanted = _by_pattern(config, "rank_pattern", module, config["r"])
    if (
        a.dim() != 2
        or b.dim() != 2
        or a.shape[1] != columns
        or b.shape[0] != sum(rows)
        or a.shape[0] != b.shape[1]
    ):
        raise ConfigError(
            f"adapter {folder}: A and B of {module} are {tuple(a.shape)} and {tuple(b.shape)}, and "
            f"{model.name} wants (rank, {columns}) and ({sum(rows)}, rank); it was trained for "
            f"{config.get('base_model_name_or_path')!r}"
        )
    rank = a.shape[0]
    if rank != wanted:
        raise ConfigError(
            f"adapter {folder}: {module} has rank {rank}, and {_CONFIG} says {wanted}"
        )
    if rank > max_rank:
        raise _rank_above(folder, rank, max_rank)
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ConfigError(
            f"adapter {folder}: {module} is {a.dtype}; floating-point matrices are served"
        )
    alpha = _by_pattern(config, "alpha_pattern", module, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return dict(zip(ours, ((a, part) for part in (b.float() * scale).split(rows)), strict=True))


def _our_names(module: str, model: ModelConfig, folder: Path) -> dict[str, tuple[int, ...]]:
    before, layers, rest = module.partition("layers.")
    if ".experts." in module:
        raise ConfigError(
            f"adapter {folder} has matrices for a mixture's experts ({module}), which are not "
            "served; train it for attention's projections only"
        )
    places = _places(replace(model, quantization=None))
    if before not in _BEFORE_LAYERS or not layers or rest not in places:
        raise ConfigError(
            f"adapter {folder} is for module {module}, which {model.name} does not have or which "
            f"takes no adapter; served are {', '.join(_TARGETS)}, and it was trained for another "
            "model if its names differ"
        )
    return places[rest]


@lru_cache(1)  # 1 ms and more for each of hundreds of modules
def _places(model: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    shapes = weight_shapes(model)
    return {
        theirs.removesuffix(".weight").partition("layers.")[2]: {
            name.removesuffix(".weight"): shapes[name] for name in ours
        }
        for theirs, ours in stored_weights(model).items()
        if theirs.endswith(".weight") and ours[0].split(".")[-2] in _TARGETS
    }


def _by_pattern(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    patterns = config.get(field) or {}
    try:
        return next(
            (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)),
            default,
        )
    except (re.error, AttributeError) as why:
        raise ConfigError(
            f"{_CONFIG}: {field} {patterns!r} is not a mapping of patterns: {why}"
        ) from why
