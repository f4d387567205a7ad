"""Products of few rows: both kernels, every combination of what they fuse, shapes that no tile
divides.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from kvrelay.kernels import skinny_gemm
from kvrelay.kernels.decoder_layer import quantize_e4m3
from kvrelay.kernels.skinny_gemm import (
    MAX_ROWS,
    RING_ROWS,
    RingTile,
    TensorTile,
    VectorTile,
    default_tile,
    fits_ring,
    skinny_linear,
)
from tests.kernels.compiling import run_compiler
from tests.kernels.rounding import DTYPE, randn

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]
LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SMALL_TILES = [
    TensorTile(32, 32, stages=3),
    TensorTile(32, 32, stages=3, split=3),
    TensorTile(16, 64, stages=2, split=2, tma=True),
    TensorTile(64, 32, stages=2, tma=True),
]


RING_TILES = [
    RingTile(64, 1, 3),
    RingTile(96, 2, 4),
    RingTile(112, 1, 2),
    RingTile(128, 4, 6),
    RingTile(48, 1, 11),
]
needs_ring = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper alone"
)


def reference(
    x, weight, *, x_scale=None, weight_scale=None, bias=None, residual=None, gate=None
) -> torch.Tensor:
    """The same in fp64, never rounded."""
    y = x.double() @ weight.double().T
    if x_scale is not None:
        y = y * x_scale.double()
    if weight_scale is not None:
        y = y * weight_scale.double()
    if bias is not None:
        y = y + bias.double()
    if gate is not None:
        act, up = y.chunk(2, dim=1)
        y = (
            functional.silu(act) if gate == "silu" else functional.gelu(act, approximate="tanh")
        ) * up
    return y if residual is None else y + residual.double()


def close(out: torch.Tensor, expected: torch.Tensor, *, fp8_rows: bool = False) -> None:
    """Within the rounding of the result; and of Hopper's sums of fp8 products, which keep 14 bits
    for a while.
    """
    step = torch.finfo(out.dtype).eps
    slack = (step + (2**-7 if fp8_rows else 0)) * expected.square().mean().sqrt()
    assert out.isfinite().all()
    error = (out.double() - expected).abs() - step * expected.abs()
    assert error.max() <= slack, f"{float(error.max())} > {float(slack)}"


def check(
    m: int,
    n: int,
    k: int,
    device,
    *,
    seed: int,
    dtype=DTYPE,
    fp8=False,
    tile=None,
    **fused,
):
    """Run one product with what `fused` names and compare; returns its output. fp8: weights, and
    more rows than one.
    """
    gate = fused.get("gate")
    weight_rows = 2 * n if gate else n
    x = randn(m, k, seed=seed, device=device, dtype=dtype)
    weight = randn(weight_rows, k, seed=seed + 1, device=device, dtype=dtype, scale=k**-0.5)
    around: dict[str, object] = {"gate": gate}
    if fp8:
        weight, weight_scale = quantize_e4m3(weight)
        around["weight_scale"] = weight_scale[:, 0]
    if fp8 and not (m == 1 and (tile is None or isinstance(tile, VectorTile))):
        x, around["x_scale"] = quantize_e4m3(x)
    if fused.get("bias"):
        around["bias"] = randn(weight_rows, seed=seed + 2, device=device, dtype=dtype)
    if fused.get("residual"):
        around["residual"] = randn(m, n, seed=seed + 3, device=device, dtype=dtype)
    out = torch.full((m, n), torch.nan, device=device, dtype=dtype)
    result = skinny_linear(x, weight, out=out, tile=tile, **around)
    assert result is out
    close(out, reference(x, weight, **around), fp8_rows="x_scale" in around)
    return out


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "fused",
    [
        {},
        {"bias": True, "residual": True},
        {"gate": "gelu_tanh"},
        {"gate": "silu", "bias": True},
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_row(dtype, fused, fp8, device):
    tile = VectorTile(4, 64, warps=1)
    check(1, 37, 208, device, seed=1, tile=tile, fp8=fp8, dtype=dtype, **fused)


def test_every_fp8_number_is_widened_exactly(device):
    """All finite ones, through the vector kernel: by the instruction on a GPU that has it, else by
    shifts.
    """
    codes = torch.tensor(
        [code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8
    )
    weight = codes.view(torch.float8_e4m3fn).to(device)
    for column in range(4):
        x = torch.zeros(1, 16, dtype=DTYPE, device=device)
        x[0, column] = 1
        matrix = torch.zeros(256, 16, dtype=torch.float8_e4m3fn, device=device)
        matrix[:, column] = weight
        assert torch.equal(
            skinny_linear(x, matrix, tile=VectorTile(4, 32, warps=1))[0].float(), weight.float()
        )


PLAIN = [{}, {"bias": True, "residual": True}]
GATED = [{"gate": "gelu_tanh"}, {"gate": "silu", "bias": True}]


def with_fused(tiles: list) -> list:
    """Each tile with all that it can fuse; one that splits K has no gate."""
    return [(tile, each) for tile in tiles for each in PLAIN + GATED * (tile.split == 1)]


@pytest.mark.parametrize(("tile", "fused"), with_fused(SMALL_TILES), ids=str)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(2, 24, 80), (21, 71, 272)])
def test_some_rows(m, n, k, fused, fp8, tile, device):
    check(m, n, k, device, seed=m + n + k, tile=tile, fp8=fp8, **fused)


def test_rows_of_x_and_out_may_be_strided(device):
    whole, weight = randn(4, 256, seed=0, device=device), randn(32, 64, seed=1, device=device)
    out = torch.full((4, 96), torch.nan, device=device, dtype=DTYPE)
    for x in (whole[:, 64:128], whole[:1, 64:128]):
        for tile in [VectorTile(4, 64)] if len(x) == 1 else SMALL_TILES[:3]:
            skinny_linear(x, weight, out=out[: len(x), 32:64], tile=tile)
            close(out[: len(x), 32:64], reference(x, weight))
    assert out[:, :32].isnan().all()
    assert out[:, 64:].isnan().all()


def test_split_products_leave_the_counters_at_zero(device):
    """So that the next launch, of another shape even, counts from the start."""
    results = [
        check(
            m, n, 256, device, seed=7, tile=TensorTile(16, 32, stages=2, split=split), residual=True
        )
        for m, n, split in [(4, 64, 4), (4, 64, 4), (18, 40, 8), (4, 64, 4)]
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[3])
    assert not skinny_gemm._workspace(device if device.type == "cpu" else results[0].device)[
        1
    ].any()


RINGS = [pytest.param(tile, marks=[pytest.mark.gpu, needs_ring]) for tile in RING_TILES[1:3]]


@pytest.mark.parametrize("tile", [*SMALL_TILES, *RINGS], ids=str)
def test_a_row_has_the_same_bits_among_any_others(tile, device):
    n, k = (208, 1024) if isinstance(tile, RingTile) else (48, 128)
    x, weight = randn(33, k, seed=3, device=device), randn(n, k, seed=4, device=device)
    whole = skinny_linear(x, weight, tile=tile)
    for rows in (slice(0, 2), slice(5, 21), slice(7, 24), slice(32, 33)):
        assert torch.equal(skinny_linear(x[rows], weight, tile=tile), whole[rows])


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (128256, 4096), (64, 64)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_default_tiles_fit_their_limits(n, k, gated, dtype):
    for m in (1, 2, 16, 17, 64, *([65, MAX_ROWS] if gated and dtype == DTYPES[0] else [])):
        x = torch.empty(m, k, dtype=torch.bfloat16 if m == 1 else dtype, device="meta")
        weight = torch.empty((1 + gated) * n, k, dtype=dtype, device="meta")
        tile = default_tile(x, weight, gated=gated)
        if isinstance(tile, TensorTile):
            skinny_gemm._check_space(m, len(weight), tile)
            columns = tile.block_n * (1 + gated) + max(16, 1 << (m - 1).bit_length())
            assert tile.stages * tile.block_k * columns * dtype.itemsize <= 220_000


@pytest.mark.parametrize(("k", "split"), [(64, 1), (200, 3), (4096, 8), (4104, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefetches_stay_inside_the_rows(k, split, dtype):
    """Behind the last row of a weight there may be no memory."""
    weight = torch.empty(4, k, dtype=dtype)
    for block_k in (32, 64, 128):
        size = skinny_gemm._prefetch_bytes(
            TensorTile(16, block_k, split=split, prefetch=2048), weight
        )
        chunk = math.ceil(math.ceil(k / block_k) / split) * block_k
        assert size in (0, 512, 1024, 2048)
        assert (
            size == 0
            or chunk * (split - 1) * weight.element_size() + size <= k * weight.element_size()
        )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
class TestOnGpu:
    """The shapes of the 8B model with the shipped tiles; a chain of launches that overlap."""

    @pytest.mark.parametrize("m", [1, 8, 17, 64, 128])
    @pytest.mark.parametrize("name", [*LLAMA_8B, "lm_head"])
    def test_shapes_of_the_8b_model(self, name, m, device):
        n, k = LLAMA_8B.get(name, (128256, 4096))
        fused = {"qkv": {}, "gate_up": {"gate": "silu"}, "lm_head": {}}
        of_name = fused.get(name, {"residual": True})
        if m > RING_ROWS and "gate" not in of_name:
            pytest.skip("cuBLAS's")
        n = n // 2 if name == "gate_up" else n
        first = check(m, n, k, device, seed=m, **of_name)
        assert torch.equal(first, check(m, n, k, device, seed=m, **of_name))

    @pytest.mark.parametrize("m", [1, 40])
    @pytest.mark.parametrize("fused", [{"bias": True, "residual": True}, {"gate": "gelu_tanh"}])
    @pytest.mark.parametrize("tma", [False, True])
    @pytest.mark.parametrize("fp8", [False, True])
    def test_sizes_that_no_tile_divides(self, m, fused, tma, fp8, device):
        split = 1 if "gate" in fused else 3
        tile = VectorTile(4, 1024) if m == 1 else TensorTile(64, 64, stages=4, split=split, tma=tma)
        check(m, 4100, 4112, device, seed=m, tile=tile, fp8=fp8, **fused)

    @pytest.mark.parametrize("m", [1, 4, 32, 64])
    @pytest.mark.parametrize("name", ["qkv", "gate_up"])
    def test_fp8_weights_of_the_8b_model(self, name, m, device):
        gate = "silu" if name == "gate_up" else None
        n, k = LLAMA_8B[name]
        check(m, n // 2 if gate else n, k, device, seed=m, fp8=True, gate=gate)


COMPILE_RING = """
from triton.experimental.gluon._runtime import GluonASTSource
from kvrelay.kernels.skinny_hopper import ring_kernel as kernel

layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank={}, transposed=False,"
layout += " fp4_padded=False, cga_layout=[])"
for gated, (block_m, rows, split, slots) in zip((True, False), eval(sys.argv[1])):
    groups, space = rows // 16, triton.next_power_of_2(rows)
    types = dict.fromkeys(kernel.arg_names, "i32")
    types.update(x=f"tensordesc<bf16[{block_m}, 64],{layout.format(2)}>")
    types.update(weight=f"tensordesc<bf16[{groups & -groups}, 2, 8, 64],{layout.format(4)}>")
    types.update(residual="*bf16", out="*bf16", partials="*fp32", arrivals="*i32")
    constants = dict(STEPS=64, SPLIT=split, ROWS=rows, SPACE=space, SLOTS=slots, PDL=True, bias=None, GATE=None)
    if gated:
        constants.update(GATE="silu", residual=None)
    types.update(dict.fromkeys(constants, "constexpr"))
    names = enumerate(kernel.arg_names)
    aligned = [i for i, n in names if types[n].startswith("*") or n == "N" or n.endswith("_stride")]
    source = GluonASTSource(kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 128})
    print(report(compiled, 90), compiled.metadata.shared)
"""


def test_the_ring_kernel_compiles_for_two_programs_per_sm():
    """Gated and plain: no register is spilled, and two rings fit an SM's memory."""
    sizes = [
        (block_m, rows, split, skinny_gemm._slots(rows, block_m, 2))
        for block_m, rows, split in ((64, 112, 1), (32, 96, 2))
    ]
    found = run_compiler(COMPILE_RING, sizes).splitlines()
    assert len(found) == 2
    for spilled, shared in (map(int, line.split()) for line in found):
        assert spilled == 0
        assert 2 * (shared + 1024) <= 228 * 1024


@pytest.mark.gpu
@needs_ring
class TestRing:
    """The ring kernel: groups of 16 weight rows, parts of K, gates in halves of a group."""

    @pytest.mark.parametrize(("tile", "fused"), with_fused(RING_TILES), ids=str)
    @pytest.mark.parametrize(
        ("m", "n", "k", "dtype"),
        [(2, 304, 1024, torch.float16), (33, 1040, 4104, torch.bfloat16)],
    )
    def test_products(self, m, n, k, dtype, fused, tile, device):
        n //= 1 + ("gate" in fused)
        check(m, n, k, device, seed=m + n, tile=tile, dtype=dtype, **fused)

    def test_serves_weights_in_groups_alone(self, device):
        assert fits_ring(randn(32, 64, seed=1, device=device))
        for weight in (
            randn(40, 64, seed=1, device=device),
            randn(32, 60, seed=1, device=device),
        ):
            assert not fits_ring(weight)
            assert not isinstance(
                default_tile(randn(4, 64, seed=2, device=device), weight, gated=False), RingTile
            )
