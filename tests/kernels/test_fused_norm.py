"""Norms in Triton: equal to the torch references, for every row width; the residual's sum is in
place.
"""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels.elementwise import layer_norm as layer_norm_twin
from kvrelay.kernels.elementwise import quantize_e4m3
from kvrelay.kernels.elementwise import rms_norm as rms_norm_twin
from tests.kernels.rounding import assert_same, exact_rounding, poisoned, poisoned_memory, randn

fused = pytest.importorskip("kvrelay.kernels.fused_elementwise", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures(exact_rounding.__name__)
in_poisoned_memory = pytest.mark.usefixtures(poisoned_memory.__name__)

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
gpu = pytest.mark.gpu
SHAPES = [
    (1, 64), (3, 70), (5, 256), (2, 770), *(
        pytest.param(*shape, marks=gpu)
        for shape in [
            (1, 2), (1, 4096), (7, 576), (33, 768), (256, 4096), (17, 5120), (9, 8192), (5, 16384), (8192, 4096),
        ]
    ),
]  # fmt: skip


def _inputs(tokens, hidden, dtype, device, seed):
    x = randn(tokens, hidden, seed=seed, dtype=dtype, device=device)
    residual = randn(tokens, hidden, seed=seed + 1, dtype=dtype, device=device, scale=3.0)
    weight = randn(hidden, seed=seed + 2, dtype=dtype, device=device)
    bias = randn(hidden, seed=seed + 3, dtype=dtype, device=device)
    return x, residual, weight, bias


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_adds_to_the_residual_in_place(device, tokens, hidden, plus_one, dtype):
    x, residual, weight, _ = _inputs(tokens, hidden, dtype, device, seed=tokens * hidden)
    before, total = x.clone(), residual + x
    out = fused.rms_norm(x, weight, EPS, residual=residual, plus_one=plus_one)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    assert_same(out, rms_norm_twin(total, weight, EPS, plus_one=plus_one))


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_alone_and_without_weight(device, tokens, hidden, dtype):
    x, _, weight, _ = _inputs(tokens, hidden, dtype, device, seed=3)
    assert_same(fused.rms_norm(x, None, EPS), rms_norm_twin(x, None, EPS))
    assert_same(fused.rms_norm(x, None, EPS, plus_one=True), rms_norm_twin(x, None, EPS))
    assert_same(fused.rms_norm(x, weight, EPS), rms_norm_twin(x, weight, EPS))


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_layer_norm(device, tokens, hidden, dtype):
    x, _, weight, bias = _inputs(tokens, hidden, dtype, device, seed=4)
    x = x + 5  # a mean that matters
    assert_same(fused.layer_norm(x, weight, bias, EPS), layer_norm_twin(x, weight, bias, EPS))


@in_poisoned_memory
def test_rows_of_wider_tensors(device):
    wide, stream = (randn(5, 300, seed=s, dtype=torch.float16, device=device) for s in (6, 7))
    x, residual, weight = wide[:, 100:200], stream[:, :100], wide[0, :100].clone()
    total, beside = residual + x, (stream[:, 100:].clone(), wide.clone())
    assert_same(
        fused.rms_norm(x, weight, EPS, residual=residual), rms_norm_twin(total, weight, EPS)
    )
    assert torch.equal(residual, total)
    assert all(map(torch.equal, beside, (stream[:, 100:], wide)))


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden"), [(3, 70), (4, 256), pytest.param(64, 4096, marks=gpu)]
)
def test_fp8_output_is_the_rounded_row_quantized(device, tokens, hidden, dtype):
    x, _, weight, _ = _inputs(tokens, hidden, dtype, device, seed=9)
    x[0] *= 1e-3
    plain = fused.rms_norm(x, weight, EPS)
    scales = poisoned(tokens, 1, dtype=torch.float32, device=device)
    out = fused.rms_norm(x, weight, EPS, scales_out=scales)
    values, wanted_scales = quantize_e4m3(plain)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    assert_same(out, values, flips=1e-3)
    # Three bits of mantissa: half a unit of the largest value, and 1/16 of any other. The two
    # launches add a row's squares in different orders (a thread stores 16 fp8, 8 bf16), so `plain`
    # may be the next number of its dtype.
    next_number = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}[dtype]
    error = (out.float() * scales - plain.float()).abs()
    assert (error <= plain.float().abs() * (1 / 16 + next_number) + scales * 2**-9).all()


def test_a_row_of_zeros_has_scale_one(device):
    x, scales = torch.zeros(2, 64, device=device), torch.empty(2, 1, device=device)
    x[1] = 1e-36
    out = fused.rms_norm(x, None, 0.5, scales_out=scales)
    assert scales.flatten().tolist() == [1.0, 1.0]
    assert out.float().abs().max() == 0


def test_what_does_not_fit_is_refused(device):
    x, weight = torch.zeros(2, 64, device=device), torch.ones(64, device=device)
    for wrong, why in (
        ({"residual": torch.zeros(3, 64, device=device)}, "fit"),
        ({"residual": torch.zeros(64, 2, device=device).T}, "contiguous"),
        ({"scales_out": torch.empty(3, 1, device=device)}, "scales_out"),
    ):
        with pytest.raises(ValueError, match=why):
            fused.rms_norm(x, weight, EPS, **wrong)
    with pytest.raises(ValueError, match="contiguous"):
        fused.rms_norm(torch.zeros(64, 2, device=device).T, weight, EPS)
    assert fused.rms_norm(x[:0], weight, EPS).shape == (0, 64)


@gpu
@pytest.mark.parametrize("hidden", [576, 4096, 5120])
def test_a_row_is_the_same_in_every_batch(device, hidden):
    x, residual, weight, _ = _inputs(8192, hidden, torch.bfloat16, device, seed=10)
    alone = torch.cat(
        [
            fused.rms_norm(x[i : i + 1], weight, EPS, residual=residual[i : i + 1].clone())
            for i in range(64)
        ]
    )
    assert torch.equal(fused.rms_norm(x, weight, EPS, residual=residual)[:64], alone)


@gpu
def test_rows_beyond_4_gib(device):
    x = torch.zeros(600_000, 4096, dtype=torch.bfloat16, device=device)
    x[-1] = randn(4096, seed=11, dtype=x.dtype, device=device)
    residual = torch.zeros_like(x)
    residual[-1] = randn(4096, seed=12, dtype=x.dtype, device=device)
    total = residual[-1:] + x[-1:]
    assert_same(
        fused.rms_norm(x, None, EPS, residual=residual)[-1:], rms_norm_twin(total, None, EPS)
    )
    assert torch.equal(residual[-1:], total)


@gpu
def test_a_chain_with_dependent_launch_equals_one_without(device):
    """Each kernel reads what the one before wrote; in a graph, replayed many times on changing
    inputs.
    """
    weights = [randn(4096, seed=20 + i, dtype=torch.bfloat16, device=device) for i in range(8)]
    x, residual, start = (
        torch.empty(32, 4096, dtype=torch.bfloat16, device=device) for _ in range(3)
    )

    def chain(pdl):
        residual.copy_(start)
        row = x
        for weight in weights:
            row = fused.rms_norm(row, weight, EPS, residual=residual, pdl=pdl)
        return row

    start.normal_(), x.normal_()
    chain(True), chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row = chain(True)
    for _ in range(50):
        start.normal_(), x.normal_()
        graph.replay()
        expected = chain(False)
        assert torch.equal(row, expected)
