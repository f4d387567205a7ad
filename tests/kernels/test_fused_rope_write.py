"""Rotary embedding and KV write in Triton: all head sizes and rotary forms, 16-bit and fp8 caches,
padding rows.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.kernels.rounding import assert_same, captured, exact_rounding, poisoned, randn
from tests.kernels.twins import rope_and_write as twin

fused = pytest.importorskip("kvrelay.kernels.fused_rope_write", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures(exact_rounding.__name__)

gpu = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
POSITIONS, BLOCK_TOKENS, LAYERS = 500, 16, 2
# tokens, query heads, KV heads, head size, rotary dimensions
SMALL = [
    (1, 4, 2, 64, 64), (5, 2, 2, 80, 80), (3, 3, 1, 96, 96), (9, 6, 2, 128, 128), (2, 2, 1, 256, 256),
    (3, 2, 1, 80, 32), (3, 4, 4, 128, 96),
]  # fmt: skip
LARGE = [
    (1, 32, 8, 128, 128), (600, 32, 8, 128, 128), (700, 28, 4, 128, 128),
    (600, 32, 32, 80, 32), (600, 8, 4, 256, 256), (600, 32, 32, 96, 96),
]  # fmt: skip
SHAPES = [*SMALL, *(pytest.param(shape, marks=gpu) for shape in LARGE)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = [
    *((shape, norm, FP16) for shape in SMALL for norm in (None, "llama", "gemma")),
    *((SMALL[3], norm, dtype) for norm in (None, "llama") for dtype in (BF16, FP32)),
    *(pytest.param(shape, norm, BF16, marks=gpu) for shape in LARGE for norm in (None, "gemma")),
]


class Case:
    """Random inputs and a pool laid out as the engine's, of which one layer is written."""

    def __init__(self, shape, dtype, device, *, seed, kv_dtype=None, block_size=BLOCK_TOKENS):
        self.tokens, self.heads, self.kv_heads, self.dim, self.rotary = shape
        generator = torch.Generator().manual_seed(seed)
        self.qkv = randn(
            self.tokens,
            (self.heads + 2 * self.kv_heads) * self.dim,
            seed=seed,
            dtype=dtype,
            device=device,
            scale=2.0,
        )
        angles = torch.rand(POSITIONS, self.rotary // 2, generator=generator) * 6.28
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
        index = torch.int32 if seed % 2 else torch.int64
        self.positions = torch.randint(POSITIONS, (self.tokens,), generator=generator).to(
            device, index
        )
        blocks = self.tokens // block_size + 3
        slots = (
            torch.randperm((blocks - 1) * block_size, generator=generator)[: self.tokens]
            + block_size
        )
        slots[self.tokens // 2 : self.tokens // 2 + 1] = 0  # a padding row
        self.blocks, self.offsets = (
            (slots // block_size).to(device, index),
            (slots % block_size).to(device, index),
        )
        self.kv_dtype = kv_dtype or dtype
        self.pool = poisoned(
            blocks,
            self.kv_heads,
            LAYERS,
            2,
            block_size,
            self.dim,
            dtype=self.kv_dtype,
            device=device,
        )
        self.scale_pool = poisoned(
            blocks, self.kv_heads, LAYERS, 2, block_size, dtype=torch.float32, device=device
        )
        self.q_norm, self.k_norm = (
            randn(self.dim, seed=seed + s, dtype=dtype, device=device) * 0.2 + 1 for s in (1, 2)
        )

    def run(self, function, *, norm=False, plus_one=False, **more):
        """Everything the function wrote: the query it returns, qkv, the pool, the scales."""
        qkv, pool, scales = self.qkv.clone(), self.pool.clone(), self.scale_pool.clone()
        given = (
            {"q_norm": self.q_norm, "k_norm": self.k_norm, "eps": 1e-6, "plus_one": plus_one}
            if norm
            else {}
        )
        if self.kv_dtype == FP8:
            given |= {"key_scales": scales[:, :, 1, 0], "value_scales": scales[:, :, 1, 1]}
        query = function(
            qkv, self.positions, self.cos_sin, self.blocks, self.offsets, pool[:, :, 1, 0], pool[:, :, 1, 1],
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.dim, **given, **more,
        )  # fmt: skip
        assert query.data_ptr() == qkv.data_ptr()
        assert query.shape == (self.tokens, self.heads, self.dim)
        assert torch.equal(query.reshape(self.tokens, -1), qkv[:, : self.heads * self.dim])
        return qkv, pool, scales

    def compare(self, **more):
        qkv, pool, scales = self.run(fused.rope_and_write, **more)
        qkv_wanted, pool_wanted, scales_wanted = self.run(twin, **more)
        # A normed element that is rounded the other way shows in full where a rotation leaves
        # little of it.
        unit = 2**-7 if self.qkv.dtype == torch.bfloat16 else 2**-10
        atol = 4 * unit if more.get("norm") else 0.0
        assert_same(qkv, qkv_wanted, atol=atol)
        keys_and_values = slice(self.heads * self.dim, None)
        assert torch.equal(qkv[:, keys_and_values], self.qkv[:, keys_and_values])
        # Equal bytes where nothing was to be written; the null block takes any padding row.
        untouched = pool_wanted.float().isnan()
        assert torch.equal(pool.float().isnan(), untouched)
        atol *= 448 if self.kv_dtype == FP8 else 1
        assert_same(_taken(pool, ~untouched), _taken(pool_wanted, ~untouched), atol=atol)
        if self.kv_dtype == FP8:
            torch.testing.assert_close(scales, scales_wanted, rtol=1e-2, atol=0, equal_nan=True)


def _taken(tensor, mask):
    """tensor[mask], also of fp8, for which torch may have no indexing."""
    bits = torch.uint8 if tensor.dtype == FP8 else tensor.dtype
    return tensor.view(bits)[mask].view(tensor.dtype)


@pytest.mark.parametrize(("shape", "norm", "dtype"), FORMS, ids=str)
def test_equals_the_twin(device, shape, norm, dtype):
    block_size = (16, 32, 64)[sum(shape) // 2 % 3]
    case = Case(shape, dtype, device, seed=sum(shape), block_size=block_size)
    case.compare(norm=norm is not None, plus_one=norm == "gemma")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_cache_has_a_scale_per_token_and_head(device, shape, norm):
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 before compute capability 8.9")
    case = Case(shape, torch.bfloat16, device, seed=sum(shape), kv_dtype=FP8)
    case.qkv[:, -case.dim :] *= 1e-3  # a value head of small numbers must not lose them
    case.qkv[0] = 0
    case.compare(norm=norm)


def test_rows_of_a_wider_tensor_and_no_tokens(device):
    case = Case((4, 2, 1, 64, 64), torch.bfloat16, device, seed=3)
    wanted = case.run(twin)
    wide = poisoned(4, 300, dtype=torch.bfloat16, device=device)
    wide[:, 20:276] = case.qkv
    pool = case.pool.clone()
    rest = (
        case.positions,
        case.cos_sin,
        case.blocks,
        case.offsets,
        pool[:, :, 1, 0],
        pool[:, :, 1, 1],
    )
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    fused.rope_and_write(wide[:, 20:276], *rest, **sizes)
    assert_same(wide[:, 20:276].clone(), wanted[0])
    assert wide[:, :20].isnan().all()
    assert wide[:, 276:].isnan().all()
    assert torch.equal(pool.isnan(), wanted[1].isnan())
    none = (case.positions[:0], case.cos_sin, case.blocks[:0], case.offsets[:0], *rest[4:])
    assert fused.rope_and_write(wide[:0, 20:276], *none, **sizes).shape == (0, 2, 64)


@gpu
@pytest.mark.parametrize("dim", [80, 128])
def test_a_token_is_the_same_in_every_batch(device, dim):
    many = Case((2048, 8, 4, dim, dim), torch.bfloat16, device, seed=5)
    qkv, pool, _ = many.run(fused.rope_and_write, norm=True)
    for token in (0, 1, 7, 1023, 2047):
        one = copy.copy(many)
        one.tokens = 1
        for name in ("qkv", "positions", "blocks", "offsets"):
            setattr(one, name, getattr(many, name)[token : token + 1])
        row, alone, _ = one.run(fused.rope_and_write, norm=True)
        assert torch.equal(row[0], qkv[token])
        block, offset = int(many.blocks[token]), int(many.offsets[token])
        assert block == 0 or torch.equal(
            alone[block, :, 1, :, offset], pool[block, :, 1, :, offset]
        )


@gpu
def test_a_pool_beyond_4_gib(device):
    """The last block lies beyond 2^32 bytes and 2^31 elements, in a pool laid out as the engine's."""
    blocks, kv_heads, layers, block_size, dim = 1300, 8, 16, 64, 128
    cache = torch.full(
        (blocks, kv_heads, layers, 2, block_size, dim), torch.nan, dtype=BF16, device=device
    )
    assert cache.numel() > 1 << 31
    case = Case((40, 32, kv_heads, dim, dim), BF16, device, seed=6, block_size=block_size)
    _, small, _ = case.run(twin)
    moved = torch.where(case.blocks > 0, case.blocks + blocks - 3, 0).int()
    torch.cuda.synchronize()  # a launch may read it before the one ahead of it ends
    fused.rope_and_write(
        case.qkv, case.positions, case.cos_sin, moved, case.offsets, cache[:, :, -1, 0], cache[:, :, -1, 1],
        num_heads=32, num_kv_heads=kv_heads, head_dim=dim,
    )  # fmt: skip
    written = case.blocks > 0
    at, offsets = case.blocks.long()[written], case.offsets.long()[written]
    for kind in (0, 1):
        made = cache[:, :, -1, kind][moved.long()[written], :, offsets]
        assert_same(made, small[:, :, 1, kind][at, :, offsets])


@gpu
def test_dependent_launch_changes_nothing(device):
    """A chain that rotates the same rows again and again, in a graph, replayed on changing inputs."""
    case = Case((16, 32, 8, 128, 128), torch.bfloat16, device, seed=7)
    qkv, pool = case.qkv.clone(), case.pool
    rest = (case.cos_sin, case.blocks, case.offsets, pool[:, :, 1, 0], pool[:, :, 1, 1])

    def chain(between=lambda: None):
        for _ in range(8):
            fused.rope_and_write(
                qkv, case.positions, *rest, num_heads=32, num_kv_heads=8, head_dim=128,
                q_norm=case.q_norm, k_norm=case.k_norm, eps=1e-6,
            )  # fmt: skip
            between()

    graph, _ = captured(chain)
    for _ in range(50):
        start = torch.randn_like(case.qkv)
        qkv.copy_(start)
        graph.replay()
        made, stored = qkv.clone(), pool.clone()
        qkv.copy_(start)
        chain(torch.cuda.synchronize)
        assert torch.equal(qkv, made)
        torch.testing.assert_close(pool[1:], stored[1:], rtol=0, atol=0, equal_nan=True)
