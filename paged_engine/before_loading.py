"""What is known before a weight is downloaded or read: the device, and whether it can serve the model as configured.

Refuses early what would be refused late: needs the settings and config.json alone (of a GGUF model its header). What
fits into a GPU's memory is gpu_memory.py's business. Takes no memory of a GPU, so that any process may ask.
"""

from __future__ import annotations

import os

import torch

from paged_engine.kv_pool import CPU_POOL_BYTES, FP8, blocks_in, default_block_tokens, longest_context
from paged_engine.model_config import ModelConfig
from paged_engine.model_files import read_model_config
from paged_engine.sharding import shard_config
from wire.config import EngineConfig
from wire.errors import ConfigError

__all__ = ["check_engine", "checked_model", "choose_device", "compute_dtype", "refuse_fp8"]


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError if this host's ranks of the engine cannot work as configured."""
    ranks = config.tensor_parallel_local or config.tensor_parallel
    checked_model(config, choose_device(config.device, ranks - 1))


def choose_device(wanted: str, index: int | None = None) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` stands for; `index` chooses among the GPUs. Raises ConfigError."""
    # Streams share a GPU's 8 work queues, and one that waits for a peer would hold up another's steps. CUDA reads this
    # when it begins.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda was asked for, but torch sees no GPU; use --device cpu or install a CUDA build of torch"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"{index + 1} ranks here need {index + 1} GPUs, and this host shows {torch.cuda.device_count()}; lower "
            "tensor_parallel, or tensor_parallel_local and start the other ranks elsewhere with `kvrelay rank`"
        )
    return torch.device("cuda", index)


def checked_model(config: EngineConfig, device: torch.device) -> ModelConfig:
    """The model, whole. Raises ConfigError if a device of this kind cannot serve it as configured."""
    model = read_model_config(config.model, config.load_format)
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's own limit of {model.max_position}; lower it"
        )
    shard = shard_config(model, config.tensor_parallel)
    dtype = compute_dtype(config, model, device)
    if device.type == "cpu" and (config.kv_cache_dtype != "auto" or config.quantization):
        raise ConfigError("kv_cache_dtype fp8 and quantization fp8 need a GPU; leave them out on a CPU")
    pool_bytes = config.kv_cache_memory or (CPU_POOL_BYTES if device.type == "cpu" else 0)
    if pool_bytes:  # on a GPU the rest is measured
        block_tokens = config.block_tokens or default_block_tokens(device)
        dtype = FP8 if config.kv_cache_dtype == "fp8" else dtype
        num_blocks = blocks_in(shard, pool_bytes=pool_bytes, block_tokens=block_tokens, dtype=dtype)
        longest_context(config.max_model_len, shard, num_blocks=num_blocks, block_tokens=block_tokens, dtype=dtype)
    return model


def compute_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """What the model is computed in. Raises ConfigError if the device does not serve the dtype asked for."""
    wanted = config.dtype
    if device.type == "cpu":
        # fp32 unless asked otherwise: bf16 products are ten times slower on CPUs without bf16 units.
        wanted = "float32" if wanted == "auto" else wanted
    elif wanted == "float32":
        raise ConfigError("dtype float32 is not served on a GPU; use bfloat16, float16 or auto, or device cpu")
    elif wanted == "auto":
        wanted = "bfloat16" if model.dtype == "float32" else model.dtype
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def refuse_fp8(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError if fp8 is asked of a GPU that has none."""
    in_fp8 = config.kv_cache_dtype == "fp8" or config.quantization == "fp8"
    capability = torch.cuda.get_device_capability(device)
    if in_fp8 and capability < (8, 9):
        raise ConfigError(
            f"fp8 needs a GPU of compute capability 8.9 or more, {torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}; leave out kv_cache_dtype and quantization"
        )
