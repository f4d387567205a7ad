"""Paged decode attention equals plain attention for any mixture of lengths, and leaves its
workspace as it found it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.kernels.decode_plan import DecodeWorkspace, plan_decode
from kvrelay.kernels.paged_decode import paged_decode
from tests.kernels.rounding import assert_attention, captured

LAYERS = 2
GPU = torch.cuda.is_available()
# The interpreter of Triton 3.6 multiplies the bits of bf16 as integers in `tl.dot`, so the CPU
# tests use fp16 instead.
BF16 = torch.bfloat16 if GPU else torch.float16


@dataclass
class Pool:
    """One layer's views of a pool whose every byte that no sequence owns is NaN; block 0 is the
    null block.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    tables: torch.Tensor
    real: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values [kv_heads, length, head_dim] of each sequence in fp32, after rounding."""

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"key_scales": self.key_scales, "value_scales": self.value_scales}


def _empty_pool(
    blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    fp8: bool,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Views of layer 1: keys, values and the scales of both."""
    if not fp8:
        pool = torch.full(
            (blocks, kv_heads, LAYERS, 2, block_size, head_dim),
            torch.nan,
            dtype=dtype,
            device=device,
        )
        return pool[:, :, 1, 0], pool[:, :, 1, 1], None, None
    vectors = LAYERS * 2 * block_size  # of a block and head
    raw = torch.full(
        (blocks, kv_heads, vectors * (head_dim + 4)), 0x7F, dtype=torch.uint8, device=device
    )
    numbers = raw[:, :, : vectors * head_dim].view(torch.float8_e4m3fn)
    numbers = numbers.unflatten(2, (LAYERS, 2, block_size, head_dim))
    scales = (
        raw[:, :, vectors * head_dim :].view(torch.float32).unflatten(2, (LAYERS, 2, block_size))
    )
    scales.fill_(torch.nan)
    return numbers[:, :, 1, 0], numbers[:, :, 1, 1], scales[:, :, 1, 0], scales[:, :, 1, 1]


def _fill(
    lengths: list[int],
    *,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    fp8: bool = False,
    seed: int = 0,
    device: torch.device,
    spare_columns: int = 2,
) -> Pool:
    """Random keys and values of sequences of these lengths in shuffled blocks."""
    order, random = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    key, value, key_scales, value_scales = _empty_pool(
        sum(needed) + 1, kv_heads, block_size, head_dim, dtype, fp8, device
    )
    free = (torch.randperm(sum(needed), generator=order) + 1).tolist()
    # An odd number of columns, because every kind of stride is a compilation.
    tables = torch.zeros(len(lengths), max(needed) + spare_columns | 1, dtype=torch.int32)
    real = []
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        ids = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(ids, dtype=torch.int32)
        pair = []
        for cache, scales in ((key, key_scales), (value, value_scales)):
            vectors = torch.randn(kv_heads, length, head_dim, generator=random, device=device)
            if scales is None:
                vectors = vectors.to(cache.dtype)
                pair.append(vectors.float())
            else:
                vectors *= (
                    torch.rand(kv_heads, length, 1, generator=random, device=device) * 3 + 0.01
                )
                factor = vectors.abs().amax(-1, keepdim=True) / 448
                vectors = (vectors / factor).to(cache.dtype)
                pair.append(vectors.float() * factor)
                _scatter(scales, ids, factor[..., 0], torch.nan)
            _scatter(
                cache.view(torch.uint8), ids, vectors.view(torch.uint8), 0xFF
            )  # bytes of NaN in all three types
        real.append((pair[0], pair[1]))
    return Pool(key, value, key_scales, value_scales, tables.to(device), real)


def _scatter(cache: torch.Tensor, ids: list[int], vectors: torch.Tensor, poison: float) -> None:
    """vectors [kv_heads, length, ...] into blocks of cache [num_blocks, kv_heads, block_size, ...]."""
    kv_heads, length, *rest = vectors.shape
    whole = vectors.new_full((kv_heads, len(ids) * cache.shape[2], *rest), poison)
    whole[:, :length] = vectors
    cache[ids] = whole.unflatten(1, (len(ids), cache.shape[2])).transpose(0, 1)


