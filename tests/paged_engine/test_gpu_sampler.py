"""The GPU's sampler chooses what the CPU's does, for all parameters, one step ahead of the host."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.paged_engine.gpu_sampler import GpuSampler, SamplePlan
from kvrelay.paged_engine.grammar import row_masks
from kvrelay.paged_engine.guide import Guide
from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.sampler import Sampler
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.outputs import TokenLogprobs
from kvrelay.wire.sampling import MAX_LOGPROBS, SamplingParams

EOS = (3, 7)
VOCAB = 128256  # the largest of these tests


@pytest.fixture
def device() -> torch.device:
    """Where kernels run in this test session."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Pair:
    """A request as the CPU's engine knows it, and as the GPU's, whose newest token is still
    pending.
    """

    known: Request
    behind: Request
    slot: int

    def append(self, token: int) -> None:
        if self.behind.num_pending:
            self.behind.token_ids.append(self.known.token_ids[-1])
            self.behind.num_pending = 0
        self.known.token_ids.append(token)
        self.behind.num_pending = 1


def pair(slot: int, prompt: list[int], generated: list[int] | None = None, **params) -> Pair:
    own = SamplingParams(**({"max_tokens": 64, "seed": slot, "temperature": 0.0} | params)).check(
        VOCAB
    )
    submit = Submit(f"r{slot}", prompt, own, generated=generated or [])
    return Pair(Request.from_submit(submit, 0.0), Request.from_submit(submit, 0.0), slot)


def everything(rng: random.Random, vocab: int) -> dict[str, object]:
    """Random parameters of every kind."""

    def sometimes(value: object, off: object) -> object:
        return value if rng.random() < 0.4 else off

    return {
        "seed": rng.choice([rng.randrange(-(2**63), 2**63), 2**63 - 1, -1]),
        "choice": rng.randrange(4),
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.0, 2.0]),
        "top_k": sometimes(rng.choice([1, 5, 60, vocab, vocab + 9, 2**40]), 0),
        "top_p": sometimes(rng.choice([0.1, 0.8, 0.95]), 1.0),
        "min_p": sometimes(rng.choice([0.02, 0.3, 1.0]), 0.0),
        "presence_penalty": sometimes(rng.uniform(-2, 2), 0.0),
        "frequency_penalty": sometimes(rng.uniform(-2, 2), 0.0),
        "repetition_penalty": sometimes(rng.choice([0.5, 1.3, 10.0]), 1.0),
        "min_tokens": sometimes(rng.randrange(1, 8), 0),
        "stop_token_ids": sometimes(tuple(rng.sample(range(vocab), 3)), ()),
        "logit_bias": sometimes(
            tuple((t, rng.uniform(-9, 9)) for t in rng.sample(range(vocab), 40)), ()
        ),
        "logprobs": sometimes(rng.choice([0, 1, 4, MAX_LOGPROBS]), None),
    }


def make_sampler(slots: int, vocab: int, device: torch.device) -> GpuSampler:
    return GpuSampler(max_slots=slots, vocab_size=vocab, eos_token_ids=EOS, device=device)


