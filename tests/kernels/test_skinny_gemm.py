"""Products of few rows: both kernels, every combination of what they fuse, shapes that no tile divides."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from kernels import skinny_gemm
from kernels.skinny_gemm import MAX_ROWS, TensorTile, VectorTile, default_tile, skinny_linear

EPS = 1e-5
# Triton's interpreter multiplies bf16 matrices as integers; so without a GPU, tiles are tested in fp16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SMALL_TILES = [
    TensorTile(32, 32, stages=3),
    TensorTile(32, 32, stages=3, split=3),
    TensorTile(16, 64, stages=2, split=2, tma=True),
    TensorTile(64, 32, stages=2, tma=True),
]  # fmt: skip


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = DTYPE, scale: float = 1.0):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def reference(
    x, weight, *, weight_scale=None, bias=None, residual=None, norm_weight=None, plus_one=False, gate=None
) -> torch.Tensor:
    """The same in fp64, never rounded."""
    y = x.double()
    if norm_weight is not None:
        factors = norm_weight.double() + 1 if plus_one else norm_weight.double()
        y = y * (y.square().mean(1, keepdim=True) + EPS).rsqrt() * factors
    y = y @ weight.double().T
    if weight_scale is not None:
        y = y * weight_scale.double()
    if bias is not None:
        y = y + bias.double()
    if gate is not None:
        act, up = y.chunk(2, dim=1)
        y = (functional.silu(act) if gate == "silu" else functional.gelu(act, approximate="tanh")) * up
    return y if residual is None else y + residual.double()


def close(out: torch.Tensor, expected: torch.Tensor, norm: bool = False) -> None:
    """Within the rounding of the result, and of x * norm_weight where there is one (a part of the row's size)."""
    step = torch.finfo(out.dtype).eps
    slack = (6 * step if norm else step) * expected.square().mean().sqrt()
    assert out.isfinite().all()
    error = (out.double() - expected).abs() - step * expected.abs()
    assert error.max() <= slack, f"{float(error.max())} > {float(slack)}"


def check(m: int, n: int, k: int, device, *, seed: int, dtype=DTYPE, fp8=False, tile=None, pdl=False, **fused):
    """Run one product with what `fused` names and compare; returns its output."""
    gate = fused.get("gate")
    weight_rows = 2 * n if gate else n
    x = random(m, k, seed=seed, device=device, dtype=dtype)
    weight = random(weight_rows, k, seed=seed + 1, device=device, dtype=dtype, scale=k**-0.5)
    around: dict[str, object] = {"gate": gate}
    if fp8:
        weight = (weight.float() * 200).to(torch.float8_e4m3fn)
        around["weight_scale"] = torch.rand(weight_rows, generator=torch.Generator().manual_seed(seed)).to(device) / 200
    if fused.get("bias"):
        around["bias"] = random(weight_rows, seed=seed + 2, device=device, dtype=dtype)
    if fused.get("residual"):
        around["residual"] = random(m, n, seed=seed + 3, device=device, dtype=dtype)
    if fused.get("norm"):
        around |= {
            "norm_weight": random(k, seed=seed + 4, device=device, dtype=dtype),
            "plus_one": fused.get("plus_one", False),
        }
    out = torch.full((m, n), torch.nan, device=device, dtype=dtype)
    result = skinny_linear(x, weight, eps=EPS, out=out, pdl=pdl, tile=tile, **around)
    assert result is out
    close(out, reference(x, weight, **around), norm=bool(fused.get("norm")))
    return out


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "fused",
    [
        {},
        {"bias": True, "residual": True},
        {"norm": True},
        {"norm": True, "plus_one": True, "gate": "gelu_tanh"},
        {"norm": True, "gate": "silu", "bias": True},
    ],
)
@pytest.mark.parametrize(("n", "k"), [(6, 64), (37, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_row(n, k, dtype, fused, fp8, device):
    check(1, n, k, device, seed=n + k, tile=VectorTile(4, 64, warps=1), fp8=fp8, dtype=dtype, **fused)


@pytest.mark.parametrize("tile", SMALL_TILES, ids=str)
@pytest.mark.parametrize("fused", [{}, {"bias": True, "residual": True}, {"norm": True, "residual": True}])
@pytest.mark.parametrize(("m", "n", "k"), [(2, 24, 72), (16, 64, 128), (21, 71, 264)])
def test_some_rows(m, n, k, fused, tile, device):
    check(m, n, k, device, seed=m + n + k, tile=tile, **fused)


@pytest.mark.parametrize("tile", [tile for tile in SMALL_TILES if tile.split == 1], ids=str)
@pytest.mark.parametrize(
    "fused", [{"norm": True, "plus_one": True, "gate": "gelu_tanh"}, {"gate": "silu", "bias": True}]
)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 24, 72), (16, 64, 128), (21, 71, 264)])
def test_some_rows_with_a_gate(m, n, k, fused, tile, device):
    check(m, n, k, device, seed=m + n + k, tile=tile, **fused)


