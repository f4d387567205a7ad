"""Token choice: the sets that top-k, top-p and min-p leave, penalties, and the distribution that is
drawn from.
"""

import pytest
import torch

from kvrelay.kernels.decoder_layer import Linear, rows_are_invariant
from kvrelay.kernels.sampling import draw, keep_likely, penalize, philox_4x32, uniform


def _by_definition(row: torch.Tensor, k: int, p: float, m: float) -> set[int]:
    order = row.sort(descending=True, stable=True).indices.tolist()
    if k > 0:
        order = order[:k]
    shares = row[order].double().softmax(-1).tolist()
    nucleus, total = [], 0.0
    for token, share in zip(order, shares, strict=True):
        if nucleus and p < 1 and total >= p:
            break
        nucleus.append(token)
        total += share
    floor = float(row.double().softmax(-1).max()) * m
    whole = row.double().softmax(-1)
    return {token for token in nucleus if float(whole[token]) >= floor}


LIMITS = [
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.05),
    (40, 0.9, 0.01),
    (1, 0.5, 0.0),
    (900, 0.99, 0.0),
    (0, 1.0, 0.0),
]


@pytest.mark.parametrize(("vocab", "scale"), [(50, 3.0), (2000, 0.3), (2000, 3.0), (2000, 12.0)])
def test_each_row_keeps_what_the_definitions_say(vocab, scale):
    limits = LIMITS * 3
    logits = torch.randn(len(limits), vocab, generator=torch.Generator().manual_seed(8)) * scale
    out = keep_likely(logits, *(torch.tensor(column) for column in zip(*limits, strict=True)))
    kept = [set(row.isfinite().nonzero().flatten().tolist()) for row in out]
    assert kept == [_by_definition(row, *own) for row, own in zip(logits, limits, strict=True)]


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]])
    points = (torch.arange(20_000) + 0.5) / 20_000
    tokens = draw(logits.expand(20_000, -1), points)
    shares = torch.bincount(tokens, minlength=4) / 20_000
    torch.testing.assert_close(shares, logits.softmax(-1)[0], atol=1e-3, rtol=0)


def test_a_draw_at_either_end_is_a_possible_token():
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 10], logits[:, 20] = 1.0, 1.0
    largest = 1 - 2**-24
    assert draw(logits, torch.tensor([0.0, largest])).tolist() == [10, 20]


def test_penalties_follow_their_formulas():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    penalize(
        logits, 0, torch.tensor([0, 1, 3]), torch.tensor([0, 3]), torch.tensor([2, 1]),
        repetition=2.0, presence=0.5, frequency=0.25,
    )  # fmt: skip
    torch.testing.assert_close(
        logits[0], torch.tensor([2.0 / 2 - 0.5 - 0.5, -4.0, 1.0, 0.25 - 0.5 - 0.25])
    )
    assert logits[1].tolist() == [1.0] * 4


def test_a_linear_that_mixes_rows_is_caught():
    class Mixing(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) + x.shape[0] * 1e-7

    assert not rows_are_invariant(Mixing(torch.ones(16, 16)), 2)
    assert any(rows_are_invariant(Linear(torch.randn(96, 80)), rows) for rows in (1, 2, 16))


def _words(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    out = philox_4x32(
        tuple(torch.tensor([word]) for word in counter),
        (torch.tensor([key[0]]), torch.tensor([key[1]])),
    )
    return [int(word) for word in out]


def test_known_answers_of_the_reference_implementation():
    assert _words((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert _words((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_seed_choice_and_index_all_matter():
    seeds, choices, indices = torch.tensor(
        [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1 + 2**32, 0, 0), (-1, 0, 0)]
    ).T
    assert len(set(uniform(seeds, choices, indices).tolist())) == 6


def test_draws_are_uniform():
    index = torch.arange(100_000)
    draws = uniform(torch.full_like(index, 7), torch.zeros_like(index), index)
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert float((counts - 5000).abs().max()) < 5 * 5000**0.5
