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
from tests.kernels.paged_case import Case, make_case
from tests.kernels.rounding import assert_attention, captured

GPU = torch.cuda.is_available()
# The interpreter of Triton 3.6 multiplies the bits of bf16 as integers in `tl.dot`, so the CPU
# tests use fp16 instead.
BF16 = torch.bfloat16 if GPU else torch.float16


@dataclass
class Decode:
    """A step of decodes over a case's sequences, planned."""

    case: Case
    context_lens: torch.Tensor
    workspace: DecodeWorkspace

    def run(self, out: torch.Tensor | None = None, **options) -> torch.Tensor:
        case, batch = self.case, len(self.case.query_lens)
        out = torch.full_like(case.query[:batch], torch.nan) if out is None else out
        given = case.query[:batch], case.key_cache, case.value_cache, case.block_tables
        options = {"scale": case.query.shape[2] ** -0.5} | options
        scales = {"key_scales": case.key_scales, "value_scales": case.value_scales}
        return paged_decode(*given, self.context_lens, self.workspace, out=out, **scales, **options)

    def check(self, out: torch.Tensor, window: int = 0, softcap: float = 0.0) -> None:
        for rows, expected in self.case.expected(window, softcap):
            if expected.any():
                assert_attention(out[rows], expected, (rows, self.case.context_lens))
            else:
                assert not out[rows].any()
        assert not self.workspace.arrivals.any()


def planned(
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
    **options: int,
) -> Decode:
    mix = [(1, length - 1) for length in lengths]
    case = make_case(mix, heads, kv_heads, head_dim, block_size, dtype, device, fp8=fp8, **options)
    workspace = DecodeWorkspace(
        max_batch=len(lengths),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        device=device,
        element_bytes=1 if fp8 else 2,
    )
    workspace.part_mixed.fill_(torch.nan)
    workspace.part_weight.fill_(torch.nan)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan_decode(context_lens, workspace, block_size=block_size, window=window)
    return Decode(case, context_lens, workspace)


def check(
    lengths: list[int],
    device: torch.device,
    *,
    softcap: float = 0.0,
    launches: int = 2,
    **options,
) -> None:
    """Compare with plain attention; launches in a row give the same bits, whoever arrives last."""
    decode, window = planned(lengths, device, **options), options.get("window", 0)
    outs = [decode.run(window=window, softcap=softcap) for _ in range(launches)]
    decode.check(outs[0], window, softcap)
    assert all(torch.equal(outs[0], other) for other in outs)


SOME = [200, 0, 31, 64]


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([1, 0, 63, 64, 65, 128, 16, 15, 17], {}),
        ([700, 3, 1, 9, 0, 2, 30, 5], {"launches": 50 if GPU else 2}),
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
    check(lengths, device, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["16bit", "fp8"])
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(64, 16), (80, 64), (96, 32), (128, 16), (128, 64), (256, 64)]
)
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
        check(
            lengths, device, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
            fp8=fp8, window=window, softcap=[0.0, 0.0, 30.0][number % 3], seed=number,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["16bit", "fp8"])
def test_blocks_beyond_four_gibibytes(fp8, device):
    """A pool of more than 2^31 elements and 4 GiB; the sequences' blocks are its last."""
    block_size = 64
    block_bytes = 2 * 2 * 8 * block_size * 128 * (1 if fp8 else 2)
    decode = planned(
        [1000, 77],
        device,
        heads=8,
        kv_heads=8,
        head_dim=128,
        block_size=block_size,
        dtype=torch.bfloat16,
        fp8=fp8,
        spare_blocks=-(-(5 << 30) // block_bytes),
    )
    decode.check(decode.run())


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_replays_with_other_lengths_and_tables(pdl, device):
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    batch, layers = 64, 4
    random = torch.Generator().manual_seed(0)
    mixes = [
        [2000] * batch,
        torch.randint(0, 2000, (batch,), generator=random).tolist(),
        [1] * batch,
        [2000] + [0] * (batch - 1),
        [0] * batch,
    ]
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 64, "dtype": torch.bfloat16}
    ours, *others = (
        planned(lengths, device, seed=seed, **sizes) for seed, lengths in enumerate(mixes)
    )
    case, query = ours.case, ours.case.query
    outs = torch.empty(layers, batch, 8, 128, dtype=torch.bfloat16, device=device)

    def step() -> None:
        plan_decode(ours.context_lens, ours.workspace, block_size=64)
        query.add_(0)  # what stands between plan and decode in a model
        for out in outs:
            ours.run(out, pdl=pdl)

    graph, _ = captured(step)
    for other in others:
        theirs = other.case
        case.key_cache[: len(theirs.key_cache)] = theirs.key_cache
        case.value_cache[: len(theirs.value_cache)] = theirs.value_cache
        case.block_tables.zero_()[:, : theirs.block_tables.shape[1]] = theirs.block_tables
        ours.context_lens.copy_(other.context_lens)
        query.copy_(theirs.query)
        outs.fill_(torch.nan)
        graph.replay()
        for out in outs:
            other.check(out)
        assert not ours.workspace.arrivals.any()