@pytest.mark.parametrize("tile", SMALL_TILES, ids=str)
def test_fp8_weights(tile, device):
    check(5, 48, 128, device, seed=1, tile=tile, fp8=True, bias=True)


@pytest.mark.parametrize("m", [1, 3, 17])
def test_default_tiles(m, device):
    check(m, 40, 136, device, seed=m, norm=True)
    check(m, 40, 136, device, seed=m, residual=True)


def test_out_may_be_the_residual(device):
    x, weight = random(3, 64, seed=0, device=device), random(48, 64, seed=1, device=device)
    hidden = random(3, 48, seed=2, device=device)
    expected = reference(x, weight, residual=hidden)
    assert skinny_linear(x, weight, residual=hidden, out=hidden) is hidden
    close(hidden, expected)


def test_rows_of_x_and_out_may_be_strided(device):
    whole, weight = random(4, 256, seed=0, device=device), random(32, 64, seed=1, device=device)
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
        check(m, n, 256, device, seed=7, tile=TensorTile(16, 32, stages=2, split=split), residual=True)
        for m, n, split in [(4, 64, 4), (4, 64, 4), (18, 40, 8), (4, 64, 4)]
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[3])
    assert not skinny_gemm._workspace(device if device.type == "cpu" else results[0].device)[1].any()


@pytest.mark.parametrize("tile", SMALL_TILES, ids=str)
def test_a_row_has_the_same_bits_among_any_others(tile, device):
    x, weight = random(33, 128, seed=3, device=device), random(48, 128, seed=4, device=device)
    norm_weight = random(128, seed=5, device=device)
    whole = skinny_linear(x, weight, norm_weight=norm_weight, tile=tile)
    for rows in (slice(0, 2), slice(5, 21), slice(7, 24), slice(32, 33)):
        assert torch.equal(skinny_linear(x[rows], weight, norm_weight=norm_weight, tile=tile), whole[rows])


@pytest.mark.parametrize(("n", "k"), [*LLAMA_8B.values(), (128256, 4096), (64, 64), (9216, 3072)])
@pytest.mark.parametrize("gated", [False, True])
def test_default_tiles_fit_their_limits(n, k, gated):
    for m in (1, 2, 16, 17, 64, 65, MAX_ROWS):
        tile = default_tile(m, n, k, gated=gated, device=torch.device("cpu"))
        skinny_gemm._check(
            torch.empty(m, k, dtype=torch.bfloat16, device="meta"),
            torch.empty((1 + gated) * n, k, dtype=torch.bfloat16, device="meta"),
            None, "silu" if gated else None, tile,
        )  # fmt: skip
        if isinstance(tile, TensorTile):
            weight_rows = tile.block_n * (1 + gated)
            assert tile.stages * tile.block_k * (weight_rows + max(16, 1 << (m - 1).bit_length())) * 2 <= 220_000


