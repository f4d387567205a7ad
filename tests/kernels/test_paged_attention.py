"""Paged attention equals plain attention, and a token's bits depend on its own sequence only."""

import itertools

import pytest
import torch

from kvrelay.kernels.elementwise import write_kv
from kvrelay.kernels.paged_attention import SequenceSpan, attend, plan_attention

BLOCK = 16


def _pool(kv_heads: int, dim: int, blocks: int = 160, layers: int = 2) -> torch.Tensor:
    pool = torch.randn(
        blocks, kv_heads, layers, 2, BLOCK, dim, generator=torch.Generator().manual_seed(3)
    )
    pool[0] = 0  # the null block
    return pool


def _layer(pool: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pool[:, :, layer, 0], pool[:, :, layer, 1]


def _plain(
    query: torch.Tensor, pool: torch.Tensor, layer: int, span: SequenceSpan, window: int
) -> torch.Tensor:
    """Textbook attention of one sequence, from its gathered blocks."""
    end = span.first_position + span.count
    key, value = (
        pool[list(span.block_ids), :, layer, kind]
        .transpose(0, 1)
        .reshape(pool.shape[1], -1, pool.shape[-1])[:, :end]
        for kind in (0, 1)
    )
    group = query.shape[1] // pool.shape[1]
    q = query[span.start : span.start + span.count].transpose(0, 1).double()
    scores = q @ key.repeat_interleave(group, 0).double().transpose(1, 2) / pool.shape[-1] ** 0.5
    position, other = torch.arange(span.first_position, end)[:, None], torch.arange(end)[None]
    hidden = other > position
    if window:
        hidden |= other <= position - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(group, 0).double()).transpose(0, 1).float()


def _spans(shapes: list[tuple[int, int]], seed: int = 0) -> list[SequenceSpan]:
    """(count, first position) of each sequence, over shuffled blocks."""
    free = (torch.randperm(159, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    spans, start = [], 0
    for count, first in shapes:
        need = -(-(count + first) // BLOCK)
        spans.append(SequenceSpan(start, count, first, [free.pop() for _ in range(need)]))
        start += count
    return spans


MIXES = [
    [(1, 0)],
    [(1, 5), (1, 127), (1, 128), (1, 300)],
    [(7, 0), (33, 0), (64, 100)],
    [(1, 700), (100, 37), (1, 60), (40, 0), (2, 126)],
]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80), (6, 2, 128)]
)
@pytest.mark.parametrize("window", [0, 1, 200])
def test_equals_plain_attention(mix, heads, kv_heads, dim, window):
    pool, spans = _pool(kv_heads, dim), _spans(mix)
    tokens = sum(span.count for span in spans)
    query = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(4))
    plan = plan_attention(
        spans,
        tokens=tokens,
        block_size=BLOCK,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        window=window,
    )
    out = attend(query, *_layer(pool, 1), plan)
    for span in spans:
        expected = _plain(query, pool, 1, span, window)
        torch.testing.assert_close(
            out[span.start : span.start + span.count], expected, atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("window", [0, 50])
def test_bits_depend_on_neither_batch_nor_chunks(window):
    """A prompt in one chunk, in odd chunks and token by token, alone and in company: the same bits."""
    heads, kv_heads, dim, length = 9, 3, 64, 300
    pool = _pool(kv_heads, dim)
    ours, other = _spans([(length, 0), (200, 0)])
    query = torch.randn(length + 200, heads, dim, generator=torch.Generator().manual_seed(5))

    def run(cuts: list[int], company: bool) -> torch.Tensor:
        parts = []
        for first, end in itertools.pairwise(cuts):
            spans = [SequenceSpan(0, end - first, first, ours.block_ids)]
            rows = [query[first:end]]
            if company:
                spans = [
                    SequenceSpan(0, 200, 0, other.block_ids),
                    SequenceSpan(200, end - first, first, ours.block_ids),
                ]
                rows = [query[length:], query[first:end]]
            tokens = sum(span.count for span in spans)
            plan = plan_attention(
                spans, tokens=tokens, block_size=BLOCK, kv_heads=kv_heads, group=3, window=window
            )
            parts.append(attend(torch.cat(rows), *_layer(pool, 0), plan)[-(end - first) :])
        return torch.cat(parts)

    whole = run([0, length], company=False)
    assert torch.equal(run([0, 1, 2, 17, 100, 131, 299, length], company=False), whole)
    assert torch.equal(run([0, 64, 65, length], company=True), whole)
    assert torch.equal(run([0, 250, *range(251, length + 1)], company=False), whole)


def test_slabs_bound_the_memory_and_change_nothing(monkeypatch):
    pool, spans = _pool(3, 64), _spans([(1, 700), (100, 37), (1, 60), (40, 0)])
    query = torch.randn(142, 9, 64, generator=torch.Generator().manual_seed(6))
    whole = plan_attention(spans, tokens=142, block_size=BLOCK, kv_heads=3, group=3)
    monkeypatch.setattr("kvrelay.kernels.paged_attention.SLAB_BYTES", 1)
    cut = plan_attention(spans, tokens=142, block_size=BLOCK, kv_heads=3, group=3)
    assert len(cut.slabs) > len(whole.slabs)
    assert torch.equal(attend(query, *_layer(pool, 0), cut), attend(query, *_layer(pool, 0), whole))


def test_written_kv_lies_where_the_layout_says():
    pool = torch.zeros(4, 2, 3, 2, BLOCK, 8)
    key, value = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(7))
    write_kv(*_layer(pool, 1), key, value, torch.tensor([3, 1, 1]), torch.tensor([0, 5, 15]))
    assert torch.equal(pool[3, :, 1, 0, 0], key[0])
    assert torch.equal(pool[1, :, 1, 1, 5], value[1])
    assert torch.equal(pool[1, :, 1, 0, 15], key[2])
    assert pool.count_nonzero() == key.numel() + value.numel()
