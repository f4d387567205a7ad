"""Norms, activations and embedding in Triton against their torch twins; what is in place is."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels import elementwise as twin
from tests.kernels.rounding import (
    assert_same,
    captured,
    exact_rounding,
    poisoned,
    poisoned_memory,
    randn,
)

pytest.importorskip("triton")
from kvrelay.kernels import fused_elementwise as fused
from kvrelay.kernels.fused_sampling import sample
from kvrelay.kernels.sampling_slots import SlotTables

pytestmark = pytest.mark.usefixtures(exact_rounding.__name__)
in_poisoned_memory = pytest.mark.usefixtures(poisoned_memory.__name__)

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCAB = 211
gpu = pytest.mark.gpu


def shapes(small, large):
    return [*small, *(pytest.param(*shape, marks=gpu) for shape in large)]


NORM_SHAPES = shapes(
    [(1, 64), (3, 70), (5, 256), (2, 770)],
    [
        (1, 2),
        (1, 4096),
        (7, 576),
        (33, 768),
        (256, 4096),
        (8192, 4096),
        (17, 5120),
        (9, 8192),
        (5, 16384),
    ],
)
ACT_SHAPES = shapes(
    [(1, 64), (3, 150), (2, 1030)],
    [
        (1, 14336),
        (32, 14336),
        (8192, 14336),
        (5, 1536),
        (7, 8960),
        (3, 29568),
        (2, 36864),
        (2, 53248),
    ],
)
EMBED_SHAPES = shapes(
    [(1, 64), (5, 70), (3, 1030)],
    [(1, 4096), (32, 4096), (256, 8192), (8192, 4096), (700, 576), (600, 5120)],
)


def _inputs(tokens, hidden, dtype, device, seed):
    x = randn(tokens, hidden, seed=seed, dtype=dtype, device=device)
    residual = randn(tokens, hidden, seed=seed + 1, dtype=dtype, device=device, scale=3.0)
    weight = randn(hidden, seed=seed + 2, dtype=dtype, device=device)
    return x, residual, weight


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), NORM_SHAPES)
def test_rms_norm_adds_to_the_residual_in_place(device, tokens, hidden, plus_one, dtype):
    x, residual, weight = _inputs(tokens, hidden, dtype, device, seed=tokens * hidden)
    before, total = x.clone(), residual + x
    out = fused.rms_norm(x, weight, EPS, residual=residual, plus_one=plus_one)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    assert_same(out, twin.rms_norm(total, weight, EPS, plus_one=plus_one))


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), NORM_SHAPES)
def test_norms_without_a_residual(device, tokens, hidden, dtype):
    x, _, weight = _inputs(tokens, hidden, dtype, device, seed=3)
    for given in (None, weight):
        assert_same(fused.rms_norm(x, given, EPS), twin.rms_norm(x, given, EPS))
    assert_same(fused.rms_norm(x, None, EPS, plus_one=True), twin.rms_norm(x, None, EPS))


@in_poisoned_memory
def test_norms_of_rows_of_wider_tensors(device):
    wide, stream = (randn(5, 300, seed=s, dtype=torch.float16, device=device) for s in (6, 7))
    x, residual, weight = wide[:, 100:200], stream[:, :100], wide[0, :100].clone()
    total, beside = residual + x, (stream[:, 100:].clone(), wide.clone())
    assert_same(
        fused.rms_norm(x, weight, EPS, residual=residual), twin.rms_norm(total, weight, EPS)
    )
    assert torch.equal(residual, total)
    assert all(map(torch.equal, beside, (stream[:, 100:], wide)))


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden"), [(3, 70), (4, 256), pytest.param(64, 4096, marks=gpu)]
)
def test_fp8_output_is_the_rounded_row_quantized(device, tokens, hidden, dtype):
    x, _, weight = _inputs(tokens, hidden, dtype, device, seed=9)
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
    out = fused.rms_norm(x, None, 0.5, scales_out=scales)
    assert scales.flatten().tolist() == [1.0, 1.0]
    assert out.float().abs().max() == 0


def test_norms_refuse_what_does_not_fit(device):
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
def test_a_normed_row_is_the_same_in_every_batch(device, hidden):
    x, residual, weight = _inputs(8192, hidden, torch.bfloat16, device, seed=10)
    alone = torch.cat(
        [
            fused.rms_norm(x[i : i + 1], weight, EPS, residual=residual[i : i + 1].clone())
            for i in range(64)
        ]
    )
    assert torch.equal(fused.rms_norm(x, weight, EPS, residual=residual)[:64], alone)


@gpu
def test_norms_beyond_4_gib(device):
    x = torch.zeros(600_000, 4096, dtype=torch.bfloat16, device=device)
    x[-1] = randn(4096, seed=11, dtype=x.dtype, device=device)
    residual = torch.zeros_like(x)
    residual[-1] = randn(4096, seed=12, dtype=x.dtype, device=device)
    total = residual[-1:] + x[-1:]
    assert_same(
        fused.rms_norm(x, None, EPS, residual=residual)[-1:], twin.rms_norm(total, None, EPS)
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
    chain(False)
    graph, row = captured(lambda: chain(True))
    for _ in range(50):
        start.normal_(), x.normal_()
        graph.replay()
        expected = chain(False)
        assert torch.equal(row, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "inner"), ACT_SHAPES)
def test_act_and_mul(device, tokens, inner, act, dtype):
    if tokens * inner > 1 << 26 and dtype != torch.bfloat16:
        pytest.skip("large in bf16 only")
    gate_up = randn(tokens, 2 * inner, seed=tokens + inner, dtype=dtype, device=device, scale=3.0)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.5], dtype=dtype, device=device)
    out = poisoned(tokens, inner, dtype=dtype, device=device)
    assert fused.act_and_mul(gate_up, act, out=out) is out
    assert_same(out, twin.act_and_mul(gate_up.double(), act).to(dtype))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_activations_of_rows_of_wider_tensors(device, act):
    wide, target = (randn(5, 700, seed=s, dtype=torch.bfloat16, device=device) for s in (1, 2))
    beside = target[:, 100:].clone()
    fused.act_and_mul(wide[:, 40:240], act, out=target[:, :100])
    assert_same(target[:, :100].clone(), twin.act_and_mul(wide[:, 40:240].double(), act).bfloat16())
    assert torch.equal(target[:, 100:], beside)


def test_activations_refuse_what_does_not_fit(device):
    gate_up = torch.zeros(2, 64, device=device)
    with pytest.raises(ValueError, match="activation"):
        fused.act_and_mul(gate_up, "gelu")
    with pytest.raises(ValueError, match="fit"):
        fused.act_and_mul(gate_up, "silu", out=torch.empty(2, 64, device=device))
    assert fused.act_and_mul(gate_up[:0], "silu").shape == (0, 32)


@gpu
def test_activations_beyond_4_gib(device):
    gate_up = torch.ones(80_000, 28672, dtype=torch.bfloat16, device=device)
    gate_up[-1] = randn(28672, seed=7, dtype=gate_up.dtype, device=device)
    expected = twin.act_and_mul(gate_up[-1:].float(), "silu").bfloat16()
    assert_same(fused.act_and_mul(gate_up, "silu")[-1:], expected)


def _ids(tokens, device, seed, index=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, n: torch.randint(high, (n,), generator=generator)  # noqa: E731
    source = torch.where(draw(2, tokens) == 1, draw(16, tokens), -1).to(torch.int32)
    return draw(VOCAB, tokens).to(device, index), draw(VOCAB, 16).to(device), source.to(device)


@in_poisoned_memory
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2560**0.5])
@pytest.mark.parametrize(("tokens", "hidden"), EMBED_SHAPES)
def test_ids_come_from_the_sampler_where_a_source_is_named(device, tokens, hidden, scale, dtype):
    table = randn(VOCAB, hidden, seed=1, dtype=dtype, device=device)
    for index in (torch.int32, torch.int64):
        token_ids, sampled, source = _ids(tokens, device, seed=tokens + hidden, index=index)
        token_ids[source >= 0] = torch.iinfo(index).max  # must not be looked up
        out = fused.embed(token_ids, sampled, source, table, scale=scale)
        assert torch.equal(out, twin.embed(token_ids, sampled, source, table, scale=scale))


@in_poisoned_memory
def test_embedding_of_strided_tables_and_no_tokens(device):
    token_ids, sampled, source = _ids(6, device, seed=6)
    wide = randn(VOCAB, 200, seed=7, dtype=torch.float32, device=device)
    table = wide[:, 50:150]
    out = fused.embed(token_ids, sampled, source, table)
    assert torch.equal(out, twin.embed(token_ids, sampled, source, table))
    assert fused.embed(token_ids[:0], sampled, source[:0], wide).shape == (0, 200)
    with pytest.raises(ValueError, match="fit"):
        fused.embed(token_ids, sampled, source[:5], wide)
    with pytest.raises(ValueError, match="contiguous"):
        fused.embed(token_ids, sampled, source, wide.T)


@gpu
def test_a_table_beyond_4_gib(device):
    table = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device=device)
    table[-1] = randn(8192, seed=9, dtype=table.dtype, device=device)
    last = torch.tensor([299_999], device=device)
    out = fused.embed(last, last, torch.tensor([-1], dtype=torch.int32, device=device), table)
    assert torch.equal(out, table[-1:])


@gpu
def test_dependent_launch_reads_what_was_just_sampled(device):
    """As in the engine: the sampler's last kernel writes the ids, and the embedding is launched
    before it has ended.
    """
    rows = 16
    tables = SlotTables.empty(rows, VOCAB, device)  # whose zeros mean greedy
    logits = torch.empty(rows, VOCAB, dtype=torch.float32, device=device)
    table = randn(VOCAB, 4096, seed=11, dtype=torch.bfloat16, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    no_ids = torch.zeros_like(slots)

    def step():
        sample(logits, slots, tables, cut=False, adjusted=False, pdl=True)
        return fused.embed(no_ids, tables.sampled, slots, table, pdl=True)

    logits.normal_()
    graph, out = captured(step)
    for _ in range(50):
        logits.normal_()
        graph.replay()
        assert torch.equal(out, table[logits.argmax(-1)])
