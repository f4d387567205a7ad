"""The device of a rank, as torch sees it. Takes no memory of a GPU."""

from __future__ import annotations

import os

import torch

from kvrelay.paged_engine.before_loading import checked_model
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError

__all__ = ["check_engine", "choose_device", "refuse_fp8"]


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError if this host's ranks of the engine cannot work as configured."""
    ranks = config.tensor_parallel_size_local or config.tensor_parallel_size
    checked_model(config, choose_device(config.device, ranks - 1).type)


def choose_device(wanted: str, index: int | None = None) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` stands for; `index` chooses among the GPUs. Raises
    ConfigError.
    """
    # Streams share a GPU's 8 work queues, and one that waits for a peer would hold up another's
    # steps. CUDA reads this when it begins.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda was asked for, but torch sees no GPU; use --device cpu or install a CUDA "
            "build of torch"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"{index + 1} ranks here need {index + 1} GPUs, and this host shows "
            f"{torch.cuda.device_count()}; lower "
            "tensor_parallel_size, or tensor_parallel_size_local and start other ranks elsewhere "
            "with `kvrelay rank`"
        )
    return torch.device("cuda", index)


def refuse_fp8(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError if fp8 is asked of a GPU that has none."""
    in_fp8 = config.kv_cache_dtype == "fp8" or config.quantization == "fp8"
    capability = torch.cuda.get_device_capability(device)
    if in_fp8 and capability < (8, 9):
        raise ConfigError(
            f"fp8 needs a GPU of compute capability 8.9 or more, "
            f"{torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}; leave out kv_cache_dtype and quantization"
        )
