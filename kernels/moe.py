"""Mixture of experts in torch: the CPU path, and the twin of `kernels/grouped_gemm.py`.

Batch-invariant: an expert's products have enough rows (`kernels/linear.py`), and a token's experts
are summed in the order of its choice.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kvrelay.kernels.elementwise import act_and_mul
from kvrelay.kernels.linear import Linear

__all__ = ["Experts", "route"]


def route(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts [T, top_k] of each token, best first, and their weights in fp32.

    Weights are softmax probabilities over all experts; `renormalize` makes them sum to one.
    """
    wide = router_logits.float()
    chosen = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(-1).gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if renormalize else weights


class Experts:
    """A layer's experts: gate_up [E, 2 * I, H], down [E, H, I]; products have `min_rows`."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, min_rows: int = 1) -> None:
        self._gate_up = [Linear(weight) for weight in gate_up]
        self._down = [Linear(weight) for weight in down]
        self._min_rows = min_rows

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, act: str
    ) -> torch.Tensor:
        tokens, top_k = chosen.shape
        # A place is (token, choice). Those of one expert stand side by side in `by_expert`.
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._down)).tolist()
        results = x.new_empty(tokens * top_k, x.shape[1])
        for gate_up, down, places in zip(
            self._gate_up, self._down, torch.split(by_expert, counts), strict=True
        ):
            if len(places):
                rows = functional.pad(
                    x[places // top_k], (0, 0, 0, max(0, self._min_rows - len(places)))
                )
                results[places] = down(act_and_mul(gate_up(rows), act))[: len(places)]
        weighted = results.view(tokens, top_k, -1).float() * weights[..., None]
        total = weighted[:, 0]
        for choice in range(1, top_k):
            total = total + weighted[:, choice]
        return total.to(x.dtype)
