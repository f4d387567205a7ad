"""Sequences over a shuffled pool, and plain attention of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

PADDING = 3  # rows behind those of the sequences


@dataclass
class Case:
    """One layer's inputs of a step, and what is needed to check them."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    block_tables: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key_cache.shape[1]

    def sequence_kv(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence, dequantized: [context, Hkv, D] fp64."""
        length, block_size = self.context_lens[sequence], self.key_cache.shape[2]
        ids = self.block_tables[sequence, : -(-length // block_size)].long()
        kv = []
        for cache, scales in (
            (self.key_cache, self.key_scales),
            (self.value_cache, self.value_scales),
        ):
            real = cache[ids].double()
            if scales is not None:
                real = real * scales[ids].double()[..., None]
            kv.append(real.transpose(1, 2).flatten(0, 1)[:length])
        return kv[0], kv[1]

    def expected(
        self, window: int = 0, softcap: float = 0.0, scale: float | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield plain attention in fp64 of each sequence's rows; zeros without a context."""
        for sequence, (first, count, length) in enumerate(
            zip(starts(self.query_lens), self.query_lens, self.context_lens, strict=False)
        ):
            rows = slice(first, first + count)
            if not count or not length:
                yield rows, torch.zeros_like(self.query[rows])
                continue
            key, value = (
                part.repeat_interleave(self.group, 1) for part in self.sequence_kv(sequence)
            )
            query = self.query[rows].double()
            scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[2] ** -0.5)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(length - count, length, device=query.device)[:, None]
            other = torch.arange(length, device=query.device)[None]
            hidden = other > position
            if window:
                hidden |= other <= position - window
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            yield rows, torch.einsum("hqk,khd->qhd", weights, value)


def starts(query_lens: list[int]) -> list[int]:
    return [0, *itertools.accumulate(query_lens)]


def make_case(
    mix: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    fp8: bool = False,
    layers: int = 2,
    spare_blocks: int = 5,
) -> Case:
    """Random inputs over shuffled blocks; whatever no token has written is NaN. The query is a view
    of a fused qkv.
    """
    generator = torch.Generator(device).manual_seed(seed)
    query_lens = [count for count, _ in mix]
    context_lens = [count + before for count, before in mix]  # before -1: a decode that is padding
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 1 + spare_blocks
    # An odd number of columns, because every kind of stride is a compilation.
    tables = torch.zeros(len(mix), max(needed) + 2 | 1, dtype=torch.int32)
    # Highest ids first, so that a big pool is used at its far end.
    ids = [
        int(i) + 1 + spare_blocks
        for i in torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed))
    ]
    for row, need in zip(tables, needed, strict=True):
        row[:need] = torch.tensor([ids.pop() for _ in range(need)], dtype=torch.int32)

    kv_dtype = torch.float8_e4m3fn if fp8 else dtype
    plane = (
        block_size * dim * kv_dtype.itemsize
    )  # bytes of one layer's keys in one block of one head
    pool = torch.empty(
        num_blocks,
        kv_heads,
        layers * 2 * (plane + 4 * block_size * fp8),
        dtype=torch.uint8,
        device=device,
    )
    first = (layers - 1) * 2  # the last layer's keys; its values lie behind them
    caches = [
        pool.view(kv_dtype)[..., (first + i) * block_size * dim :][
            ..., : block_size * dim
        ].unflatten(-1, (-1, dim))
        for i in (0, 1)
    ]
    scales: list[torch.Tensor | None] = [None, None]
    if fp8:
        floats = pool.view(torch.float32)[..., layers * 2 * plane // 4 :]
        scales = [floats[..., (first + i) * block_size :][..., :block_size] for i in (0, 1)]
    pool[0] = 0xFF  # NaN in every format
    for row, need, length in zip(tables, needed, context_lens, strict=True):
        used = row[:need].long().to(device)
        for cache, scale in zip(caches, scales, strict=True):
            vectors = torch.randn(
                need, kv_heads, block_size, dim, generator=generator, device=device
            )
            if scale is not None:
                amax = vectors.abs().amax(-1)
                scale[used] = amax / 448
                vectors = vectors / (amax / 448)[..., None]
            cache[used] = vectors.to(kv_dtype)
            if length % block_size:
                last = int(row[need - 1])
                cache[last, :, length % block_size :] = torch.full(
                    (1,), torch.nan, device=device
                ).to(kv_dtype)
                if scale is not None:
                    scale[last, :, length % block_size :] = torch.nan
    rows = sum(query_lens) + PADDING
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator, device=device)
    query = (1.5 * qkv).to(dtype)[:, :heads]
    return Case(query, *caches, *scales, tables.to(device), query_lens, context_lens)
