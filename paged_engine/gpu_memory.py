"""How much of a GPU goes to the KV pool: what the operator allows, less what was measured to be needed beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paged_engine.model_config import ModelConfig
from paged_engine.model_tensors import weight_shapes
from wire.errors import ConfigError

__all__ = ["GpuBudget", "least_weight_bytes"]

# CUDA graphs, their memory pool, allocator rounding and what libraries allocate late.
_RESERVE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """Made before anything is allocated."""

    device: torch.device
    total_bytes: int
    free_bytes: int  # when the process began
    allowed_bytes: int

    @classmethod
    def of(cls, device: torch.device, utilization: float) -> GpuBudget:
        """Raises ConfigError if less than the allowed share of the card is free."""
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * utilization)
        if allowed > free:
            raise ConfigError(
                f"gpu_memory_utilization {utilization:g} asks for {_gib(allowed)} of {_gib(total)}, but only "
                f"{_gib(free)} are free on {device}; lower it to at most {free / total:.2f} or end what else runs there"
            )
        return cls(device, total, free, allowed)

    def check_weights(self, least_bytes: int) -> None:
        """Raise ConfigError if weights of that size leave nothing, before minutes are spent on loading them."""
        if least_bytes >= self.allowed_bytes:
            raise ConfigError(
                f"the weights need at least {_gib(least_bytes)} on each GPU, and gpu_memory_utilization allows "
                f"{_gib(self.allowed_bytes)} of {_gib(self.total_bytes)}; raise it, use quantization fp8, or spread "
                "the model over more GPUs with tensor_parallel"
            )

    def _needed(self) -> int:
        """The most that was in use at once since the process began: torch's own, and the driver's and libraries'."""
        free, _ = torch.cuda.mem_get_info(self.device)
        outside_torch = self.free_bytes - free - torch.cuda.memory_reserved(self.device)
        return torch.cuda.max_memory_allocated(self.device) + max(0, outside_torch) + _RESERVE_BYTES

    def left_for_kv(self) -> int:
        """Bytes for the KV pool, after the largest step has run. Raises ConfigError if nothing is left."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        left = self.allowed_bytes - self._needed()
        if left <= 0:
            raise ConfigError(
                f"nothing is left for the KV cache: the weights and a step need {_gib(self._needed())}, and "
                f"gpu_memory_utilization allows {_gib(self.allowed_bytes)} of {_gib(self.total_bytes)}. Raise it, "
                "lower max_batched_tokens or max_running, or spread the model over more GPUs"
            )
        return left

    def check(self, pool_bytes: int) -> None:
        """Raise ConfigError if a KV pool of a size that the operator named does not fit on the card."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        spare = (
            free
            - _RESERVE_BYTES
            - (torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_reserved(self.device))
        )
        if pool_bytes > spare:
            raise ConfigError(
                f"a KV pool of {_gib(pool_bytes)} does not fit: beside the weights and a step {_gib(max(0, spare))} "
                "are free; lower kv_cache_memory"
            )

    def report(self, tokens: int) -> str:
        """One line for the log."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return (
            f"GPU memory: {_gib(self.free_bytes - free)} of {_gib(self.total_bytes)} in use, the KV pool holds "
            f"{tokens} tokens"
        )


def least_weight_bytes(config: ModelConfig, ranks: int, *, quantize: bool) -> int:
    """Bytes that the weights of one of `ranks` ranks take at least; `config` has the sizes of that rank.

    `quantize`: linear layers become fp8 while loading; the small ones and experts do not, but all are counted so.
    """
    total, shapes = 0, weight_shapes(config)
    for name, shape in shapes.items():
        in_fp8 = f"{name}_scale" in shapes or (quantize and len(shape) == 2 and name.startswith("model.layers."))
        share = ranks if name == "lm_head.weight" else 1  # cut by rows
        total += math.prod(shape) * (1 if in_fp8 else 2) // share
    return total


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