def _plain(
    query: torch.Tensor, pool: Pool, scale: float, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """Textbook attention of each row in fp32 [B, heads, head_dim]."""
    out = torch.zeros(query.shape, device=query.device)
    for row, (key, value) in enumerate(pool.real):
        kv_heads, length, dim = key.shape
        if length == 0:
            continue
        scores = query[row].float().view(kv_heads, -1, dim) @ key.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[..., : max(0, length - window)] = -torch.inf
        out[row] = (scores.softmax(-1) @ value).view(-1, dim)
    return out


def _query(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
):
    """Rows of a fused qkv tensor, twice as wide as a unit normal so that the softmax has peaks."""
    random = torch.Generator().manual_seed(seed + 1000)
    fused = (
        torch.randn(batch, (heads + 2 * kv_heads) * head_dim, generator=random).to(device, dtype)
        * 2
    )
    return fused[:, : heads * head_dim].view(batch, heads, head_dim)


def _lengths(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def _workspace(
    max_batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    *,
    fp8: bool = False,
) -> DecodeWorkspace:
    workspace = DecodeWorkspace(
        max_batch=max_batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        device=device,
        element_bytes=1 if fp8 else 2,
    )
    workspace.part_mixed.fill_(torch.nan)
    workspace.part_weight.fill_(torch.nan)
    return workspace


def _check(
    lengths: list[int],
    device: torch.device,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    fp8: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    seed: int = 0,
    launches: int = 2,
) -> None:
    """Compare with plain attention; launches in a row give the same bits, whoever arrives last."""
    pool = _fill(
        lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, fp8=fp8, seed=seed,
        device=device,
    )  # fmt: skip
    query = _query(len(lengths), heads, kv_heads, head_dim, dtype, device, seed)
    context_lens, scale = _lengths(lengths, device), head_dim**-0.5
    workspace = _workspace(len(lengths), heads, kv_heads, head_dim, device, fp8=fp8)
    plan_decode(context_lens, workspace, block_size=block_size, window=window)
    outs = [
        paged_decode(
            query, pool.key, pool.value, pool.tables, context_lens, workspace, out=torch.full_like(query, torch.nan),
            scale=scale, window=window, softcap=softcap, **pool.scales,
        )
        for _ in range(launches)
    ]  # fmt: skip
    out, expected, long = outs[0], _plain(query, pool, scale, window, softcap), context_lens > 0
    assert_attention(out[long], expected[long], lengths)
    assert torch.equal(out[~long], torch.zeros_like(out[~long]))
    assert not workspace.arrivals.any()
    assert all(torch.equal(out, other) for other in outs)


SOME = [200, 0, 31, 64]


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([1, 0, 63, 64, 65, 128, 16, 15, 17], {}),
        ([700, 3, 1, 9, 0, 2, 30, 5], {"launches": 200 if GPU else 2}),
        ([389], {}),
        ([0, 0, 40, 0], {}),
        ([0], {}),
        ([77, 12, 0, 199, 150, 3, 44], {"kv_heads": 4, "block_size": 32, "dtype": BF16}),
        *(
            (SOME, {"kv_heads": 1, "head_dim": dim, "block_size": size, "dtype": BF16, "fp8": fp8})
            for dim, size in ((64, 64), (80, 16), (96, 32), (128, 16), (256, 64))
            for fp8 in (False, True)
        ),
        *(([150, 3, 70], {"heads": 2 * group}) for group in (1, 4, 7, 8, 17)),
        *(([300, 1, 64, 0, 165], {"window": window}) for window in (1, 16, 63, 64, 100, 1000)),
        *(
            ([130, 7], {"block_size": 32, "fp8": fp8, "softcap": softcap, "window": 90})
            for softcap in (0.5, 30.0)
            for fp8 in (False, True)
        ),
    ],
    ids=str,
)
def test_equals_plain_attention(lengths, options, device):
    _check(lengths, device, **options)


def test_a_call_that_was_not_planned_is_refused(device):
    workspace, context_lens = _workspace(2, 4, 2, 64, device), _lengths([3, 4], device)
    pool = _fill([3, 4], kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16, device=device)
    query = _query(2, 4, 2, 64, torch.float16, device, 0)
    plan_decode(context_lens, workspace, block_size=16)
    given = query, pool.key, pool.value, pool.tables, context_lens, workspace
    with pytest.raises(ValueError, match="planned for"):
        paged_decode(*given, out=query.clone(), scale=1.0, window=9)


