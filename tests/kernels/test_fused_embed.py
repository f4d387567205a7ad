"""Embedding in Triton: ids from the host or from the sampler, Gemma's scale."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels.elementwise import embed as embed_twin
from tests.kernels.rounding import exact_rounding, poisoned_memory, randn

pytest.importorskip("triton")
from kvrelay.kernels.fused_elementwise import embed
from kvrelay.kernels.fused_sampling import sample
from kvrelay.kernels.sampling_slots import SlotTables

pytestmark = pytest.mark.usefixtures(exact_rounding.__name__)
in_poisoned_memory = pytest.mark.usefixtures(poisoned_memory.__name__)

gpu = pytest.mark.gpu
SHAPES = [
    (1, 64), (5, 70), (3, 1030), *(
        pytest.param(*s, marks=gpu) for s in [(1, 4096), (32, 4096), (256, 8192), (8192, 4096), (700, 576), (600, 5120)]
    ),
]  # fmt: skip
VOCAB = 211


def _ids(tokens, device, seed, index=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, n: torch.randint(high, (n,), generator=generator)  # noqa: E731
    source = torch.where(draw(2, tokens) == 1, draw(16, tokens), -1).to(torch.int32)
    return draw(VOCAB, tokens).to(device, index), draw(VOCAB, 16).to(device), source.to(device)


@in_poisoned_memory
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2560**0.5])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_ids_come_from_the_sampler_where_a_source_is_named(device, tokens, hidden, scale, dtype):
    token_ids, sampled, source = _ids(tokens, device, seed=tokens + hidden)
    token_ids[source >= 0] = torch.iinfo(torch.int64).max  # must not be looked up
    table = randn(VOCAB, hidden, seed=1, dtype=dtype, device=device)
    out = embed(token_ids, sampled, source, table, scale=scale)
    assert torch.equal(out, embed_twin(token_ids, sampled, source, table, scale=scale))


@in_poisoned_memory
def test_ids_of_the_engine_in_tiles_of_part_of_a_row(device):
    token_ids, sampled, source = _ids(40, device, seed=2, index=torch.int32)
    table = randn(VOCAB, 1100, seed=3, dtype=torch.bfloat16, device=device)
    out = embed(token_ids, sampled, source, table)
    assert torch.equal(out, embed_twin(token_ids, sampled, source, table))


@in_poisoned_memory
def test_strided_tables_and_no_tokens(device):
    token_ids, sampled, source = _ids(6, device, seed=6)
    wide = randn(VOCAB, 200, seed=7, dtype=torch.float32, device=device)
    table = wide[:, 50:150]
    out = embed(token_ids, sampled, source, table)
    assert torch.equal(out, embed_twin(token_ids, sampled, source, table))
    assert embed(token_ids[:0], sampled, source[:0], wide).shape == (0, 200)
    with pytest.raises(ValueError, match="fit"):
        embed(token_ids, sampled, source[:5], wide)
    with pytest.raises(ValueError, match="contiguous"):
        embed(token_ids, sampled, source, wide.T)


@gpu
def test_a_table_beyond_4_gib(device):
    table = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device=device)
    table[-1] = randn(8192, seed=9, dtype=table.dtype, device=device)
    last = torch.tensor([299_999], device=device)
    out = embed(last, last, torch.tensor([-1], dtype=torch.int32, device=device), table)
    assert torch.equal(out, table[-1:])


@gpu
def test_dependent_launch_reads_what_was_just_sampled(device):
    """As in the engine: the sampler's last kernel writes the ids, and the embedding is launched
    before it has ended.
    """
    rows = 16
    tables = SlotTables.empty(rows, VOCAB, device)  # whose zeros mean greedy
    logits = torch.empty(rows, VOCAB, dtype=torch.float32, device=device)
    table = randn(VOCAB, 4096, seed=11, dtype=torch.bfloat16, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    no_ids, outs = torch.zeros_like(slots), []

    def step():
        sample(logits, slots, tables, cut=False, adjusted=False, pdl=True)
        outs[:] = [embed(no_ids, tables.sampled, slots, table, pdl=True)]

    logits.normal_()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(50):
        logits.normal_()
        graph.replay()
        assert torch.equal(outs[0], table[logits.argmax(-1)])
