"""Paged prefill equals plain attention, leaves padding alone, and gives a row bits that depend on
its sequence only.

On the CPU the portable kernel runs in Triton's interpreter (which has no bf16 products). Marked
`gpu`: both kernels.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.kernels.compiling import run_compiler
from tests.kernels.rounding import assert_attention

pytest.importorskip("triton")
from kvrelay.kernels import paged_prefill as prefill_module
from kvrelay.kernels.paged_prefill import (
    TILE_ROWS,
    paged_prefill,
    prefill_tiles,
    tile_heads,
    tile_tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

# (tokens of this step, tokens cached before) of each sequence
MIXES = {
    "decodes": [(1, 0), (1, 5), (1, 127), (1, 128), (1, 300)],
    "prompts": [(7, 0), (33, 0), (130, 0)],
    "mixed": [(1, 200), (100, 37), (1, 60), (40, 0), (2, 126), (0, 0)],
}
LONG_MIXES = {
    "long": [(1, 4000), (2048, 3001), (513, 0), (1, 77), (300, 1234)],
    "many": [(1 + 37 * i % 200, 61 * i % 700) for i in range(60)],
}
HEADS = [(4, 2), (9, 3), (8, 1), (5, 5)]
PADDING = 3


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

    def run(
        self, *, window: int = 0, softcap: float = 0.0, scale: float | None = None
    ) -> torch.Tensor:
        """The kernel's output, poisoned before."""
        device, dim = self.query.device, self.query.shape[2]
        tiles = prefill_tiles(self.query_lens, self.context_lens, group=self.group, window=window)
        out = torch.full_like(self.query, torch.nan, memory_format=torch.contiguous_format)
        returned = paged_prefill(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            torch.tensor(starts(self.query_lens), dtype=torch.int32, device=device),
            torch.tensor(self.context_lens, dtype=torch.int32, device=device),
            torch.from_numpy(tiles).to(device),
            out=out,
            scale=scale or dim**-0.5,
            window=window,
            softcap=softcap,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
        )
        assert returned is out
        return out

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

    def check(self, *, window: int = 0, softcap: float = 0.0, scale: float | None = None) -> None:
        """Against plain attention in fp64; and padding is as it was."""
        out = self.run(window=window, softcap=softcap, scale=scale)
        first = starts(self.query_lens)
        for sequence, (count, length) in enumerate(
            zip(self.query_lens, self.context_lens, strict=True)
        ):
            if count == 0:
                continue
            key, value = (
                part.repeat_interleave(self.group, 1) for part in self.sequence_kv(sequence)
            )
            query = self.query[first[sequence] : first[sequence] + count].double()
            scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[2] ** -0.5)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(length - count, length, device=query.device)[:, None]
            other = torch.arange(length, device=query.device)[None]
            hidden = other > position
            if window:
                hidden |= other <= position - window
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            expected = torch.einsum("hqk,khd->qhd", weights, value)
            assert_attention(
                out[first[sequence] : first[sequence] + count], expected, (sequence, count, length)
            )
        assert out[sum(self.query_lens) :].isnan().all()


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
    context_lens = [count + before for count, before in mix]
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


def test_tiles_cover_every_token_once_and_long_ones_come_first() -> None:
    rng = np.random.default_rng(1)
    for group, window in itertools.product((1, 3, 4, 7, 8, 64), (0, 100)):
        query_lens = rng.integers(0, 300, 20).tolist()
        context_lens = [count + int(rng.integers(0, 900)) for count in query_lens]
        tiles = prefill_tiles(query_lens, context_lens, group=group, window=window)
        tokens = tile_tokens(group)
        assert tiles.dtype == np.int32
        assert tokens * tile_heads(group) == TILE_ROWS
        assert group % tile_heads(group) == 0
        seen = sorted(
            (int(s), int(f) + i) for s, f in tiles for i in range(tokens) if f + i < query_lens[s]
        )
        assert seen == [(s, i) for s, count in enumerate(query_lens) for i in range(count)]
        assert all(first % tokens == 0 and first < query_lens[s] for s, first in tiles)
        newest = [
            min(context_lens[s] - query_lens[s] + f + tokens, context_lens[s]) for s, f in tiles
        ]
        keys = [min(n, window + tokens) if window else n for n in newest]
        assert keys == sorted(keys, reverse=True)


def test_no_sequences_make_no_tiles_and_a_context_holds_its_own_chunk() -> None:
    assert prefill_tiles([], [], group=4).shape == (0, 2)
    assert prefill_tiles([0], [9], group=4).shape == (0, 2)
    with pytest.raises(ValueError, match="fewer tokens"):
        prefill_tiles([5], [4], group=1)


cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="small shapes, for the interpreter")


