"""Paged attention equals plain attention, and a token's bits depend on its own sequence only."""

import itertools

import pytest
import torch

from kvrelay.kernels.paged_attention import AttentionPlan, SequenceSpan, attend, plan_attention
from tests.kernels.paged_case import Case, make_case, starts

BLOCK = 16
MIXES = [
    [(1, 0)],
    [(1, 5), (1, 127), (1, 128), (1, 300)],
    [(7, 0), (33, 0), (64, 100)],
    [(1, 700), (100, 37), (1, 60), (40, 0), (2, 126)],
]


def made(mix: list[tuple[int, int]], heads: int, kv_heads: int, dim: int) -> Case:
    case = make_case(mix, heads, kv_heads, dim, BLOCK, torch.float32, torch.device("cpu"))
    for cache in (case.key_cache, case.value_cache):
        cache.nan_to_num_(0.0)  # an engine's pool is all zeros at first
    return case


def attended(case: Case, query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    return attend(query, case.key_cache, case.value_cache, plan, scale=query.shape[2] ** -0.5)


def run(case: Case, query: torch.Tensor, spans: list[SequenceSpan], window: int) -> torch.Tensor:
    plan = plan_attention(
        spans,
        tokens=len(query),
        block_size=BLOCK,
        kv_heads=case.key_cache.shape[1],
        group=case.group,
        window=window,
    )
    return attended(case, query, plan)


def span(case: Case, sequence: int, start: int, first: int, end: int) -> SequenceSpan:
    """Tokens [first, end) of a sequence in rows from `start` on."""
    return SequenceSpan(start, end - first, first, case.block_tables[sequence].tolist())


def whole_spans(case: Case) -> list[SequenceSpan]:
    rows = zip(starts(case.query_lens), case.query_lens, case.context_lens, strict=False)
    return [
        span(case, sequence, start, context - count, context)
        for sequence, (start, count, context) in enumerate(rows)
    ]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80), (6, 2, 128)]
)
@pytest.mark.parametrize("window", [0, 1, 200])
def test_equals_plain_attention(mix, heads, kv_heads, dim, window):
    case = made(mix, heads, kv_heads, dim)
    out = run(case, case.query, whole_spans(case), window)
    for rows, expected in case.expected(window):
        torch.testing.assert_close(out[rows], expected.float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 50])
def test_bits_depend_on_neither_batch_nor_chunks(window):
    """A prompt in one chunk, in odd chunks and token by token, alone and in company: the same bits."""
    length = 300
    case = made([(length, 0), (200, 0)], 9, 3, 64)
    ours, other = case.query[:length], case.query[length : length + 200]

    def chunks(cuts: list[int], company: bool) -> torch.Tensor:
        parts = []
        for first, end in itertools.pairwise(cuts):
            spans, rows = [span(case, 0, 0, first, end)], ours[first:end]
            if company:
                spans = [span(case, 1, 0, 0, 200), span(case, 0, 200, first, end)]
                rows = torch.cat([other, rows])
            parts.append(run(case, rows, spans, window)[-(end - first) :])
        return torch.cat(parts)

    whole = chunks([0, length], company=False)
    assert torch.equal(chunks([0, 1, 2, 17, 100, 131, 299, length], company=False), whole)
    assert torch.equal(chunks([0, 64, 65, length], company=True), whole)
    assert torch.equal(chunks([0, 250, *range(251, length + 1)], company=False), whole)


def test_slabs_bound_the_memory_and_change_nothing(monkeypatch):
    case = made(MIXES[3], 9, 3, 64)
    whole = run(case, case.query, whole_spans(case), 0)
    monkeypatch.setattr("kvrelay.kernels.paged_attention.SLAB_BYTES", 1)
    plan = plan_attention(
        whole_spans(case), tokens=len(case.query), block_size=BLOCK, kv_heads=3, group=3
    )
    assert len(plan.slabs) > 2  # decodes and prefills have one each
    assert torch.equal(attended(case, case.query, plan), whole)
