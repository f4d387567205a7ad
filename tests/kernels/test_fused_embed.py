"""Embedding in Triton: ids from the host or from the sampler, Gemma's scale, a rank's part of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from kernels.norm_rope_act import embed as embed_twin
from tests.kernels.rounding import assert_same, exact_rounding, poisoned, randn

fused = pytest.importorskip("kernels.fused_embed", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures(exact_rounding.__name__)

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2560**0.5])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_ids_come_from_the_sampler_where_a_source_is_named(device, tokens, hidden, scale, dtype):
    token_ids, sampled, source = _ids(tokens, device, seed=tokens + hidden)
    token_ids[source >= 0] = torch.iinfo(torch.int64).max  # must not be looked up
    table = randn(VOCAB, hidden, seed=1, dtype=dtype, device=device)
    out = poisoned(tokens, hidden, dtype=dtype, device=device)
    resolved = poisoned(tokens, dtype=torch.int64, device=device)
    assert fused.embed(token_ids, sampled, source, table, scale=scale, resolved=resolved, out=out) is out
    rows, ids = embed_twin(token_ids, sampled, source, table, scale=scale)
    assert torch.equal(resolved, ids)
    assert torch.equal(out, rows)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_ids_may_be_resolved_in_place(device, index):
    token_ids, sampled, source = _ids(40, device, seed=2, index=index)
    table = randn(VOCAB, 64, seed=3, dtype=torch.bfloat16, device=device)
    rows, ids = embed_twin(token_ids, sampled, source, table)
    out = fused.embed(token_ids, sampled, source, table, resolved=token_ids, tile=(16, 1))
    assert torch.equal(out, rows)
    assert token_ids.tolist() == ids.tolist()


def test_parts_of_the_vocabulary_add_up_to_the_whole(device):
    token_ids, sampled, source = _ids(20, device, seed=4)
    table = randn(VOCAB, 96, seed=5, dtype=torch.float16, device=device)
    ids, total = [], torch.zeros(20, 96, dtype=table.dtype, device=device)
    for start, end in ((0, 100), (100, 211)):
        resolved, out = torch.empty_like(token_ids), poisoned(20, 96, dtype=table.dtype, device=device)
        shard = {"vocab_start": start, "vocab_end": end, "resolved": resolved, "out": out}
        part = fused.embed(token_ids, sampled, source, table[start:end].clone(), **shard)
        assert torch.equal(part, embed_twin(token_ids, sampled, source, table[start:end], vocab_start=start)[0])
        total += part
        ids.append(resolved.tolist())
    assert ids[0] == ids[1]
    assert_same(total, embed_twin(token_ids, sampled, source, table)[0])


def test_strided_tables_and_outputs_and_no_tokens(device):
    token_ids, sampled, source = _ids(6, device, seed=6)
    wide, target = (randn(VOCAB, 200, seed=s, dtype=torch.float32, device=device) for s in (7, 8))
    beside = target[:6, 100:].clone()
    fused.embed(token_ids, sampled, source, wide[:, 50:150], out=target[:6, :100])
    assert torch.equal(target[:6, :100], embed_twin(token_ids, sampled, source, wide[:, 50:150])[0])
    assert torch.equal(target[:6, 100:], beside)
    assert fused.embed(token_ids[:0], sampled, source[:0], wide).shape == (0, 200)
    with pytest.raises(ValueError, match="table has"):
        fused.embed(token_ids, sampled, source, wide, vocab_start=5, vocab_end=5 + VOCAB + 1)
    with pytest.raises(ValueError, match="fit"):
        fused.embed(token_ids, sampled, source[:5], wide)


@gpu
def test_a_table_beyond_4_gib(device):
    table = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device=device)
    table[-1] = randn(8192, seed=9, dtype=table.dtype, device=device)
    last = torch.tensor([299_999], device=device)
    out = fused.embed(last, last, torch.tensor([-1], dtype=torch.int32, device=device), table)
    assert torch.equal(out, table[-1:])


@gpu
def test_dependent_launch_reads_what_was_just_sampled(device):
    token_ids, sampled, source = _ids(16, device, seed=10)
    table = randn(VOCAB, 4096, seed=11, dtype=torch.bfloat16, device=device)
    previous = torch.empty(16, dtype=torch.int64, device=device)
    outs = []

    def chain():
        for _ in range(4):  # resolved ids of one call are the sampled tokens of the next
            fused.embed(token_ids, sampled, source, table, resolved=previous, pdl=True)
            outs[:] = [fused.embed(token_ids, previous, source, table, resolved=sampled, pdl=True)]

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(50):
        sampled.copy_(torch.randint(VOCAB, (16,), device=device))
        expected, rows = sampled.clone(), None
        for _ in range(8):
            rows, expected = embed_twin(token_ids, expected, source, table)
        graph.replay()
        assert torch.equal(outs[0], rows)
        assert torch.equal(sampled, expected)
