"""What the decoder asks of a device. There are two answers: cpu_operations.py (torch),
gpu_operations.py (Triton).

The decoder says *what* a layer computes; how much of it is fused into one kernel is the device's
business. Activations are [T, features] for the T tokens of a step; `Step` is the device's own
description of a step, which the decoder hands through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["LayerCache", "Norm", "Operations", "QkNorm"]

Step = TypeVar("Step", contravariant=True)
LayerCache = tuple[torch.Tensor, ...]
"""Keys and values of one layer, each [num_blocks, kv_heads, block_size, head_dim].

In fp8 also their scales, each [num_blocks, kv_heads, block_size].
"""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the features: an RMS norm, or with `bias` a layer norm.

    `weight` [features], or None where it is folded into the product behind it; with `plus_one` the
    factor is 1 + weight, in fp32.
    """

    weight: torch.Tensor | None
    eps: float
    bias: torch.Tensor | None = None
    plus_one: bool = False


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norms over head_dim of each query and key head; `query` and `key` are [head_dim],
    `plus_one` as in Norm.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    plus_one: bool = False


class Operations(Protocol[Step]):
    """One device's operations for one model. `Linear` objects come from `linear` and go back into
    the others.

    What is the same in all layers is not an argument but the ModelConfig's: sizes, embedding scale,
    attention scale, soft caps, activation, how many experts a token is sent to. A norm of None is
    no norm.
    """

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> Any:
        """Make y = x W^T + b ready; weight [out, in]. With `scale`, fp32 [out], the weight is fp8
        times its row's.
        """

    def output_layer(self, weight: torch.Tensor) -> Any:
        """Make this rank's rows of the output layer [vocab, hidden] ready for `logits`."""

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
        """Make a layer's experts ready; gate_up [experts, 2 * inner, hidden], down [experts,
        hidden, inner].
        """

    def folds_norms(self, dtype: torch.dtype) -> bool:
        """Whether a norm's weight shall be multiplied into the product behind it: W (g * x) = (W *
        g) x.
        """

    def embed(self, step: Step, table: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table of the step's tokens, times the embedding scale, [T, hidden]."""

    def add_positions(self, step: Step, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """hidden + the rows of `table` [positions, hidden] at the tokens' positions; may write into
        `hidden`.
        """

    def rotary(self, step: Step, cos_sin: torch.Tensor) -> Any:
        """What `rotate_and_write` needs of a table [max_positions, rotary_dim] of cosines, then
        sines, in fp32.
        """

    def norm(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """norm(hidden); may write into `hidden`."""

    def normed_linear(self, hidden: torch.Tensor, norm: Norm | None, linear: Any) -> torch.Tensor:
        """linear(norm(hidden))"""

    def rotate_and_write(
        self, step: Step, qkv: torch.Tensor, rotary: Any, qk_norm: QkNorm | None, cache: LayerCache
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values into the pool; the queries, [T,
        heads, head_dim].

        Only the first rotary_dim elements of a head are rotated, pairs (i, i + rotary_dim / 2);
        none with rotary None.
        """

    def attend(
        self, step: Step, query: torch.Tensor, cache: LayerCache, window: int
    ) -> torch.Tensor:
        """Causal attention over the paged KV, [T, heads * head_dim]; `window` tokens back, 0 for
        all.
        """

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, linear: Any) -> torch.Tensor:
        """hidden + linear(x); may write into `hidden`."""

    def add_normed_linear(
        self, hidden: torch.Tensor, x: torch.Tensor, linear: Any, norm: Norm
    ) -> torch.Tensor:
        """hidden + norm(linear(x)); may write into `hidden`."""

    def gated_linear(self, hidden: torch.Tensor, norm: Norm | None, linear: Any) -> torch.Tensor:
        """act(gate) * up of linear(norm(hidden)) = [gate, up], act being the model's; [T,
        intermediate].
        """

    def relu_linear(self, hidden: torch.Tensor, norm: Norm | None, linear: Any) -> torch.Tensor:
        """relu(linear(norm(hidden))), [T, intermediate]."""

    def add_experts(
        self, hidden: torch.Tensor, norm: Norm, router: Any, experts: Any
    ) -> torch.Tensor:
        """hidden + the weighted sum of the experts that router(norm(hidden)) chooses for each
        token, of norm(hidden).

        `router` comes from `linear`, `experts` from `experts`. May write into `hidden`.
        """

    def sampled(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """The rows of x that are sampled, [S, features]."""

    def barrier(self, x: torch.Tensor) -> None:
        """No rank gets past this before all have come so far; `x` is on the device."""

    def logits(self, x: torch.Tensor, linear: Any) -> torch.Tensor:
        """The output layer and its soft cap, [S, vocab], in the dtype that this device's sampler
        reads.
        """
