"""Paged prefill equals plain attention, leaves padding alone, and gives a row bits that depend on
its sequence only.

On the CPU the portable kernel runs in Triton's interpreter (which has no bf16 products). Marked
`gpu`: both kernels.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.kernels.compiling import run_compiler
from tests.kernels.paged_case import Case, make_case, starts
from tests.kernels.rounding import assert_attention

pytest.importorskip("triton")
from kvrelay.kernels import paged_prefill as prefill_module
from kvrelay.kernels.decode_plan import DecodeWorkspace, plan_decode
from kvrelay.kernels.paged_decode import paged_decode
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


def run(
    case: Case, *, window: int = 0, softcap: float = 0.0, scale: float | None = None
) -> torch.Tensor:
    """The kernel's output, poisoned before."""
    device, dim = case.query.device, case.query.shape[2]
    tiles = prefill_tiles(case.query_lens, case.context_lens, group=case.group)
    out = torch.full_like(case.query, torch.nan, memory_format=torch.contiguous_format)
    returned = paged_prefill(
        case.query,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        torch.tensor(starts(case.query_lens), dtype=torch.int32, device=device),
        torch.tensor(case.context_lens, dtype=torch.int32, device=device),
        torch.from_numpy(tiles).to(device),
        out=out,
        scale=scale or dim**-0.5,
        window=window,
        softcap=softcap,
        key_scales=case.key_scales,
        value_scales=case.value_scales,
    )
    assert returned is out
    return out


def check(case: Case, *, window: int = 0, softcap: float = 0.0, scale: float | None = None) -> None:
    """Compare with plain attention; padding stays as it was."""
    out = run(case, window=window, softcap=softcap, scale=scale)
    for rows, expected in case.expected(window, softcap, scale):
        assert_attention(out[rows], expected, (rows, window))
    assert out[sum(case.query_lens) :].isnan().all()


def test_tiles_cover_every_token_once_and_long_ones_come_first() -> None:
    rng = np.random.default_rng(1)
    for group in (1, 3, 4, 7, 8, 64):
        query_lens = rng.integers(0, 300, 20).tolist()
        context_lens = [count + int(rng.integers(0, 900)) for count in query_lens]
        tiles = prefill_tiles(query_lens, context_lens, group=group)
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
        assert newest == sorted(newest, reverse=True)


def test_no_sequences_make_no_tiles() -> None:
    assert prefill_tiles([], [], group=4).shape == (0, 2)
    assert prefill_tiles([0], [9], group=4).shape == (0, 2)


@pytest.mark.parametrize("window", [0, 50])
def test_decodes_and_prompts_of_a_step_share_rows_of_which_few_are_decodes(window, device):
    """Room for decodes may reach into the prompts' rows, which get zeros first."""
    mix, decodes, room = [(1, 40), (1, 130), (20, 0), (9, 33), (1, 200)], 2, 16
    dim, block = (128, 64) if device.type == "cuda" else (64, 16)
    case = make_case(mix, 8, 2, dim, block, torch.float16, device)
    lengths = torch.zeros(room, dtype=torch.int32)
    lengths[:decodes] = torch.tensor(case.context_lens[:decodes])
    lengths, out = lengths.to(device), torch.full_like(case.query, torch.nan)
    workspace = DecodeWorkspace(
        max_batch=room, num_heads=8, num_kv_heads=2, head_dim=dim, device=device
    )
    plan_decode(lengths, workspace, block_size=block, window=window)
    tables = torch.zeros(room, case.block_tables.shape[1], dtype=torch.int32, device=device)
    tables[: len(mix)] = case.block_tables
    caches = case.key_cache, case.value_cache
    options = {"scale": dim**-0.5, "window": window}
    ours = case.query[:room], *caches, tables, lengths, workspace
    paged_decode(*ours, out=out[:room], **options)
    tiles = prefill_tiles(case.query_lens[decodes:], case.context_lens[decodes:], group=4)
    paged_prefill(
        case.query,
        *caches,
        tables,
        torch.tensor(starts(case.query_lens), dtype=torch.int32, device=device),
        torch.tensor(case.context_lens, dtype=torch.int32, device=device),
        torch.from_numpy(tiles + np.array([decodes, 0], np.int32)).to(device),
        out=out,
        **options,
    )
    for rows, expected in case.expected(window):
        assert_attention(out[rows], expected, (rows, window))


cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="small shapes, for the interpreter")


