"""Sampling on the GPU against its torch twins: the kept sets, the draw, the bits of the random
numbers, bad logits.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from kvrelay.kernels.sampling import keep_likely, uniform
from tests.kernels.rounding import poisoned_memory

pytest.importorskip("triton")
import triton
import triton.language as tl

from kvrelay.kernels import fused_sampling, sampling_floors
from kvrelay.kernels.fused_sampling import sample
from kvrelay.kernels.sampling_slots import Rows, SlotTables, record_of

in_poisoned_memory = pytest.mark.usefixtures(poisoned_memory.__name__)

# How far a sum of probabilities may be off by rounding.
MASS = 2e-6
DRAW = 3e-5

CUTS = [
    {"top_k": 5},
    {"top_k": 50},
    {"top_k": 900},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.2},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 700, "top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.2},
    {"top_p": 0.95, "min_p": 1.0},
    {"top_k": 1},
    {},
]


def make_logits(shape: str, rows: int, vocab: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * {"peaked": 6.0, "flat": 0.3}.get(
        shape, 2.0
    )
    if shape == "peaked":
        logits[:, vocab // 3] = logits.amax() + 3
    if shape == "equal":
        logits = torch.full((rows, vocab), 0.25)
    if shape == "few":
        logits.masked_fill_(torch.rand(rows, vocab, generator=generator) > 20 / vocab, -torch.inf)
        logits[:, -1] = 1.0
    if shape == "sorted":
        logits = logits.sort(descending=True).values
    if shape == "ties":
        logits = logits.round()
    return logits.to(dtype)


def tables_for(params: list[dict[str, float]], vocab: int, device: torch.device) -> SlotTables:
    """Row i's parameters in slot rows - 1 - i."""
    tables = SlotTables.empty(len(params), vocab, device)
    for slot, own in enumerate(reversed(params)):
        tables.parameters[slot] = torch.frombuffer(
            bytearray(record_of(**own)), dtype=torch.int32
        ).to(device)
    return tables


def backwards(rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=device)


def column(params: list[dict[str, float]], name: str, default: float) -> torch.Tensor:
    return torch.tensor([own.get(name, default) for own in params])


def kept_by_twin(
    logits: torch.Tensor, params: list[dict[str, float]], slack: float
) -> torch.Tensor:
    """Logits over temperature in fp64, -inf where cut; `slack` widens or tightens the nucleus."""
    where = logits.device
    scaled = logits.double() / column(params, "temperature", 1.0).double().to(where)[:, None]
    top_k, top_p = (
        column(params, "top_k", 0).to(where),
        column(params, "top_p", 1.0).double().to(where),
    )
    top_p = torch.where(top_p < 1, (top_p + slack).clamp(1e-12, 1 - 1e-12), top_p)
    min_p = column(params, "min_p", 0.0).double().to(where)
    kept = keep_likely(scaled, top_k, top_p, min_p)
    for row in ((top_p >= 1) & (top_k > 0)).nonzero().flatten().tolist():
        # With top-k alone the twin also drops tokens that weigh less than a rounding of the sum
        # before them.
        kth = scaled[row].topk(min(int(top_k[row]), scaled.shape[1])).values[-1]
        least = torch.maximum(kth, scaled[row].amax() + min_p[row].log())
        kept[row] = scaled[row].masked_fill(scaled[row] < least, -torch.inf)
    return kept


def check_tokens(
    tokens: torch.Tensor, logits: torch.Tensor, params: list[dict[str, float]]
) -> None:
    """Each row's draw lies in its token's part of the cumulative distribution, or in a rounding's
    reach of it.
    """
    kept = [kept_by_twin(logits, params, slack) for slack in (-MASS, MASS)]
    cumulative = [logits.softmax(-1).cumsum(-1) for logits in kept]
    draws = uniform(
        *(column(params, name, 0) for name in ("seed", "choice", "token_index"))
    ).double()
    for row, token in enumerate(tokens.tolist()):
        if params[row]["temperature"] == 0:
            assert token == int(logits[row].float().argmax())
            continue
        ends = [
            (float(sums[row, token - 1]) if token else 0.0, float(sums[row, token]))
            for sums in cumulative
        ]
        assert any(low - DRAW <= draws[row] <= high + DRAW for low, high in ends), (
            row,
            params[row],
        )
        assert kept[1][row, token] > -torch.inf, (row, params[row])


