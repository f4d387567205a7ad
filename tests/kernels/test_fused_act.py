"""Activations in Triton: fp32 arithmetic rounded once, strided rows, relu in place."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels.elementwise import act_and_mul as act_and_mul_twin
from tests.kernels.rounding import assert_same, exact_rounding, poisoned, randn

fused = pytest.importorskip("kvrelay.kernels.fused_elementwise", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures(exact_rounding.__name__)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
gpu = pytest.mark.gpu
SHAPES = [
    (1, 64), (3, 150), (2, 1030), *(
        pytest.param(*shape, marks=gpu)
        for shape in [(1, 14336), (32, 14336), (8192, 14336), (5, 1536), (7, 8960), (3, 29568), (2, 36864), (2, 53248)]
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "inner"), SHAPES)
def test_act_and_mul(device, tokens, inner, act, dtype):
    if tokens * inner > 1 << 26 and dtype != torch.bfloat16:
        pytest.skip("large in bf16 only")
    gate_up = randn(tokens, 2 * inner, seed=tokens + inner, dtype=dtype, device=device, scale=3.0)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.5], dtype=dtype, device=device)
    out = poisoned(tokens, inner, dtype=dtype, device=device)
    assert fused.act_and_mul(gate_up, act, out=out) is out
    assert_same(out, act_and_mul_twin(gate_up.double(), act).to(dtype))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_rows_of_wider_tensors(device, act):
    wide, target = (randn(5, 700, seed=s, dtype=torch.bfloat16, device=device) for s in (1, 2))
    beside = target[:, 100:].clone()
    fused.act_and_mul(wide[:, 40:240], act, out=target[:, :100])
    assert_same(target[:, :100].clone(), act_and_mul_twin(wide[:, 40:240].double(), act).bfloat16())
    assert torch.equal(target[:, 100:], beside)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_in_place(device, dtype):
    x = randn(3, 777, seed=6, dtype=dtype, device=device)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, -0.0], dtype=dtype, device=device)
    x[2, 776] = torch.nan
    expected = x.relu()
    assert fused.relu(x) is x
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused(device):
    gate_up = torch.zeros(2, 64, device=device)
    with pytest.raises(ValueError, match="activation"):
        fused.act_and_mul(gate_up, "gelu")
    with pytest.raises(ValueError, match="fit"):
        fused.act_and_mul(gate_up, "silu", out=torch.empty(2, 64, device=device))
    with pytest.raises(ValueError, match="contiguous"):
        fused.relu(gate_up[:, :5])
    assert fused.act_and_mul(gate_up[:0], "silu").shape == (0, 32)


@gpu
def test_beyond_4_gib(device):
    gate_up = torch.ones(80_000, 28672, dtype=torch.bfloat16, device=device)
    gate_up[-1] = randn(28672, seed=7, dtype=gate_up.dtype, device=device)
    expected = act_and_mul_twin(gate_up[-1:].float(), "silu").bfloat16()
    assert_same(fused.act_and_mul(gate_up, "silu")[-1:], expected)
    wanted = gate_up[-1].relu()
    assert torch.equal(fused.relu(gate_up)[-1], wanted)


@gpu
def test_dependent_launch_changes_nothing(device):
    gate_up, inner = torch.empty(8, 2048, dtype=torch.bfloat16, device=device), []

    def chain(pdl):
        made = fused.act_and_mul(gate_up, "silu", pdl=pdl)
        for _ in range(3):
            made = fused.relu(
                fused.act_and_mul(torch.cat((made, made), 1), "gelu_tanh", pdl=pdl), pdl=pdl
            )
        return made

    gate_up.normal_()
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner.append(chain(True))
    for _ in range(50):
        gate_up.normal_()
        graph.replay()
        assert torch.equal(inner[0], chain(False))
