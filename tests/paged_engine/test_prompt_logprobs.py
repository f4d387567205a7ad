"""Log-probabilities of a prompt's own tokens: transformers' numbers, through chunks, batches,
caches and preemption.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import GPU_SIZES, ON_GPU, drain, make, output, prompt, submit
from tiny_models import make_tiny

from kvrelay.paged_engine import runner
from kvrelay.paged_engine import sampler as prompt_scores
from kvrelay.paged_engine.request import Request
from kvrelay.wire.config import SpeculativeConfig
from kvrelay.wire.outputs import TokenLogprobs

ARCHITECTURES = ["LlamaForCausalLM", "Gemma2ForCausalLM"]  # one with a soft cap of its logits


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request, tmp_path_factory) -> tuple[Path, object]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_tiny(request.param, folder)


def check(
    given: list[TokenLogprobs], model, tokens: list[int], count: int, within: float = 1e-4
) -> None:
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    assert [entry.token_id for entry in given] == tokens[1:]
    for entry, row in zip(given, theirs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=within)
        assert list(entry.top_logprobs) == pytest.approx(
            row.topk(count).values.tolist(), abs=within
        )
        likelier = (row > row[entry.token_id]).sum()
        assert entry.rank == int(likelier) + 1 or within > 1e-3
        assert entry.rank > 0
        if within < 1e-3:
            assert list(entry.top_ids) == row.topk(count).indices.tolist()


@pytest.mark.parametrize("length", [1, 2, 17, 150])
def test_equal_those_of_transformers(length, tiny, monkeypatch):
    """In slices of odd sizes, and in chunks."""
    folder, model = tiny
    monkeypatch.setattr(runner, "_SCORED_ROWS", 13)
    monkeypatch.setattr(prompt_scores, "SLICE_ROWS", 3)
    tokens = prompt(length, seed=length)
    for budget in (256, 40):
        engine = make(folder, max_num_batched_tokens=budget)
        req = submit(engine, "r", tokens, prompt_logprobs=4, max_tokens=3)
        drain(engine)
        check(req.prompt_logprobs, model, tokens, 4)


def scores(folder: Path, *, alone: bool, **options) -> list[tuple[list[int], list[TokenLogprobs]]]:
    engine = make(folder, max_num_batched_tokens=33, **options)
    requests: list[Request] = []
    for round_ in range(2):  # the second round would find its prefixes cached
        for i, length in enumerate((40, 90, 128, 33)):
            asked = {"prompt_logprobs": i} if i != 3 else {}
            requests.append(
                submit(
                    engine,
                    f"{round_}-{i}",
                    prompt(length, seed=i),
                    logprobs=1,
                    max_tokens=40,
                    **asked,
                )
            )
            if alone:
                drain(engine)
        drain(engine)
    assert "max_model_len" not in options or engine.scheduler.preemptions > 0
    assert [len(r.prompt_logprobs) for r in requests] == [39, 89, 127, 0] * 2
    if alone:
        assert [r.cached_tokens for r in requests[4:]] == [0, 0, 0, 32], (
            "who asks for logits computes them"
        )
    return [(output(r), r.prompt_logprobs) for r in requests[:4]]


def test_do_not_depend_on_batch_cache_or_preemption(tiny):
    folder, _ = tiny
    reference = scores(folder, alone=True)
    assert scores(folder, alone=False) == reference
    few_blocks = {
        "kv_cache_memory_bytes": 14 * 16 * 3 * 2 * 2 * 64,
        "block_size": 16,
        "max_model_len": 180,
    }
    assert scores(folder, alone=False, **few_blocks) == reference
    assert (
        scores(folder, alone=False, speculative_config=SpeculativeConfig(3, prompt_lookup_min=1))
        == reference
    )


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gpu_in_bfloat16_is_close(architecture, tmp_path):
    """More rows than a step samples, in chunks, beside decodes."""
    model = make_tiny(architecture, tmp_path, **GPU_SIZES)
    engine = make(tmp_path, **ON_GPU, max_num_batched_tokens=60)
    plain = submit(engine, "plain", prompt(9), max_tokens=30)
    requests = [
        submit(engine, f"r{n}", prompt(n, seed=n), prompt_logprobs=n % 5) for n in (2, 33, 150)
    ]
    drain(engine)
    assert len(output(plain)) == 30
    for req in requests:
        check(
            req.prompt_logprobs,
            model,
            req.token_ids[: req.prompt_tokens],
            req.prompt_tokens % 5,
            within=0.15,
        )
