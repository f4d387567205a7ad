"""The CPU's mixture of experts: its sums, its routing, and that a row's bits do not depend on its
company.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvrelay.kernels.decoder_layer import Experts, Linear, fewest_invariant_rows, route
from tests.kernels.twins import moe


def inputs(
    tokens: int, experts: int, hidden: int = 64, inner: int = 48
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens * experts)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    x, logits = random(tokens, hidden) * hidden**0.5, random(tokens, experts) * experts**0.5
    return x, logits, random(experts, 2 * inner, hidden), random(experts, hidden, inner)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 4, 1), (7, 4, 2), (40, 8, 3), (5, 8, 8)]
)
def test_it_is_the_weighted_sum_that_the_formula_says(
    tokens: int, experts: int, top_k: int, renormalize: bool
) -> None:
    x, logits, gate_up, down = (each.double() for each in inputs(tokens, experts))
    ours = moe(
        x.float(),
        logits.float(),
        gate_up.float(),
        down.float(),
        top_k=top_k,
        renormalize=renormalize,
    )
    gate, up = torch.einsum("th,ejh->tej", x, gate_up).chunk(2, dim=-1)
    each = torch.einsum("tei,ehi->teh", functional.silu(gate) * up, down)
    weights = logits.softmax(-1)
    weights = weights.where(logits >= logits.topk(top_k).values[:, -1:], 0.0)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    assert torch.allclose(ours.double(), torch.einsum("te,teh->th", weights, each), atol=1e-5)


def test_of_equal_logits_the_lower_expert_is_chosen() -> None:
    chosen, weights = route(
        torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2, renormalize=True
    )
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert torch.equal(weights, torch.full((2, 2), 0.5))


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    x, logits, gate_up, down = inputs(130, 4)
    rows = max(
        fewest_invariant_rows(Linear(weight[0]), torch.float32) for weight in (gate_up, down)
    )
    experts = Experts(gate_up, down, rows)

    def run(selected: torch.Tensor) -> torch.Tensor:
        return experts(x[selected], *route(logits[selected], 2, True), "gelu_tanh")

    whole = run(torch.arange(130))
    for size in (1, 2, 3, 5, 8, 17, 64):
        selected = torch.randperm(130, generator=torch.Generator().manual_seed(size))[:size]
        assert torch.equal(run(selected), whole[selected]), size