MIXED, HALF = MIXES["mixed"], torch.float16
SMALL_CASES = [
    *(
        ((mix, heads, kv_heads, 64, 16, torch.float32), {"window": window})
        for mix in MIXES.values()
        for heads, kv_heads in HEADS
        for window in (0, 1, 50)
    ),
    *(((MIXED, 4, 2, dim, size, HALF), {}) for dim in (64, 80, 96, 128, 256) for size in (16, 64)),
    *(
        ((MIXED, 4, 2, 64, 32, torch.float32), {"softcap": 2.0, "window": window})
        for window in (0, 70)
    ),
    *(
        ((MIXED, 6, 2, 80, size, HALF), {"fp8": True, "window": window, "softcap": softcap})
        for size in (16, 64)
        for window, softcap in ((0, 0.0), (60, 5.0))
    ),
]


@cpu_only
@pytest.mark.parametrize(("sizes", "options"), SMALL_CASES, ids=str)
def test_equals_plain_attention(sizes: tuple, options: dict, device: torch.device) -> None:
    fp8 = options.get("fp8", False)
    case = make_case(*sizes, device, seed=len(sizes[0]), fp8=fp8)
    case.check(window=options.get("window", 0), softcap=options.get("softcap", 0.0))


def check_bits(
    case: Case, cuts: list[int], *, window: int, company: bool, whole: torch.Tensor
) -> None:
    """Sequence 0 cut into chunks, alone or behind sequence 1: bits as in one chunk."""
    (length, other), query = case.context_lens, case.query
    for first, end in itertools.pairwise(cuts):
        part = Case(query[first:end], *_pool(case), case.block_tables[:1], [end - first], [end])
        if company:
            rows = torch.cat([query[length : length + other], query[first:end]])
            part = Case(
                rows, *_pool(case), case.block_tables.flip(0), [other, end - first], [other, end]
            )
        assert torch.equal(part.run(window=window)[-(end - first) :], whole[first:end]), (
            first,
            end,
            company,
        )


