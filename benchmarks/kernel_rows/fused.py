"""Rows of the element-wise kernels: norms, rotary embedding with KV write, activations, embedding;
8B shape, bf16.

At T = 1 and 32 everything stays in the L2 cache, as in a decode step, and the time is latency; at T
= 8192 the inputs exceed the cache and the rate is that of device memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.fused_elementwise import act_and_mul, embed, rms_norm
from kvrelay.kernels.fused_rope_write import rope_and_write

__all__ = ["rows"]

H, HQ, HKV, D, I, V = 4096, 32, 8, 128, 14336, 128256  # noqa: E741
LAYERS, BLOCK_TOKENS, BLOCKS, POSITIONS = 32, 64, 160, 32768
TOKENS = (1, 32, 256, 8192)
FP8 = torch.float8_e4m3fn
L2_BYTES = 50e6

Calls = list[Callable[[], object]]
Work = tuple[Calls, float]
"""Calls on different inputs, and the bytes that one of them must move."""


def rows() -> Iterator[Row]:
    """Every kernel as the engine calls it."""
    bench = _Bench()
    for name, make in bench.kernels.items():
        for tokens in TOKENS:
            calls, moved = make(tokens)
            yield Row(name, f"T {tokens}", median_us(calls), moved)


class _Bench:
    def __init__(self) -> None:
        self.kernels: dict[str, Callable[..., Work]] = {
            "rms_norm+res": self._norm,
            "rms_norm+res fp8": partial(self._norm, fp8=True),
            "rope_write": self._rope,
            "rope_write qk_norm": partial(self._rope, norm=True),
            "rope_write fp8": partial(self._rope, fp8=True),
            "silu_mul": self._act,
            "embed": self._embed,
        }
        self._made: dict[tuple[object, ...], torch.Tensor] = {}
        angles = torch.rand(POSITIONS, D // 2, device="cuda") * 6.28
        self._cos_sin = torch.cat((angles.cos(), angles.sin()), 1)

    def _normal(self, *shape: int, use: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        key = (use, dtype, *shape)
        if key not in self._made:
            made = torch.empty(
                *shape, dtype=torch.bfloat16 if dtype == FP8 else dtype, device="cuda"
            ).normal_()
            self._made[key] = made.to(dtype)
        return self._made[key]

    def _norm(self, tokens: int, *, fp8: bool = False) -> Work:
        moved, copies = tokens * H * (2 + (1 if fp8 else 2)), _copies(tokens * H * 4)
        x = self._normal(copies, tokens, H, use="x")
        weight, scales = (
            self._normal(H, use="weight"),
            torch.empty(tokens, 1, device="cuda") if fp8 else None,
        )

        def call(i: int) -> Callable[[], object]:
            return lambda: rms_norm(
                x[i],
                weight,
                1e-5,
                scales_out=scales,
            )

        return [call(i) for i in range(copies)], moved

    def _rope(self, tokens: int, *, fp8: bool = False, norm: bool = False) -> Work:
        kv_bytes = HKV * ((D + 4) if fp8 else 2 * D)
        moved = tokens * ((2 * HQ + 2 * HKV) * D * 2 + 2 * kv_bytes + D * 4)
        copies = min(_copies(moved), LAYERS)
        qkv = self._normal(copies, tokens, (HQ + 2 * HKV) * D, use="qkv")
        pool = self._normal(
            BLOCKS,
            HKV,
            LAYERS,
            2,
            BLOCK_TOKENS,
            D,
            use="pool",
            dtype=FP8 if fp8 else torch.bfloat16,
        )
        scales = self._normal(
            BLOCKS, HKV, LAYERS, 2, BLOCK_TOKENS, use="scales", dtype=torch.float32
        )
        slots = torch.randperm(BLOCKS * BLOCK_TOKENS, device="cuda")[:tokens].int()
        blocks, offsets = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        positions = torch.randint(POSITIONS, (tokens,), dtype=torch.int32, device="cuda")
        weight = self._normal(D, use="weight") if norm else None

        def call(i: int) -> Callable[[], object]:
            key_scales, value_scales = (
                (scales[:, :, i, 0], scales[:, :, i, 1]) if fp8 else (None, None)
            )
            return lambda: rope_and_write(
                qkv[i],
                positions,
                self._cos_sin,
                blocks,
                offsets,
                pool[:, :, i, 0],
                pool[:, :, i, 1],
                num_heads=HQ,
                num_kv_heads=HKV,
                head_dim=D,
                q_norm=weight,
                k_norm=weight,
                eps=1e-6,
                key_scales=key_scales,
                value_scales=value_scales,
            )

        return [call(i) for i in range(copies)], moved

    def _act(self, tokens: int) -> Work:
        moved, copies = tokens * I * 6, _copies(tokens * I * 6)
        gate_up = self._normal(copies, tokens, 2 * I, use="gate_up")

        def call(i: int) -> Callable[[], object]:
            return lambda: act_and_mul(gate_up[i], "silu")

        return [call(i) for i in range(copies)], moved

    def _embed(self, tokens: int) -> Work:
        moved = tokens * H * 4
        copies = _copies(tokens * H * 8)
        table = self._normal(V, H, use="table")
        sampled, token_ids = (torch.randint(V, (copies, n), device="cuda") for n in (256, tokens))
        source = torch.randint(-256, 256, (tokens,), dtype=torch.int32, device="cuda")

        def call(i: int) -> Callable[[], object]:
            return lambda: embed(token_ids[i], sampled[i], source, table)

        return [call(i) for i in range(copies)], moved


def _copies(input_bytes: int) -> int:
    return 16 if input_bytes < 1e6 else max(2, min(16, math.ceil(4 * L2_BYTES / input_bytes)))
