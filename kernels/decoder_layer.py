"""A decoder layer's arithmetic in torch: the CPU path, and what twins of kernels consist of.

A weight is packed once for the CPU: oneDNN's packed fp32 weights halve the time of small batches
(SmolLM2, 8 rows, one thread: 61 against 112 ms for a step's weights) and give a row the same bits
beside any others. Experts are batch-invariant, too: their products have enough rows, and a token's
experts are summed in the order of its choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

__all__ = [
    "Experts",
    "Linear",
    "PackedLora",
    "act_and_mul",
    "apply_rope",
    "computed_rows",
    "dequantize",
    "fewest_invariant_rows",
    "packs",
    "quantize_e4m3",
    "rms_norm",
    "route",
    "rows_are_invariant",
    "write_kv",
]

# Packing for 256 rows costs nothing at 1 to 32; packing for 1 costs a third at 8 and more.
_PACK_ROWS = 256
_ROW_STEP = 4


class Norm(NamedTuple):
    """An RMS norm: weight [dim], eps, and whether the weight is stored less one, as Gemma's."""

    weight: torch.Tensor
    eps: float
    plus_one: bool = False


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32.

    x [..., dim]; weight [dim]. plus_one: Gemma's x * scale * (1 + weight), rounded once. Source:
    Zhang and Sennrich, "Root mean square layer normalization", 2019.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if plus_one:
        return (wide * scale * (1 + weight.float())).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + dim/2) of each head's first `dim` elements by the token's angle.

    x [tokens, heads, head_dim], cos and sin [tokens, 1, dim/2]. Source: Su et al., "RoFormer",
    2021, in the half-split form.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def act_and_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """Return act(gate) * up of a fused [rows, 2 * dim] projection; act is silu or gelu_tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    if act == "silu":
        return functional.silu(gate) * up
    # functional.gelu gives a thread's last elements other bits.
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    bend = (0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)).tanh_()
    return (0.5 * wide * (1 + bend)).to(gate.dtype) * up


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors x [..., dim] as float8_e4m3fn, and their fp32 scales [..., 1].

    A scale is the vector's largest magnitude / 448, or 1 below 1e-30.
    """
    amax = x.float().abs().amax(-1, keepdim=True)
    # torch multiplies by the inverse of a scalar, with another last bit.
    top = torch.full_like(amax, 448.0)
    amax = torch.where(amax < 1e-30, top, amax)
    return (x.float() * (top / amax)).to(torch.float8_e4m3fn), amax / top


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float8_e4m3fn [N, K] times scale ([N, 1], [N] or one number), rounded to `dtype`."""
    return (weight.float() * scale.float().reshape(-1, 1)).to(dtype)


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write key and value [tokens, kv_heads, head_dim] to their offsets of their blocks.

    Caches [num_blocks, kv_heads, block_size, head_dim]; blocks and offsets int64 [tokens].
    """
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def computed_rows(rows: int) -> int:
    """Return how many rows a product of so many computes: at most 3 or a quarter more.

    For each count of rows and shape oneDNN (3.12) generates code, milliseconds and 560 KB for good
    (AVX-512): with any count up to 256 an engine grew by 500 MB.
    """
    if rows <= _ROW_STEP:
        return 1 << max(0, rows - 1).bit_length()
    step = max(_ROW_STEP, 1 << max(0, (rows - 1).bit_length() - 3))
    return -(-rows // step) * step


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN takes weights of this type on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    has = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }.get(dtype)
    return has is None or bool(has())


class Linear:
    """A weight [out_features, in_features] and an optional bias, ready to be applied."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = weight.device.type == "cpu" and packs(weight.dtype)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
            if self._packed
            else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            rows = len(x)
            if (more := computed_rows(rows) - rows) > 0:
                x = functional.pad(x, (0, 0, 0, more))
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self.bias, "none", [], ""
            )
            return y[:rows]
        return functional.linear(x, self._weight, self.bias)


class PackedLora:
    """An adapter's matrices at one layer, y += B (A x); products have at least `min_rows`.

    Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021.
    """

    def __init__(
        self, down: torch.Tensor, up: torch.Tensor, widths: Sequence[int], min_rows: int
    ) -> None:
        """Pack down [projections * rank, K] and up [N, rank]."""
        self._rank, self._min_rows = up.shape[1], min_rows
        self._down = Linear(down)
        self._ups = [Linear(part) for part in torch.split(up, list(widths))]

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Add B (A x[rows]) to y[rows] in place; y [T, N], x [T, K], rows [R] int64."""
        mine = functional.pad(x[rows], (0, 0, 0, max(0, self._min_rows - len(rows))))
        first = 0  # column of y
        for up, low in zip(self._ups, torch.split(self._down(mine), self._rank, 1), strict=True):
            y[rows, first : first + up.out_features] += up(low.contiguous())[: len(rows)]
            first += up.out_features


def rows_are_invariant(linear: Linear, min_rows: int, dtype: torch.dtype = torch.float32) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, linear.in_features, generator=generator).to(dtype)
    whole = linear(x)
    sizes = (min_rows, min_rows + 1, 5, 8, 15, 16, 17, 33, 64, 100)
    return all(
        torch.equal(linear(x[start : start + rows]), whole[start : start + rows])
        for rows in sizes
        if rows >= min_rows
        for start in (0, 7)
    )


def fewest_invariant_rows(linear: Linear, dtype: torch.dtype) -> int:
    """Find the fewest rows at which a row's bits do not depend on the others, by trial.

    Raises ValueError where they always do.
    """
    for rows in (1, 2, 4, 16):
        if rows_are_invariant(linear, rows, dtype):
            return rows
    raise ValueError("this machine's matrix library gives a row other bits in other batches")


def route(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts [T, top_k] of each token, best first, and their weights in fp32.

    Weights are softmax probabilities over all experts; `renormalize` makes them sum to one.
    """
    wide = router_logits.float()
    chosen = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(-1).gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if renormalize else weights


class Experts:
    """A layer's experts: gate_up [E, 2 * I, H], down [E, H, I]; products have `min_rows`."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, min_rows: int = 1) -> None:
        self._gate_up = [Linear(weight) for weight in gate_up]
        self._down = [Linear(weight) for weight in down]
        self._min_rows = min_rows

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, act: str
    ) -> torch.Tensor:
        tokens, top_k = chosen.shape
        # A place is (token, choice). Those of one expert stand side by side in `by_expert`.
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._down)).tolist()
        results = x.new_empty(tokens * top_k, x.shape[1])
        for gate_up, down, places in zip(
            self._gate_up, self._down, torch.split(by_expert, counts), strict=True
        ):
            if len(places):
                rows = functional.pad(
                    x[places // top_k], (0, 0, 0, max(0, self._min_rows - len(places)))
                )
                results[places] = down(act_and_mul(gate_up(rows), act))[: len(places)]
        weighted = results.view(tokens, top_k, -1).float() * weights[..., None]
        total = weighted[:, 0]
        for choice in range(1, top_k):
            total = total + weighted[:, choice]
        return total.to(x.dtype)