def _pool(
    case: Case,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    return case.key_cache, case.value_cache, case.key_scales, case.value_scales


@cpu_only
@pytest.mark.parametrize("window", [0, 50])
def test_bits_depend_on_neither_batch_nor_chunks(window: int, device: torch.device) -> None:
    case = make_case([(150, 0), (60, 0)], 4, 1, 64, 16, torch.float16, device, seed=14)
    whole = case.run(window=window)[:150]
    check_bits(case, [0, 1, 2, 17, 100, 131, 149, 150], window=window, company=False, whole=whole)
    check_bits(case, [0, 64, 65, 150], window=window, company=True, whole=whole)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    case = make_case([(4, 0)], 4, 2, 64, 16, torch.float16, device)
    values = case.value_cache
    case.value_cache = values.contiguous()
    with pytest.raises(ValueError, match="strides of key_cache"):
        case.run()
    case.value_cache, case.key_scales = values, torch.ones(values.shape[:3], device=device)
    with pytest.raises(ValueError, match="fp8 needs both scales"):
        case.run()
    case.query = case.query[:, :3]
    with pytest.raises(ValueError, match="do not fit"):
        case.run()


COMPILE = """
from kvrelay.kernels.paged_prefill import tile_heads, tile_tokens

def signature(kernel, special, constants):
    types = {name: special.get(name, "i32") for name in kernel.arg_names}
    types.update({name: "constexpr" for name in constants})
    aligned = [i for i, name in enumerate(kernel.arg_names) if types[name].startswith("*") or name.endswith("_stride")]
    return types, {(i,): [["tt.divisibility", 16]] for i in aligned}

tables = {name: "*i32" for name in ("block_tables", "query_starts", "context_lens", "tiles")}
sizes = dict(KV_HEADS=8, GROUP=4, HEAD_DIM=128, WINDOW=0, SOFTCAP=False)

def spilled(which):
    if which == "hopper":
        from triton.experimental.gluon._runtime import GluonASTSource
        from kvrelay.kernels.paged_prefill_hopper import _prefill_kernel as kernel
        layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank={}, transposed=False,"
        layout += " fp4_padded=False, cga_layout=[])"
        block = f"tensordesc<bf16[16, 128],{layout.format(2)}>"
        special = {**tables, "queries": f"tensordesc<bf16[32, 4, 128],{layout.format(3)}>"}
        special.update(keys=block, values=block)
        special.update(out="*bf16", to_exponent="fp32", cap="fp32")
        constants = dict(sizes, STRIP=128, SLOTS=2, TAKE_TURNS=True, HOLD_WAIT=True)
        kind, options, target = GluonASTSource, {"num_warps": 4}, 90
    else:
        from kvrelay.kernels.paged_prefill import _prefill_kernel as kernel
        kind, target = triton.compiler.ASTSource, int(which)
        special = dict(tables, query="*bf16", keys="*bf16", values="*bf16", out="*bf16", to_exponent="fp32", cap="fp32")
        constants = dict(sizes, HEADS=4, TOKENS=32, DIM=128, STRIP=64, BLOCK_TOKENS=16, FP8=False)
        constants.update(key_scales=None, value_scales=None)
        options = {"num_warps": 8, "num_stages": 3 if target == 90 else 2}
    types, attributes = signature(kernel, special, constants)
    source = kind(kernel, types, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return report(compiled, target)

print(*map(spilled, sys.argv[1:]))
"""


COMPILED = ["80", "90", "hopper"]


@pytest.fixture(scope="module")
def spilled() -> dict[str, str]:
    """Ampere and Hopper code for the shape of Llama-3.1-8B."""
    return dict(zip(COMPILED, run_compiler(COMPILE, *COMPILED).split(), strict=True))


@pytest.mark.parametrize("kernel", COMPILED)
def test_compiles_without_spills(kernel: str, spilled: dict[str, str]) -> None:
    assert spilled[kernel] == "0", "bytes spilled"


@pytest.fixture(params=["hopper", "portable"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kernel in turn, where the GPU has it."""
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    monkeypatch.setattr(prefill_module, "PREFILL_PATH", request.param)
    return str(request.param)


GPU_GRID = [
    *[
        (dim, block, torch.bfloat16, 0, 0.0)
        for dim in (64, 80, 96, 128, 256)
        for block in (16, 32, 64)
    ],
    *[(dim, 64, torch.float16, 0, 0.0) for dim in (64, 128)],
    *[(dim, 16, torch.bfloat16, 300, 20.0) for dim in (64, 96, 128, 256)],
    (128, 64, torch.bfloat16, 1, 0.0),
    (128, 64, torch.bfloat16, 1000, 0.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "block_size", "dtype", "window", "softcap"), GPU_GRID)
def test_on_gpu(
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int,
    softcap: float,
    path: str,
    device: torch.device,
) -> None:
    for seed, mix in enumerate([*MIXES.values(), *LONG_MIXES.values()]):
        case = make_case(mix, 8, 2, dim, block_size, dtype, device, seed=seed)
        case.check(window=window, softcap=softcap)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [*HEADS, (32, 8), (28, 4), (64, 1)])
def test_groups_on_gpu(heads: int, kv_heads: int, path: str, device: torch.device) -> None:
    for seed, mix in enumerate([*MIXES.values(), *LONG_MIXES.values()]):
        make_case(mix, heads, kv_heads, 128, 64, torch.bfloat16, device, seed=seed).check()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (300, 20.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_on_gpu(
    dim: int, window: int, softcap: float, dtype: torch.dtype, device: torch.device
) -> None:
    for seed, mix in enumerate([*MIXES.values(), *LONG_MIXES.values()]):
        case = make_case(mix, 8, 2, dim, 64, dtype, device, seed=seed, fp8=True)
        case.check(window=window, softcap=softcap)


@pytest.mark.gpu
def test_a_pool_of_more_than_2_to_the_31_elements(path: str, device: torch.device) -> None:
    """Blocks of 8 MiB as of Llama-3.1-8B, the used ones beyond 4.7 GiB."""
    mix = [(1, 200), (300, 500), (64, 0)]
    make_case(
        mix, 32, 8, 128, 64, torch.bfloat16, device, seed=1, layers=32, spare_blocks=600
    ).check()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("dim", [128, 64])
def test_bits_on_gpu(window: int, dim: int, path: str, device: torch.device) -> None:
    length = 1100
    case = make_case([(length, 0), (700, 0)], 32, 8, dim, 64, torch.bfloat16, device, seed=2)
    whole = case.run(window=window)[:length]
    assert torch.equal(case.run(window=window)[:length], whole)
    check_bits(
        case, [0, 1, 2, 17, 100, 131, 1000, length], window=window, company=False, whole=whole
    )
    check_bits(case, [0, 64, 65, 513, length], window=window, company=True, whole=whole)
    check_bits(case, [1000, *range(1001, length + 1)], window=window, company=True, whole=whole)


@pytest.mark.gpu
def test_runs_in_a_cuda_graph(path: str, device: torch.device) -> None:
    case = make_case(LONG_MIXES["long"], 32, 8, 128, 64, torch.bfloat16, device, seed=3)
    expected = case.run()
    rows = sum(case.query_lens)
    first = torch.tensor(starts(case.query_lens), dtype=torch.int32, device=device)
    contexts = torch.tensor(case.context_lens, dtype=torch.int32, device=device)
    tiles = prefill_tiles(case.query_lens, case.context_lens, group=4)
    tiles = torch.from_numpy(tiles).to(device)
    out = torch.full_like(expected, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_prefill(
            case.query,
            case.key_cache,
            case.value_cache,
            case.block_tables,
            first,
            contexts,
            tiles,
            out=out,
            scale=128**-0.5,
        )
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out[:rows], expected[:rows])
