"""Adapters in Triton: equal to the twin, each row with its own; rows without one untouched; bits in
any company.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.kernels.compiling import run_compiler
from tests.kernels.rounding import assert_same, exact_rounding, poisoned_memory, randn
from tests.kernels.twins import add_lora

fused = pytest.importorskip("kvrelay.kernels.grouped_lora", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures(exact_rounding.__name__, poisoned_memory.__name__)

gpu = pytest.mark.gpu
# Triton's interpreter has no products in bf16.
DTYPES = [pytest.param(torch.bfloat16, marks=gpu), torch.float16, torch.float32]
QKV, UP = (48, 16, 16), (96, 96)


def matrices(device, dtype, k, widths, rank):
    """A and B of three adapters, of which the second has half the rank."""
    down = randn(3, len(widths) * rank, k, seed=0, dtype=dtype, device=device, scale=k**-0.5)
    up = randn(3, sum(widths), rank, seed=1, dtype=dtype, device=device, scale=rank**-0.5)
    down.view(3, len(widths), rank, k)[1, :, rank // 2 :] = 0
    up[1, :, rank // 2 :] = 0
    return down, up


def rows_of(kind, count, device):
    """Adapters of rows: sorted as a step has them, or not; all of one; none; one in the middle."""
    place = torch.arange(count)
    made = {
        "sorted": place * 4 // count - 1,
        "mixed": place * 7 % 4 - 1,
        "one": torch.full((count,), 2),
        "none": torch.full((count,), -1),
        "single": torch.where(place == count // 2, 1, -1),
    }[kind]
    return made.to(torch.int32).to(device)


def added(x, y, down, up, adapters, widths, tiles=None, between=lambda: None):
    tiles = tiles or fused.default_tiles(len(x), x.shape[1])
    low = fused.shrink(x, down, adapters, tiles=tiles)
    between()
    return fused.expand(low, up, adapters, y, widths, tiles=tiles)


SHAPES = [
    (1, 64, QKV, 16), (5, 80, (40,), 16), (20, 96, UP, 32), (37, 48, (16,), 64), (3, 64, (24, 24), 128),
    *(
        pytest.param(*shape, marks=gpu)
        for shape in [
            (1, 4096, (4096, 1024, 1024), 16), (300, 2560, (4096, 1024, 1024), 32), (3000, 4096, (4096,), 16),
            (8, 4096, (4096,), 512),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["sorted", "mixed", "single", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "k", "widths", "rank"), SHAPES)
def test_equal_to_the_twin(device, count, k, widths, rank, dtype, kind):
    if count > 1000 and (dtype != torch.bfloat16 or kind == "mixed"):
        pytest.skip("large in bf16 only")
    down, up = matrices(device, dtype, k, widths, rank)
    x = randn(count, k, seed=5, dtype=dtype, device=device)
    y = randn(count, sum(widths), seed=6, dtype=dtype, device=device)
    adapters = rows_of(kind, count, device)
    expected = add_lora(y.clone(), x, down, up, adapters, widths)
    before = y.clone()
    assert added(x, y, down, up, adapters, widths) is y
    # The low sums are rounded to the matrices' type: where the twin's fall on the other side, a sum
    # moves.
    assert_same(
        y,
        expected,
        flips=0.05,
        atol={torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}[dtype],
    )
    assert torch.equal(y[adapters < 0], before[adapters < 0])


@pytest.mark.parametrize("rows", [16, 64])
def test_a_rows_bits_do_not_depend_on_the_others(device, rows):
    tiles = fused.LoraTiles(rows, 2, 32)
    down, up = matrices(device, torch.float16, 96, UP, 16)
    x = randn(40, 96, seed=2, dtype=torch.float16, device=device)
    y = randn(40, 192, seed=3, dtype=torch.float16, device=device)
    adapters = rows_of("mixed", 40, device)
    together = added(x, y.clone(), down, up, adapters, UP, tiles)
    for first, end in ((0, 1), (7, 8), (11, 30)):
        mine = slice(first, end)
        alone = added(x[mine], y[mine].clone(), down, up, adapters[mine].contiguous(), UP, tiles)
        assert torch.equal(alone, together[mine])


def test_a_broken_adapter_spoils_its_own_rows_alone(device):
    down, up = matrices(device, torch.float16, 64, (32,), 16)
    x = randn(16, 64, seed=4, dtype=torch.float16, device=device)
    adapters = rows_of("mixed", 16, device)
    expected = added(
        x, torch.zeros(16, 32, dtype=torch.float16, device=device), down, up, adapters, (32,)
    )
    down[1], up[1] = torch.nan, torch.inf
    got = added(
        x, torch.zeros(16, 32, dtype=torch.float16, device=device), down, up, adapters, (32,)
    )
    assert torch.equal(got[adapters != 1], expected[adapters != 1])
    assert got[adapters == 1].isnan().all()


def test_strided_rows(device):
    down, up = matrices(device, torch.float16, 64, (32,), 16)
    wide = randn(6, 200, seed=5, dtype=torch.float16, device=device)
    target = randn(6, 100, seed=6, dtype=torch.float16, device=device)
    beside, adapters = target[:, 32:].clone(), rows_of("mixed", 6, device)
    expected = add_lora(target[:, :32].clone(), wide[:, 10:74], down, up, adapters, (32,))
    added(wide[:, 10:74], target[:, :32], down, up, adapters, (32,))
    assert_same(target[:, :32].clone(), expected, flips=0.05, atol=3e-3)
    assert torch.equal(target[:, 32:], beside)


COMPILE = """
import json
from kvrelay.kernels.grouped_lora import _expand, _shrink