@pytest.mark.parametrize(("k", "split"), [(64, 1), (200, 3), (4096, 3), (4096, 8), (4104, 5), (14336, 6)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_prefetches_stay_inside_the_rows(k, split, dtype):
    """Behind the last row of a weight there may be no memory."""
    weight = torch.empty(4, k, dtype=dtype)
    for block_k in (32, 64, 128):
        size = skinny_gemm._prefetch_bytes(TensorTile(16, block_k, split=split, prefetch=2048), weight)
        chunk = math.ceil(math.ceil(k / block_k) / split) * block_k
        assert size in (0, 512, 1024, 2048)
        assert size == 0 or chunk * (split - 1) * weight.element_size() + size <= k * weight.element_size()


def test_refuses_what_it_cannot_do(device):
    x, weight = (
        torch.zeros(2, 64, dtype=torch.bfloat16, device=device),
        torch.zeros(8, 64, dtype=torch.bfloat16, device=device),
    )
    with pytest.raises(ValueError, match="rows"):
        skinny_linear(torch.zeros(MAX_ROWS + 1, 64, dtype=DTYPE, device=device), weight)
    with pytest.raises(ValueError, match="rows"):
        skinny_linear(x, weight, tile=VectorTile(2, 64))
    with pytest.raises(ValueError, match="float32"):
        skinny_linear(x.float(), weight.float())
    with pytest.raises(ValueError, match="contiguous"):
        skinny_linear(x, weight[:, :56])
    with pytest.raises(ValueError, match="residual"):
        skinny_linear(x, weight, gate="silu", residual=x)
    with pytest.raises(ValueError, match="gate"):
        skinny_linear(x, weight, gate="silu", tile=TensorTile(16, 32, split=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    """The shapes of the 8B model with the shipped tiles; a chain of launches that overlap."""

    @pytest.mark.parametrize(
        ("m", "dtype"),
        [
            *((m, torch.bfloat16) for m in (1, 2, 8, 16, 17, 32, 48, 64, 65, 128)),
            (1, torch.float16),
            (16, torch.float16),
        ],
    )
    @pytest.mark.parametrize("name", [*LLAMA_8B, "lm_head"])
    def test_shapes_of_the_8b_model(self, name, m, dtype, device):
        n, k = LLAMA_8B.get(name, (128256, 4096))
        fused = {"qkv": {"norm": True}, "gate_up": {"norm": True, "gate": "silu"}, "lm_head": {}}
        of_name = fused.get(name, {"residual": True})
        n = n // 2 if name == "gate_up" else n
        first = check(m, n, k, device, seed=m, dtype=dtype, **of_name)
        assert torch.equal(first, check(m, n, k, device, seed=m, dtype=dtype, **of_name))

    @pytest.mark.parametrize("m", [1, 5, 40, 128])
    @pytest.mark.parametrize(("n", "k"), [(4100, 4104), (130, 2056)])
    @pytest.mark.parametrize(
        "fused", [{"bias": True, "residual": True}, {"norm": True, "plus_one": True, "gate": "gelu_tanh"}]
    )
    @pytest.mark.parametrize("tma", [False, True])
    def test_sizes_that_no_tile_divides(self, m, n, k, fused, tma, device):
        split = 1 if "gate" in fused else 3
        tile = VectorTile(4, 1024) if m == 1 else TensorTile(64, 64, stages=4, split=split, tma=tma)
        check(m, n, k, device, seed=m + n, tile=tile, **fused)

    @pytest.mark.parametrize(
        ("m", "dtype"), [*((m, torch.bfloat16) for m in (1, 4, 32, 64)), (1, torch.float16), (16, torch.float16)]
    )
    @pytest.mark.parametrize("name", LLAMA_8B)
    def test_fp8_weights_of_the_8b_model(self, name, m, dtype, device):
        gate = "silu" if name == "gate_up" else None
        n, k = LLAMA_8B[name]
        check(m, n // 2 if gate else n, k, device, seed=m, dtype=dtype, fp8=True, gate=gate)

    @pytest.mark.parametrize("m", [1, 8, 32, 64, 128])
    def test_overlapping_launches_equal_launches_in_turn(self, m, device):
        """Three layers, each of whose products reads what the one before it writes, in one graph, 20 times over."""
        layers = [
            {name: random(n, k, seed=layer, device=device, scale=k**-0.5) for name, (n, k) in LLAMA_8B.items()}
            for layer in range(3)
        ]
        norm_weight = random(4096, seed=9, device=device)
        start = random(m, 4096, seed=10, device=device)

        def run(hidden: torch.Tensor, pdl: bool) -> None:
            for layer in layers:
                qkv = skinny_linear(hidden, layer["qkv"], norm_weight=norm_weight, pdl=pdl)
                skinny_linear(qkv[:, :4096], layer["o"], residual=hidden, out=hidden, pdl=pdl)
                act = skinny_linear(hidden, layer["gate_up"], norm_weight=norm_weight, gate="silu", pdl=pdl)
                skinny_linear(act, layer["down"], residual=hidden, out=hidden, pdl=pdl)

        expected = start.clone()
        run(expected, pdl=False)
        run(start.clone(), pdl=True)
        torch.cuda.synchronize()
        graph, hidden = torch.cuda.CUDAGraph(), torch.empty_like(start)
        with torch.cuda.graph(graph):
            hidden.copy_(start)
            run(hidden, pdl=True)
        for _ in range(20):
            hidden.fill_(torch.nan)
            graph.replay()
            assert torch.equal(hidden, expected)
        assert not skinny_gemm._workspace(hidden.device)[1].any()
