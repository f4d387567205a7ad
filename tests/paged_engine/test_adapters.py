"""LoRA adapters on the CPU: equal to merged weights, in any company; their slots; whose KV is
whose.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import drain, make, prompt
from tiny_adapters import make_adapter, merged
from tiny_models import make_tiny

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.wire.config import SpeculativeConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.sampling import SamplingParams

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Phi3ForCausalLM",
)
SPELLED = {
    "Phi3ForCausalLM": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny("LlamaForCausalLM", folder)
    return folder


@pytest.fixture(scope="module")
def two(base, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    one = make_adapter(folder / "one", base, seed=1)
    return one, make_adapter(
        folder / "two", base, seed=2, rank=7, targets=("q_proj", "v_proj", "down_proj")
    )


def with_two(base: Path, two: tuple[Path, Path], **options) -> Engine:
    return make(base, enable_lora=True, lora_modules=(f"one={two[0]}", f"two={two[1]}"), **options)


def ask(engine: Engine, name: str, tokens: list[int], adapter: str = "", **params) -> Request:
    defaults = {"max_tokens": 16, "seed": 5, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    return add(engine, Submit(name, tokens, SamplingParams(**(defaults | params)), adapter=adapter))


def add(engine: Engine, submit: Submit) -> Request:
    req = engine.request(submit, 0.0)
    engine.scheduler.add(req)
    return req


def answer(req: Request) -> tuple[list[int], list[float]]:
    return req.token_ids[req.prompt_tokens :], [each.logprob for each in req.new_logprobs]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_answers_as_the_merged_model_does(architecture, tmp_path):
    base = tmp_path / "base"
    make_tiny(architecture, base)
    targets = {"targets": SPELLED[architecture]} if architecture in SPELLED else {}
    adapter = make_adapter(tmp_path / "adapter", base, seed=3, rank=5, alpha=10, **targets)
    ours, theirs = (
        make(base, enable_lora=True, lora_modules=(f"a={adapter}",)),
        make(merged(tmp_path / "merged", base, adapter, 2.0)),
    )
    for length in (1, 17, 90):
        tokens = prompt(length, seed=length)
        mine, wanted = ask(ours, "a", tokens, "a"), ask(theirs, "m", tokens)
        plain = ask(ours, "b", tokens)
        drain(ours)
        drain(theirs)
        assert answer(mine)[0] == answer(wanted)[0]
        assert answer(mine)[1] == pytest.approx(answer(wanted)[1], abs=2e-3)
        assert answer(mine)[1] != pytest.approx(answer(plain)[1], abs=2e-2)


def test_a_mixed_batch_gives_each_request_the_bits_that_it_has_alone(base, two):
    prompts = [prompt(length, seed=length) for length in (3, 40, 90, 128, 33, 2)]
    names = ("", "one", "two", "one", "", "two")

    def answers(alone: bool) -> list[tuple[list[int], list[float]]]:
        engine, found = with_two(base, two, enable_prefix_caching=False), []
        for i, (tokens, name) in enumerate(zip(prompts, names, strict=True)):
            found.append(ask(engine, f"r{i}", tokens, name, temperature=0.8 * (i % 2)))
            if alone:
                drain(engine)
        drain(engine)
        return [answer(req) for req in found]

    together = answers(alone=False)
    assert together == answers(alone=True)
    base_alone = make(base, enable_lora=True, max_loras=1)
    plain = ask(base_alone, "r", prompts[0])
    drain(base_alone)
    assert answer(plain) == together[0]


def test_proposed_and_scored_rows_take_the_adapter_of_their_request(base, two):
    tokens, names = prompt(5) * 9, ("", "one", "two")

    def answers(alone: bool, **options) -> list[tuple[tuple[list[int], list[float]], list[float]]]:
        engine, found = with_two(base, two, max_num_batched_tokens=64, **options), []
        for name in names:
            found.append(ask(engine, f"r{name}", tokens, name, max_tokens=60, prompt_logprobs=0))
            if alone:
                drain(engine)
        drain(engine)
        assert bool(engine.scheduler.speculation.accepted_tokens) == bool(options)
        return [(answer(req), [each.logprob for each in req.prompt_logprobs]) for req in found]

    told = answers(alone=True)
    assert (
        answers(alone=False, speculative_config=SpeculativeConfig(4, prompt_lookup_min=1)) == told
    )
    assert len({tuple(scores) for _, scores in told}) == 3


def test_no_kv_is_shared_between_adapters(base, two, tmp_path):
    engine, tokens = with_two(base, two), prompt(70)
    for name in ("", "one", "two"):
        fresh = ask(engine, f"{name} first", tokens, name)
        drain(engine)
        again = ask(engine, f"{name} again", tokens, name)
        drain(engine)
        assert (fresh.cached_tokens, again.cached_tokens) == (0, 64)
        assert answer(again) == answer(fresh)
    # A salt that spells an adapter's identity is a salt.
    assert engine.adapters is not None
    identity = engine.adapters.named("one").identity
    salted = Submit("salted", tokens, SamplingParams(1, seed=0), cache_salt=identity)
    req = add(engine, salted)
    drain(engine)
    assert req.cached_tokens == 0
    # The same name with other content is another adapter.
    other = make(base, enable_lora=True, lora_modules=(f"one={two[1]}",))
    assert other.adapters is not None
    assert other.adapters.named("one").identity != identity


def test_loaded_and_unloaded_while_requests_run(base, two):
    engine = make(base, max_loras=1, enable_lora=True, allow_runtime_lora=True)
    adapters, live = engine.adapters, engine.scheduler.live
    assert adapters is not None
    plain = ask(engine, "plain", prompt(40), max_tokens=60)
    adapters.load("x", str(two[0]), in_place=False)
    with pytest.raises(ConfigError, match="loaded already"):
        adapters.load("x", str(two[0]), in_place=False)
    with pytest.raises(ConfigError, match="max_loras is 1"):
        adapters.load("y", str(two[1]), in_place=False)
    old = ask(engine, "old", prompt(40), "x")
    engine.step()
    adapters.load("x", str(two[1]), in_place=True)
    new = ask(engine, "new", prompt(40), "x")
    with pytest.raises(ConfigError, match="still run"):
        adapters.load("x", str(two[0]), in_place=True)
    adapters.free_unused(live)
    assert adapters._ending
    adapters.retire("x")
    with pytest.raises(LookupError, match="not loaded"):
        ask(engine, "late", prompt(4), "x")
    drain(engine)
    adapters.free_unused(live)
    assert not adapters._ending
    assert sorted(adapters._free) == [0, 1]
    reference = with_two(base, two)
    for req, name in ((old, "one"), (new, "two"), (plain, "")):
        same = ask(reference, req.request_id, prompt(40), name, max_tokens=req.output_tokens)
        drain(reference)
        assert answer(same)[0] == answer(req)[0]


@pytest.mark.parametrize("error", [None, MemoryError, RuntimeError, RecursionError])
def test_an_adapter_that_one_rank_cannot_read_or_prepare_is_on_none(base, two, monkeypatch, error):
    """None: another rank has not read it."""
    heard = []

    def prepare(adapter):
        raise error("no room")

    def compare(facts):
        heard.append(facts)
        if error is None:
            raise ConfigError("the ranks differ")

    engine = make(base, enable_lora=True, allow_runtime_lora=True)
    adapters = engine.adapters
    assert adapters is not None
    with monkeypatch.context() as patch:
        if error is not None:
            patch.setattr(adapters._store, "prepare", prepare)
        patch.setattr(adapters._ranks, "require_equal", compare)
        with pytest.raises(ConfigError, match=r"no room|the ranks differ"):
            adapters.load("x", str(two[0]), in_place=False)
    assert adapters.loaded == []
    digest = adapters.load("x", str(two[0]), in_place=False).digest
    # The other ranks are told.
    assert heard == [{f"adapter {two[0]}": "" if error else digest}]
