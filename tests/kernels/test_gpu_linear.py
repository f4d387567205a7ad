"""The linear layers of a GPU's decoder: cuBLAS, skinny, batch-invariant and fp8 give one result
within rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from kvrelay.kernels import fp8_linear
from kvrelay.kernels.decoder_layer import Norm, dequantize, quantize_e4m3
from kvrelay.kernels.fp8_linear import Fp8Linear, quantize_rows
from kvrelay.kernels.fused_elementwise import rms_norm
from kvrelay.kernels.gpu_linear import GpuLinear
from kvrelay.kernels.invariant_gemm import (
    FEW_OUTPUTS,
    FEW_ROWS,
    MANY_ROWS,
    MIDDLE,
    InvariantTile,
    invariant_linear,
)
from tests.kernels.rounding import DTYPE, captured, randn

EPS = 1e-5
ON_GPU = torch.cuda.is_available()
LARGE = (300, 1536, 2048) if ON_GPU else (70, 96, 128)
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]


def norm(x: torch.Tensor, weight: torch.Tensor, plus_one: bool = False) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * (weight.double() + plus_one)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate) * up


def close(out: torch.Tensor, expected: torch.Tensor, steps: float = 6) -> None:
    """Within some rounding steps of the result's size: an unfused path rounds after every launch."""
    slack = steps * torch.finfo(out.dtype).eps * expected.double().square().mean().sqrt()
    assert out.isfinite().all()
    error = (out.double() - expected).abs() - 2 * torch.finfo(out.dtype).eps * expected.abs()
    assert error.max() <= slack, f"{float(error.max())} > {float(slack)}"


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("m", [0, 1, 3, LARGE[0]])
def test_every_call_gives_the_product(m, batch_invariant, device):
    (_, n, k), with_bias = LARGE, m != 3
    weight, bias = (
        randn(n, k, seed=1, device=device, scale=k**-0.5),
        randn(n, seed=2, device=device),
    )
    linear = GpuLinear(weight, bias if with_bias else None, batch_invariant=batch_invariant)
    x, residual = randn(m, k, seed=3, device=device), randn(m, n, seed=4, device=device)
    norm_weight = randn(k, seed=5, device=device)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return rows.double() @ weight.double().T + (bias.double() if with_bias else 0)

    if m == 0:
        assert linear(x).shape == (0, n)
        assert linear.normed(x, Norm(norm_weight, EPS)).shape == (0, n)
        return
    close(linear(x), product(x))
    out = torch.full_like(residual, torch.nan)
    assert linear(x, out=out) is out
    close(out, product(x))
    close(linear.normed(x, Norm(norm_weight, EPS)), product(norm(x, norm_weight)))
    close(
        linear.normed(x, Norm(norm_weight, EPS, True)),
        product(norm(x, norm_weight, True)),
        steps=12,
    )
    close(
        linear.gated(x, "silu", Norm(norm_weight, EPS)),
        gated(product(norm(x, norm_weight))),
        steps=12,
    )
    expected = product(x) + residual.double()
    assert linear(x, residual=residual, out=residual) is residual
    close(residual, expected)


SHIPPED_TILES = [FEW_OUTPUTS, FEW_ROWS, MIDDLE, MANY_ROWS]
INVARIANT_TILES = (
    SHIPPED_TILES if ON_GPU else [InvariantTile(16, 32, 4, 2, 1), InvariantTile(64, 16, 4, 2, 1)]
)


@pytest.mark.parametrize("tile", INVARIANT_TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 64), (70, 72, 136), (33, 200, 72)])
def test_invariant_products_of_any_size(m, n, k, tile, device):
    x, weight = (
        randn(m, 2 * k, seed=m, device=device)[:, k:],
        randn(n, k, seed=n, device=device, scale=k**-0.5),
    )
    bias, residual = randn(n, seed=1, device=device), randn(m, n, seed=2, device=device)
    out = torch.full((m, n), torch.nan, dtype=DTYPE, device=device)
    invariant_linear(x, weight, bias=bias, residual=residual, out=out, tile=tile)
    close(out, x.double() @ weight.double().T + bias.double() + residual.double(), steps=2)


@pytest.mark.skipif(ON_GPU, reason="for the interpreter: small sizes")
def test_invariant_bits_in_every_batch(device):
    x, weight = randn(70, 128, seed=1, device=device), randn(96, 128, seed=2, device=device)
    whole = invariant_linear(x, weight, tile=INVARIANT_TILES[-1])
    for rows in (1, 2, 15, 16, 17, 33, 64, 65):
        for tile in INVARIANT_TILES:
            for part in (slice(0, rows), slice(70 - rows, 70)):
                assert torch.equal(invariant_linear(x[part], weight, tile=tile), whole[part])


