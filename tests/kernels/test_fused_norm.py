"""Norms in Triton: equal to the torch references, for every row width, in place where they say so."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.norm_rope_act import layer_norm as layer_norm_twin
from kernels.norm_rope_act import quantize_e4m3
from kernels.norm_rope_act import rms_norm as rms_norm_twin
from tests.kernels.rounding import assert_same, exact_rounding, poisoned, randn

fused = pytest.importorskip("kernels.fused_norm", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures(exact_rounding.__name__)

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_adds_to_the_residual_in_place(device, tokens, hidden, plus_one, dtype):
    x, residual, weight, _ = _inputs(tokens, hidden, dtype, device, seed=tokens * hidden)
    before, total = x.clone(), residual + x
    out = poisoned(tokens, hidden, dtype=dtype, device=device)
    returned = fused.rms_norm(x, weight, EPS, residual=residual, plus_one=plus_one, out=out)
    assert returned is out
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    assert_same(out, rms_norm_twin(total, weight, EPS, plus_one=plus_one))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_alone_without_weight_and_over_itself(device, tokens, hidden, dtype):
    x, _, weight, _ = _inputs(tokens, hidden, dtype, device, seed=3)
    expected = rms_norm_twin(x, weight, EPS)
    assert_same(fused.rms_norm(x, None, EPS), rms_norm_twin(x, None, EPS))
    assert_same(fused.rms_norm(x, None, EPS, plus_one=True), rms_norm_twin(x, None, EPS))
    fused.rms_norm(x, weight, EPS, out=x)
    assert_same(x, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_layer_norm(device, tokens, hidden, dtype):
    x, residual, weight, bias = _inputs(tokens, hidden, dtype, device, seed=4)
    x = x + 5  # a mean that matters
    total, out = residual + x, poisoned(tokens, hidden, dtype=dtype, device=device)
    assert_same(fused.layer_norm(x, weight, bias, EPS, out=out), layer_norm_twin(x, weight, bias, EPS))
    fused.layer_norm(x, weight, bias, EPS, residual=residual, out=out)
    assert torch.equal(residual, total)
    assert_same(out, layer_norm_twin(total, weight, bias, EPS))


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_only_named_rows_are_read_and_the_residual_stays(device, with_residual, index):
    x, residual, weight, _ = _inputs(9, 128, torch.bfloat16, device, seed=5)
    rows = torch.tensor([8, 0, 0, 3], dtype=index, device=device)
    unread = torch.tensor([1, 2, 4, 5, 6, 7], device=device)
    x[unread], residual[unread] = torch.nan, torch.nan
    before = residual.clone()
    out = poisoned(4, 128, dtype=x.dtype, device=device)
    fused.rms_norm(x, weight, EPS, residual=residual if with_residual else None, rows=rows, out=out)
    total = (residual + x if with_residual else x)[rows.long()]
    assert_same(out, rms_norm_twin(total, weight, EPS))
    torch.testing.assert_close(residual, before, rtol=0, atol=0, equal_nan=True)


def test_rows_of_wider_tensors(device):
    wide, target, stream = (randn(5, 300, seed=s, dtype=torch.float16, device=device) for s in (6, 7, 8))
    x, residual, out, weight = wide[:, 100:200], stream[:, :100], target[:, 200:], wide[0, :100].clone()
    total, beside = residual + x, (target[:, :200].clone(), stream[:, 100:].clone(), wide.clone())
    fused.rms_norm(x, weight, EPS, residual=residual, out=out)
    assert_same(out, rms_norm_twin(total, weight, EPS))
    assert torch.equal(residual, total)
    assert all(map(torch.equal, beside, (target[:, :200], stream[:, 100:], wide)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [None, [2, 0]])
@pytest.mark.parametrize(("tokens", "hidden"), [(3, 70), (4, 256), pytest.param(64, 4096, marks=gpu)])
def test_fp8_output_is_the_rounded_row_quantized(device, tokens, hidden, rows, dtype):
    x, _, weight, bias = _inputs(tokens, hidden, dtype, device, seed=9)
    x[0] *= 1e-3
    rows = None if rows is None else torch.tensor(rows, device=device)
    count = tokens if rows is None else len(rows)
    for norm in (partial(fused.rms_norm, x, weight, EPS), partial(fused.layer_norm, x, weight, bias, EPS)):
        plain = norm(rows=rows)
        scales = poisoned(count, 1, dtype=torch.float32, device=device)
        out = poisoned(count, hidden, dtype=torch.float8_e4m3fn, device=device)
        assert norm(rows=rows, scales_out=scales, out=out) is out
        values, wanted_scales = quantize_e4m3(plain)
        torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
        assert_same(out, values, flips=1e-3)
        # Three bits of mantissa: half a unit of the largest value, and 1/16 of any other. The two launches add a row's
        # squares in different orders (a thread stores 16 fp8, 8 bf16), so `plain` may be the next number of its dtype.
        next_number = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}[dtype]
        error = (out.float() * scales - plain.float()).abs()
        assert (error <= plain.float().abs() * (1 / 16 + next_number) + scales * 2**-9).all()
    allocated = fused.rms_norm(x, weight, EPS, scales_out=torch.empty(tokens, 1, device=device))
    assert allocated.dtype == torch.float8_e4m3fn


def test_a_row_of_zeros_has_scale_one(device):
    x, scales = torch.zeros(2, 64, device=device), torch.empty(2, 1, device=device)
    x[1] = 1e-36
    out = fused.rms_norm(x, None, 0.5, scales_out=scales)
    assert scales.flatten().tolist() == [1.0, 1.0]
    assert out.float().abs().max() == 0


def test_what_does_not_fit_is_refused(device):
    x, weight = torch.zeros(2, 64, device=device), torch.ones(64, device=device)
    for wrong in (
        {"out": torch.empty(3, 64, device=device)},
        {"residual": torch.zeros(3, 64, device=device)},
        {"out": torch.empty(2, 64, device=device, dtype=torch.float8_e4m3fn)},
        {"scales_out": torch.empty(3, 1, device=device)},
        {"out": torch.empty(64, 2, device=device).T},
    ):
        with pytest.raises(ValueError, match=r"fit|fp8|scales_out|contiguous"):
            fused.rms_norm(x, weight, EPS, **wrong)
    assert fused.rms_norm(x[:0], weight, EPS).shape == (0, 64)


@gpu
@pytest.mark.parametrize("hidden", [576, 4096, 5120])
def test_a_row_is_the_same_in_every_batch(device, hidden):
    x, residual, weight, _ = _inputs(8192, hidden, torch.bfloat16, device, seed=10)
    alone = torch.cat(
        [fused.rms_norm(x[i : i + 1], weight, EPS, residual=residual[i : i + 1].clone()) for i in range(64)]
    )
    assert torch.equal(fused.rms_norm(x, weight, EPS, residual=residual)[:64], alone)


@gpu
def test_rows_beyond_4_gib(device):
    x = torch.zeros(600_000, 4096, dtype=torch.bfloat16, device=device)
    x[-1] = randn(4096, seed=11, dtype=x.dtype, device=device)
    rows = torch.tensor([599_999], dtype=torch.int32, device=device)
    assert_same(fused.rms_norm(x, None, EPS, rows=rows), rms_norm_twin(x[-1:], None, EPS))
    fused.rms_norm(x[-2:], None, EPS, residual=x[-2:].clone(), out=x[-2:])


@gpu
def test_a_chain_with_dependent_launch_equals_one_without(device):
    """Each kernel reads what the one before wrote; in a graph, replayed many times on changing inputs."""
    weights = [randn(4096, seed=20 + i, dtype=torch.bfloat16, device=device) for i in range(8)]
    x, residual, start = (torch.empty(32, 4096, dtype=torch.bfloat16, device=device) for _ in range(3))

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
