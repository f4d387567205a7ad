"""Linear layers of the 8B shape: skinny products against cuBLAS, 32 layers in a row, batch-invariant, fp8 weights.

Weights are rotated over eight copies (as the layers of a model are), so none is found in L2. The number that matters is
the chain: 32 layers of qkv, o, gate-up and down with their norms, residuals and activation in one CUDA graph, 13.96 GB.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import Row, median_us
from kernels.fp8_linear import Fp8Linear, quantize_weight
from kernels.fused_act import act_and_mul
from kernels.fused_norm import rms_norm
from kernels.gpu_linear import GpuLinear
from kernels.invariant_gemm import FEW_ROWS, MANY_ROWS, InvariantTile, invariant_linear
from kernels.skinny_gemm import MAX_ROWS, Activation, TensorTile, Tile, VectorTile, skinny_linear

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
    """Bare products, and gate-up with its activation: fused against cuBLAS and a launch of its own."""
    weights = _weights(n, k)
    for m in (1, 8, 16, 32, 64, 128, 256):
        x, out = _random(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        act = torch.empty(m, n // 2, dtype=torch.bfloat16, device="cuda")
        calls: dict[str, list[Call]] = {"cublas": [partial(torch.mm, x, w.T, out=out) for w in weights]}
        if m <= MAX_ROWS:
            calls["skinny pdl"] = [partial(skinny_linear, x, w, out=out, pdl=True) for w in weights]
        if m in (1, 16, 64):
            calls["skinny"] = [partial(skinny_linear, x, w, out=out) for w in weights]
        if name == "gate_up":
            calls["cublas + act"] = [partial(_cublas_and_act, x, w, out, act) for w in weights]
            if m <= MAX_ROWS:
                calls["skinny gate pdl"] = [
                    partial(skinny_linear, x, w, gate="silu", out=act, pdl=True) for w in weights
                ]
        for kernel, of_kernel in calls.items():
            moved = 2.0 * (n * k + m * k + (act if "act" in kernel or "gate" in kernel else out).numel())
            yield Row(kernel, f"{name} {n}x{k} m{m}", median_us(of_kernel), bytes_moved=moved, flop=2.0 * m * n * k)


def _cublas_and_act(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, act: torch.Tensor) -> None:
    act_and_mul(torch.mm(x, weight.T, out=out), "silu", out=act)


def _chain_rows() -> Iterator[Row]:
    """A decode step without attention and lm_head, five ways; from 13.96 GB it cannot be below 3.27 ms at 4.27 TB/s."""
    layers = [{name: _random(n, k, scale=k**-0.5) for name, (n, k) in SHAPES.items()} for _ in range(LAYERS)]
    linears = [{name: GpuLinear(weight) for name, weight in layer.items()} for layer in layers]
    norm_weight = _random(4096)
    moved = 2.0 * LAYERS * sum(n * k for n, k in SHAPES.values())

    def cublas(hidden: torch.Tensor) -> None:
        for layer in layers:
            qkv = torch.mm(rms_norm(hidden, norm_weight, EPS), layer["qkv"].T)
            torch.addmm(hidden, qkv[:, :4096], layer["o"].T, out=hidden)
            act = act_and_mul(torch.mm(rms_norm(hidden, norm_weight, EPS), layer["gate_up"].T), "silu")
            torch.addmm(hidden, act, layer["down"].T, out=hidden)

    def skinny(hidden: torch.Tensor, fuse_norm: bool, pdl: bool) -> None:
        for layer in layers:
            fused: dict[str, Any] = {"norm_weight": norm_weight, "eps": EPS, "pdl": pdl} if fuse_norm else {"pdl": pdl}
            x = hidden if fuse_norm else rms_norm(hidden, norm_weight, EPS, pdl=pdl)
            qkv = skinny_linear(x, layer["qkv"], **fused)
            skinny_linear(qkv[:, :4096], layer["o"], residual=hidden, out=hidden, pdl=pdl)
            x = hidden if fuse_norm else rms_norm(hidden, norm_weight, EPS, pdl=pdl)
            act = skinny_linear(x, layer["gate_up"], gate="silu", **fused)
            skinny_linear(act, layer["down"], residual=hidden, out=hidden, pdl=pdl)

    def shipped(hidden: torch.Tensor) -> None:
        for layer in linears:
            qkv = layer["qkv"].normed(hidden, norm_weight, EPS, pdl=True)
            layer["o"](qkv[:, :4096], residual=hidden, out=hidden, pdl=True)
            act = layer["gate_up"].gated(hidden, "silu", norm_weight=norm_weight, eps=EPS, pdl=True)
            layer["down"](act, residual=hidden, out=hidden, pdl=True)

    for m in (1, 8, 16, 32, 64, 128):
        hidden = _random(m, 4096)
        chains: dict[str, Call] = {
            "cublas, norm + act launches": partial(cublas, hidden),
            "skinny, fused norm": partial(skinny, hidden, fuse_norm=True, pdl=False),
            "skinny, fused norm, pdl": partial(skinny, hidden, fuse_norm=True, pdl=True),
            "skinny, norm launches": partial(skinny, hidden, fuse_norm=False, pdl=False),
            "skinny, norm launches, pdl": partial(skinny, hidden, fuse_norm=False, pdl=True),
            "GpuLinear, pdl": partial(shipped, hidden),
        }
        for config, chain in chains.items():
            yield Row("linear chain", f"32 layers m{m}", median_us([chain]), bytes_moved=moved, config=config)


def _invariant_rows() -> Iterator[Row]:
    for name, (n, k) in SHAPES.items():
        weights = _weights(n, k)
        for m in (1, 32, 128, 512, 4096):
            x, out = _random(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            calls: dict[str, list[Call]] = {
                "cublas": [partial(torch.mm, x, w.T, out=out) for w in weights],
                "invariant": [partial(invariant_linear, x, w, out=out) for w in weights],
            }
            for kernel, of_kernel in calls.items():
                moved = 2.0 * (n * k + m * k + m * n)
                yield Row(kernel, f"{name} {n}x{k} m{m}", median_us(of_kernel), bytes_moved=moved, flop=2.0 * m * n * k)


def _fp8_rows() -> Iterator[Row]:
    """fp8 weights; bytes_moved counts them as what they are, half of bf16. `quantize`: with the launch that does x."""
    for name, (n, k) in SHAPES.items():
        linears = [Fp8Linear(*quantize_weight(weight)) for weight in _weights(n, k)]
        for m in (1, 8, 32, 64, 128, 512, 4096):
            x, out = _random(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            x8, scales = quantize_weight(x)
            calls: dict[str, list[Call]] = {}
            if m <= MAX_ROWS:
                calls["fp8 skinny pdl"] = [
                    partial(skinny_linear, x, f.weight, weight_scale=f.scale, out=out, pdl=True) for f in linears
                ]
            if m > 1:
                for fast in (False, True):
                    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
                    calls[f"_scaled_mm{' fast' if fast else ''}"] = [
                        partial(torch._scaled_mm, x8, f.weight.T, scale_a=scales, scale_b=f.scale[None, :], **options)
                        for f in linears
                    ]
            if m > 64:
                calls["fp8 quantize + mm"] = [partial(f, x) for f in linears]
            for kernel, of_kernel in calls.items():
                moved = n * k + 2.0 * (m * k + m * n)
                yield Row(kernel, f"{name} {n}x{k} m{m}", median_us(of_kernel), bytes_moved=moved, flop=2.0 * m * n * k)


# Sweep: what is tried. Each tile is compiled once per K and gate, by worker processes, before any time is taken.


def _tensor(*shapes: tuple[int, int, int, int, tuple[int, ...]], plain_loads: bool = False) -> list[Tile]:
    """(block_n, block_k, warps, stages, splits) by TMA; `plain_loads`: each with its first split without it, too."""
    tiles: list[Tile] = []
    for block_n, block_k, warps, stages, splits in shapes:
        tiles += [TensorTile(block_n, block_k, warps, stages, split, tma=True) for split in splits]
        if plain_loads:
            tiles.append(TensorTile(block_n, block_k, warps, stages, splits[0]))
    return tiles


_VECTOR = [
    VectorTile(block_n, block_k, warps)
    for block_n, block_k, warps in [
        (1, 1024, 4), (1, 2048, 4), (1, 4096, 4), (1, 4096, 8), (2, 512, 2), (2, 1024, 4), (2, 2048, 4), (2, 2048, 8),
        (2, 4096, 8), (4, 512, 4), (4, 1024, 2), (4, 1024, 4), (4, 2048, 8), (8, 512, 4),
    ]
]  # fmt: skip
_BASE = TensorTile(64, 128, 4, 5, 4, tma=True)
_ONE = (1,)
# By the most rows of x that the BM serves.
_PLAIN: dict[int, list[Tile]] = {
    1: [*_VECTOR],
    16: [
        *_tensor((16, 128, 4, 6, _ONE), (32, 128, 4, 5, (2, 1)), (64, 128, 4, 5, (4, 1, 2, 3)), plain_loads=True),
        *_tensor((64, 128, 4, 3, (6, 4)), plain_loads=True),
        *_tensor((64, 64, 4, 8, (4,)), (64, 256, 4, 3, (4, 2)), (128, 64, 4, 5, (4, 8))),
        *[replace(_BASE, prefetch=prefetch) for prefetch in (0, 512, 2048)],
    ],
    32: [
        *_tensor((32, 128, 4, 5, (2, 1)), (64, 128, 4, 4, (4, 2, 1)), (128, 64, 4, 4, (4, 2, 1)), plain_loads=True),
        *_tensor((64, 64, 4, 6, (4,)), (64, 128, 4, 3, (6, 4)), (128, 128, 4, 3, (4, 2))),
    ],
    64: [
        *_tensor((64, 64, 4, 5, (4, 2)), (128, 64, 4, 4, (4, 2, 3, 8)), plain_loads=True),
        *_tensor((128, 128, 4, 3, (4, 2)), (128, 64, 4, 6, (4,)), (128, 64, 8, 4, (4,)), (256, 64, 8, 4, (8,))),
    ],
    128: [
        *_tensor((128, 64, 8, 3, (4, 2, 8)), plain_loads=True),
        *_tensor((128, 64, 8, 5, (4, 2)), (64, 64, 4, 4, (4, 2)), (256, 64, 8, 3, (8, 4)), (128, 128, 8, 3, (4,))),
    ],
}
_GATED: dict[int, list[Tile]] = {
    1: [tile for tile in _VECTOR if tile != VectorTile(4, 1024, 2)],  # which would spill
    16: [
        *_tensor((16, 128, 4, 6, _ONE), (32, 128, 4, 5, _ONE), (32, 128, 4, 3, _ONE), plain_loads=True),
        *_tensor((64, 64, 4, 5, _ONE), (64, 128, 4, 3, _ONE), plain_loads=True),
        *[replace(_BASE, block_n=32, split=1, prefetch=prefetch) for prefetch in (0, 2048)],
    ],
    32: [
        *_tensor((32, 128, 4, 4, _ONE), (32, 64, 4, 6, _ONE), (64, 64, 4, 5, _ONE), plain_loads=True),
        *_tensor((64, 128, 4, 3, _ONE), (64, 128, 8, 5, _ONE)),
    ],
    64: [
        *_tensor((64, 64, 4, 4, _ONE), (32, 64, 4, 5, _ONE), plain_loads=True),
        *_tensor((64, 128, 8, 4, _ONE), (64, 64, 8, 4, _ONE), (128, 64, 8, 4, _ONE)),
    ],
    128: _tensor((64, 64, 8, 3, _ONE), (64, 64, 8, 6, _ONE), (64, 128, 8, 3, _ONE), (128, 64, 8, 4, _ONE)),
}
_ROWS = {1: (1,), 16: (8, 16), 32: (32,), 64: (64,), 128: (128,)}


def sweep() -> Iterator[Row]:
    """Tile shapes of the skinny products, then of the invariant ones; at the end the best three of each."""
    found: dict[str, list[Row]] = {}
    for measured in itertools.chain(_skinny_sweep(), _invariant_sweep()):
        found.setdefault(measured.work, []).append(measured)
        yield measured
    print("\nBest three of each:")
    for rows_of_work in found.values():
        for row in sorted(rows_of_work, key=lambda row: row.us)[:3]:
            print(row)


def _skinny_sweep() -> Iterator[Row]:
    jobs = [(k, most, tile, False) for most, tiles in _PLAIN.items() for tile in tiles for k in (4096, 14336)]
    jobs += [(4096, most, tile, True) for most, tiles in _GATED.items() for tile in tiles]
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as workers:
        fails = dict(zip(jobs, workers.map(_compile, jobs, chunksize=4), strict=True))
    for job, why in fails.items():
        if why is not None:
            print(f"left out: K {job[0]}, {job[1]} rows, gate {job[3]}, {job[2]}: {why}")
    for name, (n, k) in SHAPES.items():
        weights, gated = _weights(n, k), name == "gate_up"
        gate: Activation | None = "silu" if gated else None
        for most, tiles in (_GATED if gated else _PLAIN).items():
            for m, tile in [(m, tile) for m in _ROWS[most] for tile in tiles if fails[k, most, tile, gated] is None]:
                x, out = _random(m, k), torch.empty(m, n // (1 + gated), dtype=torch.bfloat16, device="cuda")
                calls = [partial(skinny_linear, x, w, gate=gate, out=out, pdl=True, tile=tile) for w in weights]
                yield Row("skinny pdl", f"{name} m{m}", median_us(calls), bytes_moved=2.0 * n * k, config=str(tile))


def _compile(job: tuple[int, int, Tile, bool]) -> str | None:
    """In a worker process: run a job's kernel on a small weight, which fills Triton's cache on disk. Why it failed."""
    k, rows_of_x, tile, gated = job
    x, weight = _random(rows_of_x, k), _random(1024, k)
    try:
        skinny_linear(x, weight, gate="silu" if gated else None, pdl=True, tile=tile)
        torch.cuda.synchronize()
    except Exception as why:  # noqa: BLE001 - a tile that does not fit the GPU is a result, not a failure
        return f"{type(why).__name__}: {str(why)[:120]}"
    return None


def _invariant_sweep() -> Iterator[Row]:
    few = [FEW_ROWS, InvariantTile(64, 32, 4, 8, 2), InvariantTile(64, 64, 4, 4, 3), InvariantTile(64, 128, 4, 4, 2)]
    many = [
        MANY_ROWS,
        replace(MANY_ROWS, stages=3),
        InvariantTile(128, 128, 8, 4, 1),
        InvariantTile(128, 128, 4, 3, 2),
        InvariantTile(256, 128, 8, 4, 1),
    ]
    for name, (n, k) in SHAPES.items():
        weights = _weights(n, k)
        for m, tiles in [(32, few), (64, few), (128, [*few, *many]), (512, many), (4096, many)]:
            x, out = _random(m, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            for tile in tiles:
                calls = [partial(invariant_linear, x, w, out=out, tile=tile) for w in weights]
                try:
                    us = median_us(calls)
                except Exception as why:  # noqa: BLE001 - as above
                    print(f"left out: {tile}: {type(why).__name__}: {str(why)[:120]}")
                    continue
                yield Row(
                    "invariant", f"{name} inv m{m}", us, 2.0 * (n * k + m * k + m * n), 2.0 * m * n * k, str(tile)
                )