def on(device: torch.device, slots: list[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=device)


def assert_close(ours: TokenLogprobs | None, theirs: TokenLogprobs | None) -> None:
    if ours is None or theirs is None:
        assert ours is theirs
        return
    assert ours.token_id == theirs.token_id
    assert ours.top_ids == theirs.top_ids
    assert (ours.logprob, *ours.top_logprobs) == pytest.approx(
        (theirs.logprob, *theirs.top_logprobs), abs=1e-4
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_equals_the_cpu_through_steps_that_the_host_has_not_seen(seed, device):
    """Requests come and go; rows change places; tokens reach the requests one step late."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab, slots, steps = 1200, 6, 5
    ours, theirs = make_sampler(slots, vocab, device), Sampler(EOS)
    likely = rng.sample(
        range(vocab), 40
    )  # few, so that penalties and stop tokens meet what is drawn

    def fresh(slot: int) -> Pair:
        prompt, generated = rng.choices(likely, k=12), rng.choices(likely, k=rng.choice([0, 0, 5]))
        new = pair(slot, prompt, generated, **everything(rng, vocab))
        ours.admit(slot, new.behind)
        return new

    pairs = [fresh(slot) for slot in range(slots)]
    for _ in range(steps):
        leaving = rng.randrange(slots)
        pairs = [fresh(p.slot) if p.slot == leaving else p for p in pairs]
        rng.shuffle(pairs)
        logits = torch.randn(slots, vocab, generator=generator)
        logits[:, [*likely, *EOS]] += 5
        rows = [p.slot for p in pairs]
        plan = ours.prepare(rows, [p.behind for p in pairs])
        sampled = ours.launch(logits.to(device), on(device, rows), plan)
        sampled.start_copy()
        tokens, logprobs = sampled.wait()
        expected, expected_logprobs = theirs.sample(logits.clone(), [p.known for p in pairs])
        assert tokens == expected, [
            p.known.params for p, a, b in zip(pairs, tokens, expected, strict=True) if a != b
        ]
        for a, b in zip(logprobs, expected_logprobs, strict=True):
            assert_close(a, b)
        for p, token in zip(pairs, tokens, strict=True):
            p.append(token)
            assert int(ours.sampled[p.slot]) == token


def test_masked_rows_equal_the_cpus(device):
    """Rows with and without a guide, of every kind of parameters, while others are not masked."""
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    vocab, slots = 1201, 6
    ours, theirs = make_sampler(slots, vocab, device), Sampler(EOS)
    pairs = []
    for slot in range(slots):
        allowed = (*rng.sample(range(vocab), 30), vocab - 1) if slot % 2 else None
        bad = ((slot, 40), (41,)) if slot in (2, 3) else ()
        params = everything(rng, vocab) | {"allowed_token_ids": allowed, "bad_words": bad}
        new = pair(slot, [5, 6], [slot], **params)
        if new.known.params.guided:
            for request in (new.known, new.behind):
                request.guide = Guide(request.params, vocab_size=vocab, eos_token_ids=EOS)
        ours.admit(slot, new.behind)
        pairs.append(new)
    rows = [p.slot for p in pairs]
    for _ in range(3):
        logits = torch.randn(slots, vocab, generator=generator)
        logits[:, 40:42] = 20.0
        plan = ours.prepare(rows, [p.behind for p in pairs])
        masks = row_masks([p.known for p in pairs], vocab)
        assert masks is not None
        assert masks.rows == [1, 2, 3, 5]
        tokens, _ = ours.launch(
            logits.to(device), on(device, rows), plan, ours.mask(masks, slots)
        ).wait()
        expected, _ = theirs.sample(logits.clone(), [p.known for p in pairs])
        assert tokens == expected
        for p, token in zip(pairs, tokens, strict=True):
            p.append(token)
            allowed = p.known.params.allowed_token_ids
            assert allowed is None or token in allowed


def test_the_longest_lists_are_searched(device):
    """1024 tokens with a bias, at both ends of the vocabulary and of the list."""
    vocab = 2500
    rng = random.Random(1)
    biased = sorted({0, vocab - 1, *rng.sample(range(vocab), 1023)})[:1024]
    bias = tuple((token, rng.uniform(-5, 5)) for token in biased)
    both = pair(0, [1], logit_bias=bias[::-1], logprobs=0)
    ours, theirs = make_sampler(1, vocab, device), Sampler(())
    ours.admit(0, both.behind)
    plan = ours.prepare([0], [both.behind])
    for seed in range(3):
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
        expected, _ = theirs.sample(logits.clone(), [both.known])
        assert ours.launch(logits.to(device), on(device, [0]), plan).wait()[0] == expected


def test_a_plan_says_what_its_rows_need(device):
    ours = make_sampler(5, 1100, device)
    kinds = [
        {},
        {"temperature": 1.0, "top_p": 0.5},
        {"top_p": 0.5},
        {"min_tokens": 1},
        {"logprobs": 2},
    ]
    requests = [pair(slot, [1], **kind).behind for slot, kind in enumerate(kinds)]
    for slot, request in enumerate(requests):
        ours.admit(slot, request)
    assert ours.prepare([0], requests[:1]) == SamplePlan(1)
    assert ours.prepare([1], requests[1:2]) == SamplePlan(1, cut=True)
    assert ours.prepare([2], requests[2:3]) == SamplePlan(1), "greedy rows are not cut"
    assert ours.prepare([3], requests[3:4]) == SamplePlan(1, adjusted=True)
    assert ours.prepare([0, 4], [requests[0], requests[4]]).logprobs == {1: 2}


def test_every_variant_is_compiled_and_padding_leaves_the_slots_alone(device):
    ours = make_sampler(2, 1100, device)
    ours.warm_up(torch.bfloat16)
    assert ours.sampled.tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "extra", [{}, {"top_k": 50, "top_p": 0.95}, {"presence_penalty": 0.5, "min_tokens": 3}]
)
def test_launches_wait_for_nothing_and_can_be_captured(extra, device):
    """A captured draw continues where eager ones have left the slots, and follows later admissions."""
    vocab, rows = VOCAB, 33
    captured, eager = make_sampler(40, vocab, device), make_sampler(40, vocab, device)
    captured.warm_up(torch.bfloat16)
    requests = [pair(s, [1, 2, 3], temperature=0.8, **extra).behind for s in range(rows)]
    logits = (torch.randn(40, vocab, device=device) * 2).bfloat16()
    slots = on(device, [*range(rows), *[-1] * 7])
    for sampler in (captured, eager):
        for slot, request in enumerate(requests):
            sampler.admit(slot, request)
        plan = sampler.prepare(range(rows), requests)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = captured.draw(logits, slots, plan)
    for step in range(4):
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = eager.launch(logits, slots, plan)
            expected.start_copy()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert captured.read(logits, tokens, plan).wait() == expected.wait()
        if step == 1:
            for sampler in (captured, eager):
                sampler.admit(0, pair(0, [9], temperature=0.8, seed=77, **extra).behind)
                sampler.prepare([], [])


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 40, "top_p": 0.9}]
)
def test_spare_slots_sample_the_rows_of_one_request_as_the_cpu_does(params, device):
    """Two requests with proposals and one without; then all go on in their own slots."""
    vocab, slots = 1200, 6
    ours = GpuSampler(
        max_slots=slots, vocab_size=vocab, eos_token_ids=EOS, device=device, spare_slots=slots
    )
    theirs = Sampler(EOS)
    requests = [
        pair(slot, [2, 3, slot], [4] * slot, logprobs=2, **params).known for slot in range(3)
    ]
    for slot, request in enumerate(requests):
        assert ours.is_unadjusted(request.params, request.output_tokens)
        ours.admit(slot, request)

    def sample(rows: list[tuple[int, Request, list[int]]]) -> list[int]:
        """(slot, request, proposals before the row)"""
        states = [request.with_tokens(ahead) for _, request, ahead in rows]
        for (slot, request, _), state in zip(rows, states, strict=True):
            if slot >= slots or request is not requests[1]:
                ours.set(slot, request.params, state.output_tokens, state.token_ids[-1])
        logits = (
            torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(len(rows))) * 3
        )
        places = [slot for slot, _, _ in rows]
        plan = ours.prepare(places, [request for _, request, _ in rows])
        tokens, logprobs = ours.launch(logits.to(device), on(device, places), plan).wait()
        expected, expected_logprobs = theirs.sample(logits.clone(), states)
        for a, b in zip(logprobs, expected_logprobs, strict=True):
            assert_close(a, b)
        assert tokens == expected
        return tokens

    first, second, third = requests
    rows = [
        (6, first, []),
        (7, first, [5]),
        (8, first, [5, 6]),
        (1, second, []),
        (10, third, []),
        (11, third, [9]),
    ]
    tokens = sample(rows)
    for request, token in ((first, tokens[0]), (second, tokens[3]), (third, tokens[4])):
        request.token_ids.append(token)
    sample([(slot, request, []) for slot, request in enumerate(requests)])


def test_who_adjusts_logits_does_not_draw_ahead(device):
    ours = make_sampler(1, 1100, device)
    for params in (
        {"logit_bias": ((5, 1.0),)},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.2},
    ):
        assert not ours.is_unadjusted(pair(0, [1], **params).known.params, 0)
    minimum = pair(0, [1], min_tokens=3).known.params
    assert [ours.is_unadjusted(minimum, outputs) for outputs in (0, 2, 3)] == [False, False, True]