def compiled_as(name, rows, split, target):
    kernel = {"shrink": _shrink, "expand": _expand}[name]
    sizes = {
        "shrink": dict(K=4096, C=48, SPLIT=split, BM=rows, BC=16, BK=128, PDL=target >= 90),
        "expand": dict(N0=4096, N1=1024, N2=1024, R=16, C=48, SPLIT=split, BM=rows, BN=128, BR=16, PDL=target >= 90),
    }[name]
    kinds = dict(x="*bf16", down="*bf16", up="*bf16", y="*bf16", low="*fp32", adapters="*i32")
    types = {arg: "constexpr" if arg in sizes else kinds.get(arg, "i32") for arg in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg != "count" and arg not in sizes
    }
    constants = {(kernel.arg_names.index(arg),): value for arg, value in sizes.items()}
    source = triton.compiler.ASTSource(kernel, types, constants, aligned)
    options = {"num_warps": 4, "num_stages": 3 if name == "shrink" else 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return report(compiled, target), compiled.metadata.shared, compiled.asm["ptx"].count("griddepcontrol.wait")

print(json.dumps([compiled_as(*variant) for variant in json.loads(sys.argv[1])]))
"""


VARIANTS = [
    (name, *sizes)
    for sizes in ((16, 16, 90), (64, 1, 90), (64, 4, 80))
    for name in ("shrink", "expand")
]


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int, int, int], list[int]]:
    """Spilled bytes, shared memory and waits of each."""
    return dict(zip(VARIANTS, json.loads(run_compiler(COMPILE, json.dumps(VARIANTS))), strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_they_compile_without_spills(variant, compiled):
    (*_, target), (spilled, shared, waits) = variant, compiled[variant]
    assert spilled == 0
    assert shared <= 100 << 10
    assert waits == (target >= 90)  # once, on the way of every program


@gpu
def test_dependent_launch_changes_nothing(device):
    """A chain in which every launch reads what the one before wrote, with tiles that have nothing
    to do.
    """
    down, up = matrices(device, torch.bfloat16, 2048, (2048,), 16)
    adapters = rows_of("single", 64, device)
    x = randn(64, 2048, seed=8, dtype=torch.bfloat16, device=device, scale=0.1)

    def chain(between=lambda: None) -> torch.Tensor:
        y = x.clone()
        for _ in range(50):
            y = added(y, y.clone(), down, up, adapters, (2048,), between=between) * 0.5
            between()
        return y

    expected = chain(torch.cuda.synchronize)
    for _ in range(5):
        assert torch.equal(chain(), expected)
