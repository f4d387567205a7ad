"""The class LLM and a batch with an engine of its own: a real engine process with the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay import LLM, SamplingParams
from kvrelay.wire.errors import ConfigError, KvrelayError, RequestError
from tests.cluster.real_cluster import tiny_model

pytestmark = pytest.mark.cluster

SETTINGS = {"load_format": "dummy", "device": "cpu", "threads": 1, "kv_cache_memory_bytes": 8 << 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("llm"))[1]


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as made:
        yield made


def test_prompts_are_answered_in_their_order(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    together = llm.generate(prompts, greedy)
    assert [answer.prompt for answer in together] == prompts
    for prompt, answer in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, greedy)
        assert alone.outputs == answer.outputs
        assert len(alone.outputs[0].token_ids) == 5
        assert alone.outputs[0].finish_reason == "length"
        (by_ids,) = llm.generate(answer.prompt_token_ids, greedy)
        assert (by_ids.prompt, by_ids.outputs) == (None, answer.outputs)
    ids = [answer.prompt_token_ids for answer in together[:2]]
    assert llm.generate(ids, greedy)[1].outputs == together[1].outputs
    assert llm.generate([], greedy) == []


def test_several_choices_differ_and_are_the_same_on_every_run(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=3, max_tokens=6, ignore_eos=True)
    (answer,) = llm.generate("a", params)
    assert len(answer.outputs) == 3
    assert len({tuple(output.token_ids) for output in answer.outputs}) == 3
    assert llm.generate("a", params)[0].outputs == answer.outputs


def test_conversations_go_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (one,) = llm.chat(messages, params)
    two = llm.chat([messages, [{"role": "user", "content": "other"}]], params)
    assert two[0].outputs == one.outputs
    assert two[0].prompt_token_ids != two[1].prompt_token_ids


def test_without_params_the_models_own_sampling_counts_and_with_params_theirs(model: str) -> None:
    own = {"temperature": 0, "max_new_tokens": 3}
    with LLM(model, **SETTINGS, override_generation_config=own) as llm:
        greedy = llm.generate("a", SamplingParams(temperature=0, max_tokens=3))[0].outputs
        assert [llm.generate("a")[0].outputs for _ in range(3)] == [greedy] * 3
        drawn = {
            tuple(llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].token_ids)
            for _ in range(8)
        }
        assert len(drawn) > 1


def test_what_is_wrong_is_said_and_the_rest_goes_on(llm: LLM, model: str) -> None:
    with pytest.raises(RequestError, match="top_p"):
        llm.generate(["a", "b"], SamplingParams(top_p=2))
    with pytest.raises(RequestError, match="did you mean max_tokens"):
        SamplingParams(max_token=2)
    with pytest.raises(RequestError, match="no sampling parameter 'logprobs'"):
        SamplingParams(logprobs=5)
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM(model, max_model_length=3)
    with pytest.raises(ConfigError, match="max_model_len must be a whole number"):
        LLM(model, max_model_len="long")
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].outputs


async def test_it_works_inside_an_event_loop(llm: LLM) -> None:
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].outputs


def test_a_closed_one_says_so(model: str) -> None:
    made = LLM(model, **SETTINGS)
    made.close()
    made.close()
    with pytest.raises(KvrelayError, match="closed"):
        made.generate("a")


def test_a_model_that_cannot_be_loaded_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KvrelayError):
        LLM(str(tmp_path), **SETTINGS)
