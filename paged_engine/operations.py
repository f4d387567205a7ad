"""What the decoder asks of a device. There are two answers: cpu_operations.py (torch), gpu_operations.py (Triton).

The decoder says *what* a layer computes; how much of it is fused into one kernel is the device's business. Activations
are [T, features] for the T tokens of a step; `Step` is the device's own description of a step, which the decoder hands
through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["LayerCache", "Norm", "Operations", "QkNorm"]

Step = TypeVar("Step", contravariant=True)
LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, kv_heads, block_tokens, head_dim]."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm over the features. `weight` [features], or None where it is folded into the product behind it."""

    weight: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norms over head_dim of each query and key head; `query` and `key` are [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Operations(Protocol[Step]):
    """One device's operations. `Linear` objects come from `linear` and go back into the others."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """Make y = x W^T + b ready; weight [out, in]."""

    def folds(self, dtype: torch.dtype) -> bool:
        """Whether a norm's weight shall be multiplied into the product behind it: W (g * x) = (W * g) x."""

    def embed(self, step: Step, table: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table of the step's tokens, [T, hidden]."""

    def rotary(self, step: Step, cos_sin: torch.Tensor) -> Any:
        """What `rotate_and_write` needs of a table [max_positions, rotary_dim] of cosines, then sines, in fp32."""

    def normed_linear(self, hidden: torch.Tensor, norm: Norm, linear: Any) -> torch.Tensor:
        """linear(norm(hidden))"""

    def rotate_and_write(
        self, step: Step, qkv: torch.Tensor, rotary: Any, qk_norm: QkNorm | None, cache: LayerCache
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values into the pool; the queries, [T, heads, head_dim]."""

    def attend(self, step: Step, query: torch.Tensor, cache: LayerCache, window: int) -> torch.Tensor:
        """Causal attention over the paged KV, [T, heads * head_dim]; `window` tokens back, 0 for all."""

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, linear: Any) -> torch.Tensor:
        """hidden + linear(x); may write into `hidden`."""

    def gated_linear(self, hidden: torch.Tensor, norm: Norm, linear: Any) -> torch.Tensor:
        """silu(gate) * up of linear(norm(hidden)) = [gate, up]; [T, intermediate]."""

    def final_norm(self, step: Step, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm of the rows that are sampled, [S, hidden]."""

    def logits(self, x: torch.Tensor, linear: Any) -> torch.Tensor:
        """The output layer, [S, vocab], in the dtype that this device's sampler reads."""
