"""Linear layers of the 8B shape: skinny products against cuBLAS, 32 layers in a row,
batch-invariant, fp8 weights.

Weights are rotated over eight copies (as the layers of a model are), so none is found in L2. The
number that matters is the chain: 32 layers of qkv, o, gate-up and down with their norms, residuals
and activation in one CUDA graph, 13.96 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.fp8_linear import Fp8Linear, quantize_rows
from kvrelay.kernels.fused_elementwise import act_and_mul, rms_norm
from kvrelay.kernels.gpu_linear import GpuLinear
from kvrelay.kernels.invariant_gemm import (
    invariant_linear,
)
from kvrelay.kernels.skinny_gemm import (
    MAX_ROWS,
    Activation,
    skinny_linear,
)

EPS = 1e-5
COPIES = 8
LAYERS = 32
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LM_HEAD = (128256, 4096)
Call = Callable[[], object]


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * scale


def _weights(n: int, k: int) -> list[torch.Tensor]:
    return [_random(n, k, scale=k**-0.5) for _ in range(COPIES)]


def rows() -> Iterator[Row]:
    """The shipped configuration; lm_head takes the longest to set up and stands last."""
    for name, (n, k) in [*SHAPES.items(), ("lm_head", LM_HEAD)]:
        yield from _product_rows(name, n, k)
    yield from _chain_rows()
    yield from _invariant_rows()
    yield from _fp8_rows()


def _product_rows(name: str, n: int, k: int) -> Iterator[Row]:
    weights = _weights(n, k)
    for m in (1, 8, 16, 32, 64, 128, 256):
        x, out = _random(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        act = torch.empty(m, n // 2, dtype=torch.bfloat16, device="cuda")
        calls: dict[str, list[Call]] = {
            "cublas": [partial(torch.mm, x, w.T, out=out) for w in weights]
        }
        if m <= MAX_ROWS:
            calls["skinny pdl"] = [partial(skinny_linear, x, w, out=out, pdl=True) for w in weights]
        if name == "gate_up":
            calls["cublas + act"] = [partial(_cublas_and_act, x, w, out) for w in weights]
            if m <= MAX_ROWS:
                calls["skinny gate pdl"] = [
                    partial(skinny_linear, x, w, gate="silu", out=act, pdl=True) for w in weights
                ]
        for kernel, of_kernel in calls.items():
            moved = 2.0 * (
                n * k + m * k + (act if "act" in kernel or "gate" in kernel else out).numel()
            )
            yield _row(kernel, name, m, of_kernel, moved)


def _row(kernel: str, name: str, m: int, calls: list[Call], moved: float) -> Row:
    n, k = {**SHAPES, "lm_head": LM_HEAD}[name]
    work = f"{name} {n}x{k} m{m}"
    return Row(kernel, work, median_us(calls), bytes_moved=moved, flop=2.0 * m * n * k)


def _cublas_and_act(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    act_and_mul(torch.mm(x, weight.T, out=out), "silu")


def _chain_rows() -> Iterator[Row]:
    layers = [
        {name: _random(n, k, scale=k**-0.5) for name, (n, k) in SHAPES.items()}
        for _ in range(LAYERS)
    ]
    linears = [{name: GpuLinear(weight) for name, weight in layer.items()} for layer in layers]
    quantized = [
        {name: Fp8Linear.quantized(weight) for name, weight in layer.items()} for layer in layers
    ]
    norm_weight = _random(4096)
    moved = 2.0 * LAYERS * sum(n * k for n, k in SHAPES.values())

    def cublas(hidden: torch.Tensor) -> None:
        for layer in layers:
            qkv = torch.mm(rms_norm(hidden, norm_weight, EPS), layer["qkv"].T)
            torch.addmm(hidden, qkv[:, :4096], layer["o"].T, out=hidden)
            act = act_and_mul(
                torch.mm(rms_norm(hidden, norm_weight, EPS), layer["gate_up"].T), "silu"
            )
            torch.addmm(hidden, act, layer["down"].T, out=hidden)

    def chain(hidden: torch.Tensor, of_layers: list[dict[str, Any]], pdl: bool) -> None:
        for layer in of_layers:
            qkv = layer["qkv"].normed(hidden, norm_weight, EPS, pdl=pdl)
            layer["o"](qkv[:, :4096], residual=hidden, out=hidden, pdl=pdl)
            act = layer["gate_up"].gated(hidden, "silu", norm_weight, EPS, pdl=pdl)
            layer["down"](act, residual=hidden, out=hidden, pdl=pdl)

    for m in (1, 8, 32, 64, 128, 256):
        hidden = _random(m, 4096)
        chains: dict[str, tuple[Call, float]] = {
            "cublas, norm + act launches": (partial(cublas, hidden), moved),
            "GpuLinear": (partial(chain, hidden, linears, pdl=False), moved),
            "GpuLinear, pdl": (partial(chain, hidden, linears, pdl=True), moved),
        }
        if m in (1, 32, 128):
            chains["Fp8Linear, pdl"] = (partial(chain, hidden, quantized, pdl=True), moved / 2)
        for config, (call, read) in chains.items():
            yield Row(
                "linear chain",
                f"32 layers m{m}",
                median_us([call]),
                bytes_moved=read,
                config=config,
            )


def _invariant_rows() -> Iterator[Row]:
    for name, (n, k) in SHAPES.items():
        weights = _weights(n, k)
        for m in (1, 32, 64, 128, 256, 512, 4096):
            x, out = _random(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            calls: dict[str, list[Call]] = {
                "cublas": [partial(torch.mm, x, w.T, out=out) for w in weights],
                "invariant": [partial(invariant_linear, x, w, out=out) for w in weights],
            }
            for kernel, of_kernel in calls.items():
                moved = 2.0 * (n * k + m * k + m * n)
                yield _row(kernel, name, m, of_kernel, moved)


def _fp8_rows() -> Iterator[Row]:
    for name, (n, k) in SHAPES.items():
        linears = [Fp8Linear.quantized(weight) for weight in _weights(n, k)]
        for m in (1, 8, 32, 64, 128, 512, 4096):
            x, out = _random(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            act = torch.empty(m, n // 2, dtype=torch.bfloat16, device="cuda")
            x8, scales = quantize_rows(x)
            calls: dict[str, list[Call]] = {}
            if m == 1:
                calls["fp8 vector pdl"] = [_skinny_call(x, f, None, out) for f in linears]
            if m <= MAX_ROWS:
                calls["fp8 tile pdl"] = [
                    _skinny_call(x, f, None, out, rows=(x8, scales)) for f in linears
                ]
            if m > 1:
                for fast in (False, True):
                    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
                    calls[f"_scaled_mm{' fast' if fast else ''}"] = [
                        partial(
                            torch._scaled_mm,
                            x8,
                            f.weight.T,
                            scale_a=scales,
                            scale_b=f.scale[None, :],
                            **options,
                        )
                        for f in linears
                    ]
                calls["Fp8Linear"] = [partial(f, x, out=out, pdl=True) for f in linears]
            if name == "gate_up":
                calls["Fp8Linear gate pdl"] = [
                    partial(f.gated, x, "silu", x[0], EPS, pdl=True) for f in linears
                ]
            for kernel, of_kernel in calls.items():
                moved = n * k + 2.0 * (m * k + (act if "gate" in kernel else out).numel())
                yield _row(kernel, name, m, of_kernel, moved)


def _skinny_call(
    x: torch.Tensor,
    linear: Fp8Linear,
    gate: Activation | None,
    out: torch.Tensor,
    *,
    rows: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Call:
    options: dict[str, Any] = {
        "weight_scale": linear.scale,
        "gate": gate,
        "out": out,
        "pdl": True,
    }
    if rows is None:
        return partial(skinny_linear, x, linear.weight, **options)
    return partial(skinny_linear, rows[0], linear.weight, x_scale=rows[1], **options)
