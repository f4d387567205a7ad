"""Measure how much of a GPU is left for the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.paged_engine.before_loading import RESERVE_BYTES
from kvrelay.wire.config_checks import gib
from kvrelay.wire.errors import ConfigError

__all__ = ["GpuBudget"]


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """A share of a GPU's memory, measured before anything is allocated."""

    device: torch.device
    total_bytes: int
    free_bytes: int  # when the process began
    allowed_bytes: int

    @classmethod
    def measure(cls, device: torch.device, utilization: float) -> GpuBudget:
        """Raise ConfigError if less than the allowed share of the card is free."""
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * utilization)
        if allowed > free:
            raise ConfigError(
                f"gpu_memory_utilization {utilization:g} asks for {gib(allowed)} of {gib(total)}, "
                f"but only {gib(free)} are free on {device}; lower it to at most "
                f"{free / total:.2f} or end what else runs there"
            )
        return cls(device, total, free, allowed)

    def check_weights(self, least_bytes: int) -> None:
        """Raise ConfigError if weights of that size leave nothing, before they are loaded."""
        if least_bytes >= self.allowed_bytes:
            raise ConfigError(
                f"the weights need at least {gib(least_bytes)} on each GPU, and "
                f"gpu_memory_utilization allows {gib(self.allowed_bytes)} of "
                f"{gib(self.total_bytes)}; raise it, use quantization fp8, or spread the model "
                "over more GPUs with tensor_parallel_size"
            )

    def _needed(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        outside_torch = self.free_bytes - free - torch.cuda.memory_reserved(self.device)
        return torch.cuda.max_memory_allocated(self.device) + max(0, outside_torch) + RESERVE_BYTES

    def left_for_kv(self) -> int:
        """Return the bytes left for KV after the largest step. Raises ConfigError if none."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        left = self.allowed_bytes - self._needed()
        if left <= 0:
            raise ConfigError(
                "nothing is left for the KV cache: the weights and a step need "
                f"{gib(self._needed())}, and gpu_memory_utilization allows "
                f"{gib(self.allowed_bytes)} of {gib(self.total_bytes)}. Raise it, lower "
                "max_num_batched_tokens or max_num_seqs, or spread the model over more GPUs"
            )
        return left

    def check(self, pool_bytes: int) -> None:
        """Raise ConfigError if a KV pool of a size that the operator named does not fit."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        spare = (
            free
            - RESERVE_BYTES
            - (
                torch.cuda.max_memory_allocated(self.device)
                - torch.cuda.memory_reserved(self.device)
            )
        )
        if pool_bytes > spare:
            raise ConfigError(
                f"a KV pool of {gib(pool_bytes)} does not fit: beside the weights and a step "
                f"{gib(max(0, spare))} are free; lower kv_cache_memory_bytes"
            )

    def report(self, tokens: int) -> str:
        free, _ = torch.cuda.mem_get_info(self.device)
        return (
            f"GPU memory: {gib(self.free_bytes - free)} of {gib(self.total_bytes)} in use, the KV "
            f"pool holds {tokens} tokens"
        )