class TestFp8:
    """fp8 weights: the format, and the layers on both sides of the limit of rows."""

    @pytest.mark.parametrize(("k", "dtype"), [(16, torch.float16), (1024, torch.bfloat16)])
    def test_rows_are_quantized_as_in_torch(self, k, dtype, device):
        x = randn(7, 2 * k, seed=k, device=device, dtype=dtype)[:, k:]
        x[3] = 0
        rows, scales = quantize_rows(x)
        expected, expected_scales = quantize_e4m3(x)
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        # Equal but where the two roundings of x / scale fall to different sides of a step; and but
        # for Triton's interpreter, which rounds e4m3 124.5 to 64 (the carry into the exponent is
        # lost).
        assert (rows.float() != expected.float()).float().mean() < (0.01 if ON_GPU else 0.05)
        torch.testing.assert_close(
            rows.float(), expected.float(), rtol=0.125 if ON_GPU else 0.51, atol=1e-2
        )

    def test_one_row_is_not_quantized(self, device):
        weight, bias = (
            randn(64, 128, seed=1, device=device, scale=0.1),
            randn(64, seed=2, device=device),
        )
        quantized, scale = quantize_e4m3(weight)
        linear = Fp8Linear(quantized, scale, bias)
        x, norm_weight = randn(1, 128, seed=3, device=device), randn(128, seed=4, device=device)
        dequantized = dequantize(quantized, scale, torch.float32).double()
        close(linear(x), x.double() @ dequantized.T + bias.double())
        close(
            linear.normed(x, Norm(norm_weight, EPS)),
            norm(x, norm_weight) @ dequantized.T + bias.double(),
        )
        expected = gated(norm(x, norm_weight) @ dequantized.T + bias.double())
        close(linear.gated(x, "silu", Norm(norm_weight, EPS)), expected, steps=12)
        residual = randn(1, 64, seed=5, device=device)
        expected = x.double() @ dequantized.T + bias.double() + residual.double()
        assert linear(x, residual=residual, out=residual) is residual
        close(residual, expected)

    @pytest.mark.parametrize(
        ("m", "limit", "with_bias"),
        [(2, 64, True), (17, 1, False), (17, 64, False), pytest.param(300, 64, True, marks=on_gpu)],
    )
    def test_more_rows_are_quantized_in_the_skinny_kernel_and_above(
        self, m, limit, with_bias, device, monkeypatch
    ):
        """Against the product of the rows as `quantize_rows` and `rms_norm` make them; limit 1: all
        by `_scaled_mm`.
        """
        monkeypatch.setattr(fp8_linear, "SKINNY_ROWS", limit)
        n, k = (512, 1024) if ON_GPU else (64, 128)
        weight, norm_weight = (
            randn(n, k, seed=1, device=device, scale=k**-0.5),
            randn(k, seed=4, device=device),
        )
        bias = randn(n, seed=6, device=device) if with_bias else None
        linear = Fp8Linear.quantized(weight, bias)
        x, residual = randn(m, k, seed=3, device=device), randn(m, n, seed=5, device=device)

        def product(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            y = (
                dequantize(rows, scales, torch.float64)
                @ dequantize(linear.weight, linear.scale, torch.float64).T
            )
            return y if bias is None else y + bias.double()

        def near(out: torch.Tensor, expected: torch.Tensor) -> None:
            """Within some roundings to bf16, which is what `_scaled_mm` gives."""
            error = (
                out.double() - expected
            ).square().mean().sqrt() / expected.square().mean().sqrt()
            assert out.dtype == DTYPE
            assert error < 0.006, float(error)

        of_x, scales = product(*quantize_rows(x)), torch.empty(m, 1, device=device)
        of_normed = product(rms_norm(x, norm_weight, EPS, scales_out=scales), scales)
        near(linear(x), of_x)
        near(linear.normed(x, Norm(norm_weight, EPS)), of_normed)
        out = linear.gated(x, "gelu_tanh", Norm(norm_weight, EPS))
        gate, up = of_normed.chunk(2, dim=1)
        near(out, functional.gelu(gate, approximate="tanh") * up)
        expected = of_x + residual.double()
        assert linear(x, residual=residual, out=residual) is residual
        near(residual, expected)

    def test_refuses_sizes_that_it_cannot_take(self):
        quantized, scale = quantize_e4m3(torch.ones(32, 48))
        with pytest.raises(ValueError, match="16"):
            Fp8Linear(quantized[:, :40], scale)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
class TestOnGpu:
    """The sizes of the 8B model."""

    def test_invariant_bits_for_1_to_300_rows(self, device):
        n, k = 6144, 4096
        x, weight = (
            randn(300, k, seed=1, device=device),
            randn(n, k, seed=2, device=device, scale=k**-0.5),
        )
        whole = invariant_linear(x, weight)
        close(whole, x.double() @ weight.double().T, steps=2)
        for tile in SHIPPED_TILES:
            assert torch.equal(invariant_linear(x, weight, tile=tile), whole), tile
        for rows in range(1, 301, 3):
            assert torch.equal(invariant_linear(x[300 - rows :], weight), whole[300 - rows :]), rows

    @pytest.mark.parametrize("m", [1, 32, 200])
    @pytest.mark.parametrize("kind", ["GpuLinear", "batch-invariant", "Fp8Linear"])
    def test_layers_replay_in_a_graph_with_dependent_launches(self, m, kind, device):
        """qkv, o, gate-up and down, reading each other's results, against the same without overlap."""
        shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
        weights = [randn(n, k, seed=n, device=device, scale=k**-0.5) for n, k in shapes]
        if kind == "Fp8Linear":
            qkv, o, gate_up, down = (Fp8Linear.quantized(weight) for weight in weights)
        else:
            qkv, o, gate_up, down = (
                GpuLinear(weight, batch_invariant=kind == "batch-invariant") for weight in weights
            )
        norm_weight, start = (
            randn(4096, seed=1, device=device),
            randn(m, 4096, seed=2, device=device),
        )

        def run(hidden: torch.Tensor, between: Callable[[], None] = lambda: None) -> None:
            for _ in range(2):
                heads = qkv.normed(hidden, Norm(norm_weight, EPS))
                between()
                o(heads[:, :4096], residual=hidden, out=hidden)
                between()
                act = gate_up.gated(hidden, "silu", Norm(norm_weight, EPS))
                between()
                down(act, residual=hidden, out=hidden)
                between()

        expected = start.clone()
        run(expected, torch.cuda.synchronize)
        hidden = torch.empty_like(start)
        graph, _ = captured(lambda: run(hidden.copy_(start)))
        for _ in range(10):
            hidden.fill_(torch.nan)
            graph.replay()
            assert torch.equal(hidden, expected)
