"""The engine against transformers, and against itself in other batches, chunks and orders.

More comparisons with transformers are in test_architectures.py.
"""

from pathlib import Path

import pytest
import torch
from engines import GPU_SIZES, ON_GPU, SAMPLED, drain, make, output, prompt, submit
from tiny_models import make_tiny

from kvrelay.wire.outputs import Finish


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, tuple[Path, object]]:
    names = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    return {name: (folder, make_tiny(name, folder)) for name, folder in folders.items()}


def answers(folder: Path, *, alone: bool, **options) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of greedy and sampled requests, given one by one or in a crowd.

    With a `max_model_len` the pool is too small for all.
    """
    prompts = [prompt(length, seed=length) for length in (3, 40, 90, 128, 33)]
    engine, requests = make(folder, **options), []
    for round_ in range(2):  # the second round finds its prefixes cached
        for i, tokens in enumerate(prompts):
            params = SAMPLED if i % 2 else {}
            requests.append(submit(engine, f"{round_}-{i}", tokens, seed=i, logprobs=2, **params))
            if alone:
                drain(engine)
        drain(engine)
    assert [output(r) for r in requests[:5]] == [output(r) for r in requests[5:]]
    assert "max_model_len" not in options or engine.scheduler.preemptions > 0
    return [(output(r), [x.logprob for x in r.new_logprobs]) for r in requests[:5]]


def pool_of_14_blocks(vector_bytes: int) -> dict[str, int]:
    """Of 16 tokens of a tiny model, whose heads have keys and values of so many bytes; and a
    context that fits.
    """
    return {
        "kv_cache_memory_bytes": 14 * 16 * 3 * 2 * 2 * vector_bytes,
        "block_size": 16,
        "max_model_len": 160,
    }


def test_tokens_do_not_depend_on_batch_chunks_cache_or_preemption(tiny):
    """Greedy and sampled: alone, in a crowd, in small chunks, from the prefix cache, in a pool that
    is too small.
    """
    folder, _ = tiny["MistralForCausalLM"]
    reference = answers(folder, alone=True)
    assert answers(folder, alone=False) == reference
    assert (
        answers(folder, alone=False, max_num_batched_tokens=19, enable_prefix_caching=False)
        == reference
    )
    assert answers(folder, alone=False, **pool_of_14_blocks(16 * 4)) == reference


def test_a_continued_request_equals_an_undisturbed_one(tiny):
    """What a hand-over and a fail-over rest on: start again with k tokens generated elsewhere."""
    folder, _ = tiny["LlamaForCausalLM"]
    tokens = prompt(50)
    engine = make(folder)
    whole = submit(engine, "whole", tokens, **SAMPLED)
    drain(engine)
    for k in (1, 7, 23):
        other = make(folder)
        rest = submit(other, "rest", tokens, generated=output(whole)[:k], **SAMPLED)
        drain(other)
        assert output(rest) == output(whole)


def test_logprobs_are_those_of_the_raw_distribution(tiny):
    folder, model = tiny["LlamaForCausalLM"]
    engine = make(folder)
    tokens = prompt(30)
    req = submit(
        engine, "r", tokens, max_tokens=1, logprobs=5, temperature=1.5, presence_penalty=1.0
    )
    drain(engine)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    (given,) = req.new_logprobs
    assert given.token_id == output(req)[0]
    assert given.logprob == pytest.approx(float(theirs[given.token_id]), abs=1e-4)
    assert list(given.top_ids) == theirs.topk(5).indices.tolist()
    assert list(given.top_logprobs) == pytest.approx(theirs.topk(5).values.tolist(), abs=1e-4)


def test_stop_tokens_min_tokens_and_bias(tiny):
    folder, _ = tiny["LlamaForCausalLM"]
    engine = make(folder)
    tokens = prompt(30)
    free = submit(engine, "free", tokens)
    drain(engine)
    third = output(free)[2]
    stopped = submit(engine, "stopped", tokens, stop_token_ids=(third,))
    forced = submit(engine, "forced", tokens, stop_token_ids=(third,), min_tokens=10)
    eos = submit(engine, "eos", tokens, logit_bias=((2, 100.0),), ignore_eos=False)
    drain(engine)
    first = output(free).index(third) + 1
    assert output(stopped) == output(free)[:first]
    assert stopped.finish is Finish.STOP
    assert len(output(forced)) >= 10
    assert third not in output(forced)[:9]
    assert output(eos) == [2]
    assert eos.finish is Finish.STOP


def test_the_context_limit_ends_a_request(tiny):
    folder, _ = tiny["LlamaForCausalLM"]
    engine = make(folder, max_model_len=40)
    req = submit(engine, "r", prompt(30), max_tokens=500)
    drain(engine)
    assert len(req.token_ids) == 40
    assert req.finish is Finish.LENGTH


@pytest.mark.gpu
def test_a_batch_invariant_gpu_keeps_its_tokens_in_any_batch(tmp_path):
    """As on the CPU: alone, in a crowd, in small chunks, from the prefix cache, in a pool that is
    too small.
    """
    make_tiny("Qwen3ForCausalLM", tmp_path, **GPU_SIZES)
    options = ON_GPU | {"batch_invariant": True, "max_num_batched_tokens": 512}
    reference = answers(tmp_path, alone=True, **options)
    for changed in (
        {},
        {"max_num_batched_tokens": 19, "enable_prefix_caching": False},
        pool_of_14_blocks(64 * 2),
    ):
        ours = answers(tmp_path, alone=False, **options | changed)
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in reference]
        for (_, given), (_, expected) in zip(ours, reference, strict=True):
            assert given == pytest.approx(expected, abs=1e-5)
