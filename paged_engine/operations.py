"""Operations that the decoder asks of a device: cpu_operations.py or gpu_operations.py.

Activations are [T, features] for the T tokens of a step; `Step` is the device's own type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["LayerCache", "Norm", "Operations", "QkNorm"]

Step = TypeVar("Step", contravariant=True)
LayerCache = tuple[torch.Tensor, ...]
"""One layer's keys and values, each [num_blocks, kv_heads, block_size, head_dim].

In fp8 also their scales, each [num_blocks, kv_heads, block_size].
"""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm over the features, or with `bias` a layer norm.

    `weight` [features] is None where it is folded into the next product; with `plus_one` the factor
    is 1 + weight, in fp32.
    """

    weight: torch.Tensor | None
    eps: float
    bias: torch.Tensor | None = None
    plus_one: bool = False


@dataclass(frozen=True, slots=True)
class QkNorm:
    """A pair of RMS norms of query and key heads; `query` and `key` are [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    plus_one: bool = False


class Operations(Protocol[Step]):
    """A device's operations for one model. `Linear` objects come from `linear`.

    Sizes, scales, soft caps, activation and experts per token are the ModelConfig's. Results may be
    written into `hidden`. A norm of None is no norm.
    """

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> Any:
        """Prepare y = x W^T + b; weight [out, in]. `scale` fp32 [out] makes the weight fp8."""

    def output_layer(self, weight: torch.Tensor) -> Any:
        """Prepare this rank's rows of the output layer [vocab, hidden] for `logits`."""

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
        """Prepare experts; gate_up [experts, 2 * inner, hidden], down [experts, hidden, inner]."""

    def folds_norms(self, dtype: torch.dtype) -> bool:
        """Return whether norm weights go into the next product: W (g * x) = (W * g) x."""

    def embed(self, step: Step, table: torch.Tensor) -> torch.Tensor: ...

    def add_positions(self, step: Step, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return hidden + the rows of `table` at the tokens' positions."""

    def rotary(self, step: Step, cos_sin: torch.Tensor) -> Any:
        """Prepare a table [max_positions, rotary_dim] of fp32 cosines, then sines."""

    def norm(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor: ...

    def normed_linear(
        self, hidden: torch.Tensor, norm: Norm | None, linear: Any
    ) -> torch.Tensor: ...

    def rotate_and_write(
        self, step: Step, qkv: torch.Tensor, rotary: Any, qk_norm: QkNorm | None, cache: LayerCache
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values; return queries.

        Queries are [T, heads, head_dim]. Pairs (i, i + rotary_dim / 2) are rotated; none with
        rotary None.
        """

    def attend(
        self, step: Step, query: torch.Tensor, cache: LayerCache, window: int
    ) -> torch.Tensor:
        """Return causal attention, [T, heads * head_dim], `window` tokens back or 0 for all."""

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, linear: Any) -> torch.Tensor: ...

    def add_normed_linear(
        self, hidden: torch.Tensor, x: torch.Tensor, linear: Any, norm: Norm
    ) -> torch.Tensor: ...

    def gated_linear(self, hidden: torch.Tensor, norm: Norm | None, linear: Any) -> torch.Tensor:
        """Return act(gate) * up of linear(norm(hidden)) = [gate, up], [T, intermediate]."""

    def relu_linear(self, hidden: torch.Tensor, norm: Norm | None, linear: Any) -> torch.Tensor: ...

    def add_experts(
        self, hidden: torch.Tensor, norm: Norm, router: Any, experts: Any
    ) -> torch.Tensor:
        """Return hidden + the weighted sum of the experts that router(norm(hidden)) chooses."""

    def sampled(self, step: Step, x: torch.Tensor) -> torch.Tensor: ...

    def barrier(self, x: torch.Tensor) -> None:
        """Let no rank get past this before all have come so far; `x` is on the device."""

    def logits(self, x: torch.Tensor, linear: Any) -> torch.Tensor:
        """Return the output layer with its soft cap, [S, vocab], in the sampler's dtype."""
