"""The random bits are Philox4x32-10's own, and depend on nothing but (seed, choice, token index)."""

import torch

from kvrelay.kernels.philox import philox_4x32, uniform


def _words(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    out = philox_4x32(
        tuple(torch.tensor([word]) for word in counter),
        (torch.tensor([key[0]]), torch.tensor([key[1]])),
    )
    return [int(word) for word in out]


def _by_the_paper(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """The same function in Python's unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def test_known_answers_of_the_reference_implementation():
    assert _words((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert _words((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_equals_unbounded_integers_on_random_words():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        words = torch.randint(0, 2**32, (6,), generator=generator).tolist()
        assert _words(tuple(words[:4]), (words[4], words[5])) == _by_the_paper(
            tuple(words[:4]), (words[4], words[5])
        )


def test_a_draw_does_not_depend_on_the_batch():
    seeds = torch.randint(-(2**63), 2**63 - 1, (100,), generator=torch.Generator().manual_seed(2))
    index = torch.arange(100)
    together = uniform(seeds, torch.zeros_like(index), index)
    alone = torch.cat(
        [uniform(seeds[i : i + 1], torch.tensor([0]), index[i : i + 1]) for i in range(100)]
    )
    assert torch.equal(together, alone)
    assert float(together.min()) >= 0
    assert float(together.max()) < 1


def test_seed_choice_and_index_all_matter():
    def one(seed: int, choice: int, index: int) -> float:
        return float(uniform(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([index])))

    draws = {
        one(1, 0, 0),
        one(2, 0, 0),
        one(1, 1, 0),
        one(1, 0, 1),
        one(1 + 2**32, 0, 0),
        one(-1, 0, 0),
    }
    assert len(draws) == 6


def test_draws_are_uniform():
    index = torch.arange(100_000)
    draws = uniform(torch.full_like(index, 7), torch.zeros_like(index), index)
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert float((counts - 5000).abs().max()) < 5 * 5000**0.5
