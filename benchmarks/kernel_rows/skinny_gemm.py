"""Linear layers of the 8B shape: each product as an engine calls it, beside cuBLAS, and 32 layers
in a row.

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
from kvrelay.kernels.decoder_layer import Norm
from kvrelay.kernels.fp8_linear import Fp8Linear
from kvrelay.kernels.fused_elementwise import act_and_mul, rms_norm
from kvrelay.kernels.gpu_linear import GpuLinear

EPS = 1e-5
COPIES = 8
LAYERS = 32
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
Call = Callable[[], object]


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * scale


def rows() -> Iterator[Row]:
    """The shipped configuration; lm_head takes the longest to set up and stands last."""
    yield from _chain_rows()
    for name, (n, k) in [*SHAPES.items(), ("lm_head", (128256, 4096))]:
        yield from _product_rows(name, n, k)


def _product_rows(name: str, n: int, k: int) -> Iterator[Row]:
    weights = [_random(n, k, scale=k**-0.5) for _ in range(COPIES)]
    kinds: dict[str, list[Callable[..., object]]] = {
        "cublas": [partial(torch.mm, mat2=weight.T) for weight in weights],
        "GpuLinear": [GpuLinear(weight) for weight in weights],
        "batch-invariant": [GpuLinear(weight, batch_invariant=True) for weight in weights],
        "Fp8Linear": [Fp8Linear.quantized(weight) for weight in weights],
    }
    for m in (1, 8, 32, 64, 128, 512, 4096):
        x, out = _random(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        for kind, products in kinds.items():
            moved = n * k * (1.0 if kind == "Fp8Linear" else 2.0) + 2.0 * m * (k + n)
            us = median_us([partial(product, x, out=out) for product in products])
            work = f"{name} {n}x{k} m{m}"
            yield Row(kind, work, us, bytes_moved=moved, flop=2.0 * m * n * k)


def _chain_rows() -> Iterator[Row]:
    layers = [
        {name: _random(n, k, scale=k**-0.5) for name, (n, k) in SHAPES.items()}
        for _ in range(LAYERS)
    ]
    linears = [{name: GpuLinear(weight) for name, weight in layer.items()} for layer in layers]
    quantized = [
        {name: Fp8Linear.quantized(weight) for name, weight in layer.items()} for layer in layers
    ]
    norm = Norm(_random(4096), EPS)
    moved = 2.0 * LAYERS * sum(n * k for n, k in SHAPES.values())

    def cublas(hidden: torch.Tensor) -> None:
        for layer in layers:
            qkv = torch.mm(rms_norm(hidden, *norm), layer["qkv"].T)
            torch.addmm(hidden, qkv[:, :4096], layer["o"].T, out=hidden)
            normed = rms_norm(hidden, *norm)
            act = act_and_mul(torch.mm(normed, layer["gate_up"].T), "silu")
            torch.addmm(hidden, act, layer["down"].T, out=hidden)

    def chain(hidden: torch.Tensor, of_layers: list[dict[str, Any]]) -> None:
        for layer in of_layers:
            qkv = layer["qkv"].normed(hidden, norm)
            layer["o"](qkv[:, :4096], residual=hidden, out=hidden)
            act = layer["gate_up"].gated(hidden, "silu", norm)
            layer["down"](act, residual=hidden, out=hidden)

    for m in (1, 8, 32, 64, 128, 256):
        hidden = _random(m, 4096)
        chains: dict[str, tuple[Call, float]] = {
            "cublas, norm + act launches": (partial(cublas, hidden), moved),
            "GpuLinear": (partial(chain, hidden, linears), moved),
            "Fp8Linear": (partial(chain, hidden, quantized), moved / 2),
        }
        for config, (call, read) in chains.items():
            us = median_us([call])
            yield Row("linear chain", f"32 layers m{m}", us, bytes_moved=read, config=config)