def check_floors(
    floors: torch.Tensor, logits: torch.Tensor, params: list[dict[str, float]]
) -> None:
    rows = [
        row
        for row, own in enumerate(params)
        if {"top_k", "top_p", "min_p"} & own.keys() and own["temperature"]
    ]
    kept = (logits.float() >= floors[:, None])[rows] & logits[rows].isfinite()
    least = (kept_by_twin(logits, params, -MASS) > -torch.inf)[rows]
    most = (kept_by_twin(logits, params, MASS) > -torch.inf)[rows]
    wrong = ((least & ~kept) | (kept & ~most)).any(-1)
    assert not wrong.any(), [params[rows[i]] for i in wrong.nonzero().flatten().tolist()]


def check(
    logits: torch.Tensor, params: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the floors that a launch finds, and what it draws."""
    found: list[torch.Tensor] = []
    find = fused_sampling.find_floors

    def spy(rows, tiles, floors, options):
        find(rows, tiles, floors, options)
        found.append(floors)

    monkeypatch.setattr(fused_sampling, "find_floors", spy)
    (rows, vocab), device = logits.shape, logits.device
    tokens = sample(logits, backwards(rows, device), tables_for(params, vocab, device))
    check_floors(found[0], logits, params)
    check_tokens(tokens, logits, params)


def numbered(cuts: list[dict[str, float]], seed: int, temperature: float) -> list[dict[str, float]]:
    return [
        {"seed": seed + row, "choice": row % 3, "token_index": row, "temperature": temperature}
        | cut
        for row, cut in enumerate(cuts)
    ]


@in_poisoned_memory
@pytest.mark.parametrize(
    ("shape", "vocab", "dtype", "temperature"),
    [
        ("normal", 2500, torch.bfloat16, 1.0),
        ("normal", 1024, torch.float32, 0.6),
        ("peaked", 1500, torch.float32, 0.7),
        ("flat", 2500, torch.float16, 1.0),
        ("equal", 2500, torch.bfloat16, 1.0),
        ("few", 1024, torch.float32, 0.6),
        ("sorted", 2500, torch.bfloat16, 1.4),
        ("ties", 1100, torch.float32, 1.0),
        pytest.param("normal", 128256, torch.bfloat16, 0.8, marks=pytest.mark.gpu),
        pytest.param("peaked", 151936, torch.float32, 0.8, marks=pytest.mark.gpu),
        pytest.param("flat", 128256, torch.bfloat16, 0.8, marks=pytest.mark.gpu),
        pytest.param("equal", 32000, torch.bfloat16, 0.8, marks=pytest.mark.gpu),
        pytest.param("few", 50257, torch.float16, 0.8, marks=pytest.mark.gpu),
        pytest.param("ties", 151936, torch.float32, 0.8, marks=pytest.mark.gpu),
    ],
)
def test_floors_and_draws_equal_the_twin(shape, vocab, dtype, temperature, device, monkeypatch):
    large = [{"top_k": 20_000, "top_p": 0.9}, {"top_k": 5000}, *CUTS * 4]
    params = numbered(large if vocab > 20_000 else CUTS, vocab, temperature)
    for own in params[3::9] if vocab > 20_000 else ():
        own["temperature"] = 0.0
    logits = make_logits(shape, len(params), vocab, vocab, dtype).to(device)
    check(logits, params, monkeypatch)


@in_poisoned_memory
def test_top_k_beyond_the_maxima_and_masses_are_narrowed_by_pivots(device, monkeypatch):
    """With little room the brackets go through every pass: some thousand logits, 64 places."""
    monkeypatch.setattr(sampling_floors, "_ROOM", 64)
    params = numbered(
        [{"top_k": 100}, {"top_k": 2000}, {"top_p": 0.5}, {"top_p": 0.99}, {"min_p": 0.3}], 3, 1.2
    )
    logits = make_logits("normal", len(params), 3000, 4, torch.float32).to(device)
    check(logits, params, monkeypatch)


@triton.jit
def _uniforms(rows, out, COUNT: tl.constexpr):  # noqa: N803
    for slot in range(COUNT):
        tl.store(out + slot, fused_sampling._draw(rows, slot, tl.full([], 1 << 24, tl.int64)))


def test_random_numbers_are_those_of_the_twin_bit_for_bit(device):
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32) - 5, 1234567890123456789]
    triples = list(itertools.product(seeds, [0, 3, 2**31], [0, 1, 77, 131071]))
    params = [{"seed": s, "choice": c, "token_index": i, "temperature": 1.0} for s, c, i in triples]
    tables = tables_for(params[::-1], 1024, device)
    out = torch.full((len(params),), -1, dtype=torch.int64, device=device)
    nothing = Rows(
        tables.notes, 0, 0, 0, backwards(1, device), tables.parameters, None, None, None, None
    )
    _uniforms[(1,)](nothing, out, COUNT=len(params))
    expected = uniform(*(torch.tensor(values) for values in zip(*triples, strict=True))) * 2**24
    assert out.tolist() == expected.long().tolist()


@in_poisoned_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_tokens(dtype, device):
    logits = make_logits("normal", 3, 3000, 5, dtype)
    logits[0, [17, 2999]] = 30.0
    logits[1, [1023, 1024]] = 30.0
    params = numbered([{}] * 3, 1, 0.0)
    tokens = sample(
        logits.to(device), backwards(3, device), tables_for(params, 3000, device), cut=False
    )
    assert tokens.tolist() == [17, 1023, int(logits[2].float().argmax())]


@in_poisoned_memory
@pytest.mark.parametrize(
    "cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 50, "top_p": 0.9}]
)
def test_logits_that_are_not_finite_give_a_token_of_the_vocabulary(cut, device):
    vocab = 1500
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(3))
    logits[0, :] = -torch.inf
    logits[0, 1300] = -3.0
    logits[1, :] = torch.nan
    logits[2, 40] = torch.nan
    logits[3, :] = -torch.inf
    logits[4, 3] = torch.inf
    logits[5, :] = torch.nan
    params = [
        {**own, "temperature": 0.0} if row == 5 else own
        for row, own in enumerate(numbered([cut] * 7, 1, 1.0))
    ]
    tokens = sample(
        logits.to(device), backwards(7, device), tables_for(params, vocab, device)
    ).tolist()
    assert tokens[0] == 1300
    assert all(0 <= token < vocab for token in tokens)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44])
def test_a_tiny_temperature_is_greedy(temperature, device):
    logits = make_logits("normal", 3, 1200, 8, torch.float32)
    params = numbered([{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.5}], 1, temperature)
    tokens = sample(logits.to(device), backwards(3, device), tables_for(params, 1200, device))
    assert tokens.tolist() == logits.argmax(-1).tolist()


@in_poisoned_memory
def test_padding_touches_no_slot_and_others_move_on(device):
    params = numbered([{}, {"top_p": 0.9}, {}], 1, 1.0)
    tables = tables_for(params, 1100, device)
    tables.sampled.fill_(-5)
    before = tables.parameters.clone()
    logits = make_logits("normal", 4, 1100, 8, torch.float32).to(device)
    slots = torch.tensor([-1, 1, -1], dtype=torch.int32, device=device)
    tokens = sample(logits, slots, tables)
    assert tokens.tolist()[::2] == [0, 0]
    assert tables.sampled.tolist() == [-5, int(tokens[1]), -5]
    before[1, 11] += 1
    assert torch.equal(tables.parameters, before)


def test_a_token_does_not_depend_on_the_batch(device):
    """The same request in other rows and among others, and in launches that can do more than it
    needs.
    """
    vocab = 2100
    cuts = [{}, {"top_k": 7}, {"top_p": 0.9}, {}, {"temperature": 0.0}]
    params = numbered(cuts, 1, 1.0)
    logits = make_logits("normal", 5, vocab, 8, torch.bfloat16).to(device)

    def run(order: list[int], **options: bool) -> list[int]:
        tables = tables_for([params[i] for i in order], vocab, device)
        return sample(logits[order], backwards(len(order), device), tables, **options).tolist()

    together = run([0, 1, 2, 3, 4])
    assert run([3, 4, 0, 2, 1]) == [together[i] for i in (3, 4, 0, 2, 1)]
    assert [run([i])[0] for i in range(5)] == together
    plain = [0, 3, 4]
    assert run(plain, cut=False, adjusted=False) == [together[i] for i in plain]
    assert run([0, 1, 2, 3, 4] * 4, adjusted=False) == together * 4  # four tiles a program