# From here on a GPU is needed.


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["16bit", "fp8"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_full_grid_on_a_gpu(head_dim, block_size, fp8, device):
    """Every combination has one dtype, group size and soft cap, because each of these is a
    compilation.
    """
    number = head_dim // 16 + block_size // 16 + 3 * fp8
    dtype = [torch.bfloat16, torch.float16][number // 2 % 2]
    heads, kv_heads = [(8, 8), (8, 4), (8, 2), (14, 2), (32, 4)][number % 5]
    random = torch.Generator().manual_seed(number)
    mixes = [
        torch.randint(0, 900, (133,), generator=random).tolist(),
        [20000] + [1, 64, 0, 65, 200] * 5,
        [3000],
    ]
    for lengths, window in itertools.product(mixes, [0, 700]):
        _check(
            lengths, device, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
            fp8=fp8, window=window, softcap=[0.0, 0.0, 30.0][number % 3], seed=number,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["16bit", "fp8"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_beyond_four_gibibytes(block_size, fp8, device):
    """A pool of more than 2^31 elements and 4 GiB; the sequences' blocks are its last."""
    heads, kv_heads, head_dim, lengths = 8, 8, 128, [1000, 77]
    pool = _fill(
        lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16, fp8=fp8,
        device=device,
    )  # fmt: skip
    blocks = -(
        -(5 << 30) // (LAYERS * 2 * kv_heads * block_size * head_dim * pool.key.element_size())
    )
    big = _empty_pool(blocks, kv_heads, block_size, head_dim, torch.bfloat16, fp8, device)
    offset = blocks - pool.key.shape[0]
    for view, small in zip(
        big, (pool.key, pool.value, pool.key_scales, pool.value_scales), strict=True
    ):
        if view is not None and small is not None:
            view[offset:] = small
    assert offset * big[0].stride(0) > 2**31
    query, context_lens = (
        _query(2, heads, kv_heads, head_dim, torch.bfloat16, device, 0),
        _lengths(lengths, device),
    )
    workspace = _workspace(2, heads, kv_heads, head_dim, device, fp8=fp8)
    plan_decode(context_lens, workspace, block_size=block_size)
    out = torch.full((2, heads, head_dim), torch.nan, dtype=torch.bfloat16, device=device)
    paged_decode(
        query, big[0], big[1], pool.tables + offset, context_lens, workspace, out=out, scale=0.1, key_scales=big[2],
        value_scales=big[3],
    )  # fmt: skip
    assert_attention(out, _plain(query, pool, 0.1), lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_replays_with_other_lengths_and_tables(pdl, device):
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    batch, heads, kv_heads, head_dim, block_size, layers = 64, 8, 2, 128, 64, 4
    random = torch.Generator().manual_seed(0)
    mixes = [
        [2000] * batch,
        torch.randint(0, 2000, (batch,), generator=random).tolist(),
        [1] * batch,
        [2000] + [0] * (batch - 1),
        [0] * batch,
    ]
    pools = [
        _fill(
            lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16, seed=seed,
            device=device, spare_columns=40 - -(-max(lengths) // block_size),
        )
        for seed, lengths in enumerate(mixes)
    ]  # fmt: skip
    blocks = max(pool.key.shape[0] for pool in pools)
    key, value, _, _ = _empty_pool(
        blocks, kv_heads, block_size, head_dim, torch.bfloat16, False, device
    )
    tables, context_lens = torch.zeros_like(pools[0].tables), _lengths([1] * batch, device)
    query = torch.zeros(batch, heads, head_dim, dtype=torch.bfloat16, device=device)
    outs = torch.empty(layers, batch, heads, head_dim, dtype=torch.bfloat16, device=device)
    workspace = _workspace(batch, heads, kv_heads, head_dim, device)
    key.fill_(0)
    value.fill_(0)

    def step() -> None:
        plan_decode(context_lens, workspace, block_size=block_size)
        query.add_(0)  # what stands between plan and decode in a model
        for out in outs:
            paged_decode(
                query, key, value, tables, context_lens, workspace, out=out, scale=0.1, pdl=pdl
            )

    graph, _ = captured(step)
    for seed, (lengths, pool) in enumerate(zip(mixes, pools, strict=True)):
        key[: len(pool.key)], value[: len(pool.value)] = pool.key, pool.value
        tables.copy_(pool.tables)
        context_lens.copy_(_lengths(lengths, device))
        query.copy_(_query(batch, heads, kv_heads, head_dim, torch.bfloat16, device, seed))
        outs.fill_(torch.nan)
        graph.replay()
        expected, long = _plain(query, pool, 0.1), context_lens > 0
        for out in outs:
            assert_attention(out[long], expected[long], lengths)
            assert not out[~long].any()
        assert not workspace.arrivals.any()
