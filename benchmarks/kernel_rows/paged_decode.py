"""Rows of the paged decode kernel: one call per layer of a pool in the engine's own layout, over
shuffled blocks.

8B shape: 32 query heads, 8 KV heads of 128. The plan, made once per step, is timed in a row of its
own. The bytes are those of keys and values (and fp8 scales), read once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.decode_plan import DecodeWorkspace, plan_decode
from kvrelay.kernels.paged_decode import paged_decode

__all__ = ["rows"]

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# Beside the workspace, all memory that the rows take.
POOL_BYTES = 36 << 30


@dataclass(frozen=True, slots=True)
class _Work:
    name: str
    lengths: tuple[int, ...]
    layers: int = 32


ONE = _Work("b1 x 1k", (1024,))
MEDIUM = _Work("b32 x 1k", (1024,) * 32)
LARGE = _Work("b128 x 1k", (1024,) * 128)
LONG = _Work("b128 x 4k", (4096,) * 128, layers=16)
WORKS = (
    ONE,
    MEDIUM,
    _Work("b32 x 4k", (4096,) * 32),
    LARGE,
    LONG,
    _Work("b256 x 1k", (1024,) * 256),
    _Work("b64: 1 x 32k, 63 x 512", (32768, *(512,) * 63)),
    _Work("b256: 1..2000, half padding", (*(1 + 1999 * i // 127 for i in range(128)), *(0,) * 128)),
)


def rows() -> Iterator[Row]:
    buffer = _random_buffer()
    for fp8, block_size, work in itertools.product((False, True), (64, 16), WORKS):
        yield _row(buffer, work, block_size, fp8)
    for work in (ONE, MEDIUM):
        yield _row(buffer, work, 64, False, pdl=True)
    for batch in (1, 256):
        workspace, lengths = (
            _workspace(batch),
            torch.full((batch,), 1000, dtype=torch.int32, device="cuda"),
        )
        us = median_us([lambda w=workspace, n=lengths: plan_decode(n, w, block_size=64)] * 8)  # type: ignore[misc]
        yield Row("plan_decode", f"b{batch}", us)


def _row(
    buffer: torch.Tensor,
    work: _Work,
    block_size: int,
    fp8: bool,
    *,
    pdl: bool = False,
) -> Row:
    calls = _calls(buffer, work, block_size, fp8, pdl=pdl)
    vector_bytes = HEAD_DIM + 4 if fp8 else 2 * HEAD_DIM
    name = f"{work.name}, {'fp8' if fp8 else 'bf16'}, block {block_size}{', pdl' if pdl else ''}"
    return Row(
        "paged_decode",
        name,
        median_us(calls),
        2.0 * sum(work.lengths) * KV_HEADS * vector_bytes,
    )


def _calls(
    buffer: torch.Tensor, work: _Work, block_size: int, fp8: bool, *, pdl: bool
) -> list[Callable[[], object]]:
    batch, counts = len(work.lengths), [-(-length // block_size) for length in work.lengths]
    owned = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    tables = torch.zeros(batch, max(counts), dtype=torch.int32)
    tables[owned] = (
        torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int() + 1
    )
    layers = _layers(buffer, sum(counts) + 1, work.layers, block_size, fp8)
    tables, lengths = tables.cuda(), torch.tensor(work.lengths, dtype=torch.int32, device="cuda")
    fused = torch.randn(
        batch, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=torch.bfloat16, device="cuda"
    )
    query = fused[:, : HEADS * HEAD_DIM].view(batch, HEADS, HEAD_DIM)
    out, workspace = torch.empty_like(query), _workspace(batch, 1 if fp8 else 2)
    plan_decode(lengths, workspace, block_size=block_size)

    def call(layer: tuple[torch.Tensor | None, ...]) -> object:
        key, value, key_scales, value_scales = layer
        assert key is not None
        assert value is not None
        return paged_decode(
            query,
            key,
            value,
            tables,
            lengths,
            workspace,
            out=out,
            scale=HEAD_DIM**-0.5,
            key_scales=key_scales,
            value_scales=value_scales,
            pdl=pdl,
        )

    return [lambda layer=layer: call(layer) for layer in layers]  # type: ignore[misc]


def _layers(
    buffer: torch.Tensor, blocks: int, layers: int, block_size: int, fp8: bool
) -> list[tuple[torch.Tensor | None, ...]]:
    vectors = layers * 2 * block_size
    head_bytes = vectors * (HEAD_DIM + 4 if fp8 else 2 * HEAD_DIM)
    raw = buffer[: blocks * KV_HEADS * head_bytes].view(blocks, KV_HEADS, head_bytes)
    shape = (blocks, KV_HEADS, layers, 2, block_size)
    if not fp8:
        pool = raw.view(torch.bfloat16).view(*shape, HEAD_DIM)
        return [(pool[:, :, layer, 0], pool[:, :, layer, 1], None, None) for layer in range(layers)]
    numbers = raw[:, :, : vectors * HEAD_DIM].view(torch.float8_e4m3fn).view(*shape, HEAD_DIM)
    scales = raw[:, :, vectors * HEAD_DIM :].view(torch.float32).view(shape)
    return [
        (
            numbers[:, :, layer, 0],
            numbers[:, :, layer, 1],
            scales[:, :, layer, 0],
            scales[:, :, layer, 1],
        )
        for layer in range(layers)
    ]


def _random_buffer() -> torch.Tensor:
    buffer = torch.empty(POOL_BYTES // 4, dtype=torch.int32, device="cuda")
    buffer.random_(-(2**31), 2**31).bitwise_and_(0xBFBFBFBF - 2**32)
    return buffer.view(torch.uint8)


def _workspace(batch: int, element_bytes: int = 2) -> DecodeWorkspace:
    return DecodeWorkspace(
        max_batch=batch,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        device="cuda",
        element_bytes=element_bytes,
    )
