"""Norms, activations and embedding in Triton against their torch twins; what is in place is."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels import decoder_layer as twin
from tests.kernels.rounding import (
    assert_same,
    captured,
    exact_rounding,
    poisoned,
    poisoned_memory,
    randn,
)
from tests.kernels.twins import embed

pytest.importorskip("triton")
from kvrelay.kernels import fused_elementwise as fused

pytestmark = pytest.mark.usefixtures(exact_rounding.__name__)
in_poisoned_memory = pytest.mark.usefixtures(poisoned_memory.__name__)

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCAB = 211
gpu = pytest.mark.gpu


def shapes(small, large):
    return [*small, *(pytest.param(*shape, marks=gpu) for shape in large)]


NORM_SHAPES = shapes(
    [(1, 64), (3, 70), (2, 770)], [(1, 4096), (33, 768), (256, 5120), (9, 8192), (5, 16384)]
)
ACT_SHAPES = shapes([(1, 64), (3, 150), (2, 1030)], [(1, 14336), (600, 14336), (7, 8960)])
EMBED_SHAPES = shapes([(1, 64), (5, 70), (3, 1030)], [(1, 4096), (600, 5120)])


def _inputs(tokens, hidden, dtype, device, seed):
    x = randn(tokens, hidden, seed=seed, dtype=dtype, device=device, scale=3.0)
    weight = randn(hidden, seed=seed + 2, dtype=dtype, device=device)
    return x, weight


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), NORM_SHAPES)
def test_norms(device, tokens, hidden, dtype):
    x, weight = _inputs(tokens, hidden, dtype, device, seed=3)
    for plus_one in (False, True):
        out = fused.rms_norm(x, weight, EPS, plus_one=plus_one)
        assert_same(out, twin.rms_norm(x, weight, EPS, plus_one=plus_one))


@in_poisoned_memory
def test_norms_of_rows_of_wider_tensors_and_of_none(device):
    wide = randn(5, 300, seed=6, dtype=torch.float16, device=device)
    x, weight, before = wide[:, 100:200], wide[0, :100].clone(), wide.clone()
    assert_same(fused.rms_norm(x, weight, EPS), twin.rms_norm(x, weight, EPS))
    assert torch.equal(wide, before)
    assert fused.rms_norm(x[:0], weight, EPS).shape == (0, 100)


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden"), [(3, 70), (4, 256), pytest.param(64, 4096, marks=gpu)]
)
def test_fp8_output_is_the_rounded_row_quantized(device, tokens, hidden, dtype):
    x, weight = _inputs(tokens, hidden, dtype, device, seed=9)
    x[0] *= 1e-3
    plain = fused.rms_norm(x, weight, EPS)
    scales = poisoned(tokens, 1, dtype=torch.float32, device=device)
    out = fused.rms_norm(x, weight, EPS, scales_out=scales)
    values, wanted_scales = twin.quantize_e4m3(plain)
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
    out = fused.rms_norm(x, torch.ones(64, device=device), 0.5, scales_out=scales)
    assert scales.flatten().tolist() == [1.0, 1.0]
    assert out.float().abs().max() == 0


@gpu
def test_a_normed_row_is_the_same_in_every_batch(device):
    x, weight = _inputs(8192, 5120, torch.bfloat16, device, seed=10)
    alone = torch.cat([fused.rms_norm(x[i : i + 1], weight, EPS) for i in range(64)])
    assert torch.equal(fused.rms_norm(x, weight, EPS)[:64], alone)


@gpu
def test_a_chain_with_dependent_launch_equals_one_without(device):
    """Each kernel reads what the one before wrote; in a graph, replayed on changing inputs."""
    weights = [randn(4096, seed=20 + i, dtype=torch.bfloat16, device=device) for i in range(8)]
    x = torch.empty(32, 4096, dtype=torch.bfloat16, device=device)

    def chain(between=lambda: None):
        row = x
        for weight in weights:
            row = fused.rms_norm(row, weight, EPS)
            between()
        return row

    graph, row = captured(chain)
    for _ in range(50):
        x.normal_()
        graph.replay()
        assert torch.equal(row, chain(torch.cuda.synchronize))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "inner"), ACT_SHAPES)
def test_act_and_mul(device, tokens, inner, act, dtype):
    gate_up = randn(tokens, 2 * inner, seed=tokens + inner, dtype=dtype, device=device, scale=3.0)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.5], dtype=dtype, device=device)
    assert_same(fused.act_and_mul(gate_up, act), twin.act_and_mul(gate_up.double(), act).to(dtype))


def test_activations_of_rows_of_wider_tensors_and_of_none(device):
    wide = randn(5, 700, seed=1, dtype=torch.bfloat16, device=device)
    expected = twin.act_and_mul(wide[:, 40:240].double(), "silu").bfloat16()
    assert_same(fused.act_and_mul(wide[:, 40:240], "silu"), expected)
    assert fused.act_and_mul(wide[:0], "silu").shape == (0, 350)


@gpu
def test_rows_beyond_4_gib(device):
    rows = torch.ones(80_000, 28672, dtype=torch.bfloat16, device=device)
    rows[-1] = randn(28672, seed=7, dtype=rows.dtype, device=device)
    expected = twin.act_and_mul(rows[-1:].float(), "silu").bfloat16()
    assert_same(fused.act_and_mul(rows, "silu")[-1:], expected)
    weight = rows[0, :8192].clone()
    wanted = twin.rms_norm(rows[-1:, :8192], weight, EPS)
    assert_same(fused.rms_norm(rows[:, :8192], weight, EPS)[-1:], wanted)
    last = torch.tensor([79_999], device=device)
    out = fused.embed(last, last, torch.tensor([-1], dtype=torch.int32, device=device), rows)
    assert torch.equal(out, rows[-1:])


def _ids(tokens, device, seed, index=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, n: torch.randint(high, (n,), generator=generator)  # noqa: E731
    source = torch.where(draw(2, tokens) == 1, draw(16, tokens), -1).to(torch.int32)
    return draw(VOCAB, tokens).to(device, index), draw(VOCAB, 16).to(device), source.to(device)


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2560**0.5])
@pytest.mark.parametrize(("tokens", "hidden"), EMBED_SHAPES)
def test_ids_come_from_the_sampler_where_a_source_is_named(device, tokens, hidden, scale, dtype):
    table = randn(VOCAB, hidden, seed=1, dtype=dtype, device=device)
    for index in (torch.int32, torch.int64):
        token_ids, sampled, source = _ids(tokens, device, seed=tokens + hidden, index=index)
        token_ids[source >= 0] = torch.iinfo(index).max  # must not be looked up
        out = fused.embed(token_ids, sampled, source, table, scale=scale)
        assert torch.equal(out, embed(token_ids, sampled, source, table, scale=scale))


@in_poisoned_memory
def test_embedding_of_strided_tables_and_no_tokens(device):
    token_ids, sampled, source = _ids(6, device, seed=6)
    wide = randn(VOCAB, 200, seed=7, dtype=torch.float32, device=device)
    table = wide[:, 50:150]
    out = fused.embed(token_ids, sampled, source, table)
    assert torch.equal(out, embed(token_ids, sampled, source, table))
    assert fused.embed(token_ids[:0], sampled, source[:0], wide).shape == (0, 200)