MIXED, HALF = MIXES["mixed"], torch.float16
SMALL_CASES = [
    *(
        ((MIXED, heads, kv_heads, 64, 16, torch.float32), {"window": window})
        for heads, kv_heads in HEADS
        for window in (0, 50)
    ),
    *(((mix, 4, 2, 64, 16, torch.float32), {"window": 1}) for mix in MIXES.values()),
    *(((MIXED, 4, 2, dim, 64, HALF), {}) for dim in (64, 80, 96, 128, 256)),
    ((MIXED, 4, 2, 64, 32, torch.float32), {"softcap": 2.0, "window": 70}),
    *(
        ((MIXED, 6, 2, 80, size, HALF), {"fp8": True, "window": window, "softcap": softcap})
        for size, window, softcap in ((16, 0, 0.0), (64, 60, 5.0))
    ),
]


@cpu_only
@pytest.mark.parametrize(("sizes", "options"), SMALL_CASES, ids=str)
def test_equals_plain_attention(sizes: tuple, options: dict, device: torch.device) -> None:
    fp8 = options.get("fp8", False)
    case = make_case(*sizes, device, seed=len(sizes[0]), fp8=fp8)
    check(case, window=options.get("window", 0), softcap=options.get("softcap", 0.0))


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
        assert torch.equal(run(part, window=window)[-(end - first) :], whole[first:end]), (
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
    whole = run(case, window=window)[:150]
    check_bits(case, [0, 1, 2, 17, 100, 131, 149, 150], window=window, company=False, whole=whole)
    check_bits(case, [0, 64, 65, 150], window=window, company=True, whole=whole)


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
        constants = dict(sizes, STRIP=128)
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
    if request.param == "portable":
        monkeypatch.setattr(prefill_module, "hopper_serves", lambda *_: False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    else:
        plain = prefill_module.hopper_serves

        def served(*of: torch.Tensor) -> bool:
            assert plain(*of)
            return True

        monkeypatch.setattr(prefill_module, "hopper_serves", served)
    return str(request.param)


GPU_CASES = [
    (8, 2, 64, 16, torch.bfloat16, 0, 0.0),
    (9, 3, 80, 32, torch.bfloat16, 0, 0.0),
    (5, 5, 96, 64, torch.bfloat16, 300, 20.0),
    (28, 4, 128, 64, torch.bfloat16, 0, 0.0),
    (64, 1, 128, 16, torch.float16, 1000, 0.0),
    (8, 2, 256, 16, torch.bfloat16, 300, 20.0),
]


def check_mixes(*sizes: object, window: int, softcap: float, fp8: bool = False) -> None:
    for seed, mix in enumerate([MIXED, *LONG_MIXES.values()]):
        check(make_case(mix, *sizes, seed=seed, fp8=fp8), window=window, softcap=softcap)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", GPU_CASES, ids=str)
def test_on_gpu(sizes: tuple, path: str, device: torch.device) -> None:
    *shape, window, softcap = sizes
    check_mixes(*shape, device, window=window, softcap=softcap)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "dtype", "window", "softcap"),
    [
        (64, torch.float16, 300, 20.0),
        (128, torch.bfloat16, 0, 0.0),
        (256, torch.bfloat16, 300, 20.0),
    ],
)
def test_fp8_on_gpu(
    dim: int, dtype: torch.dtype, window: int, softcap: float, device: torch.device
) -> None:
    check_mixes(8, 2, dim, 64, dtype, device, window=window, softcap=softcap, fp8=True)


@pytest.mark.gpu
def test_a_pool_of_more_than_2_to_the_31_elements(path: str, device: torch.device) -> None:
    """Blocks of 8 MiB as of Llama-3.1-8B, the used ones beyond 4.7 GiB."""
    mix = [(1, 200), (300, 500), (64, 0)]
    sizes = mix, 32, 8, 128, 64, torch.bfloat16, device
    check(make_case(*sizes, seed=1, layers=32, spare_blocks=600))


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "dim"), [(0, 128), (300, 64)])
def test_bits_on_gpu(window: int, dim: int, path: str, device: torch.device) -> None:
    length = 1100
    case = make_case([(length, 0), (700, 0)], 32, 8, dim, 64, torch.bfloat16, device, seed=2)
    whole = run(case, window=window)[:length]
    assert torch.equal(run(case, window=window)[:length], whole)
    check_bits(
        case, [0, 1, 2, 17, 100, 131, 1000, length], window=window, company=False, whole=whole
    )
    check_bits(case, [0, 64, 65, 513, length], window=window, company=True, whole=whole)
    check_bits(case, [1060, *range(1061, length + 1)], window=window, company=True, whole=whole)
