"""Sampling that a request leaves out: where it comes from, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.openai_api.generation_config import sampling_defaults
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.sampling import PLAIN_SAMPLING, SamplingDefaults

QWEN = {
    "do_sample": True,
    "eos_token_id": [1, 2],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
}


def folder(path: Path, content: object) -> str:
    path.mkdir()
    (path / "generation_config.json").write_text(json.dumps(content))
    return str(path)


def defaults(
    model: str, source: str = "auto", override: dict[str, Any] | None = None, name: str = ""
) -> Any:
    return sampling_defaults(
        EngineConfig(model, generation_config=source, override_generation_config=override),
        name=name,
    )


def test_they_are_those_of_the_model(tmp_path: Path) -> None:
    model = folder(tmp_path / "qwen", QWEN | {"max_new_tokens": 9, "repetition_penalty": 1})
    wanted = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_tokens=9)
    assert defaults(model) == defaults(f"{model}/config.json") == wanted
    assert defaults(model, "vllm") == defaults(f"{model}/a.gguf") == PLAIN_SAMPLING
    (tmp_path / "none").mkdir()
    assert defaults(str(tmp_path / "none")) == PLAIN_SAMPLING


def test_the_embedded_model_has_what_its_card_recommends(tmp_path: Path) -> None:
    name, gguf = "SmolLM2-135M-Instruct", str(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    wanted = SamplingDefaults(temperature=0.2, top_p=0.9, max_tokens=512)
    assert defaults(gguf, name=name) == wanted
    assert defaults(gguf, "vllm", name=name) == PLAIN_SAMPLING
    assert defaults(folder(tmp_path / "own", {"top_p": 0.5}), name=name).top_p == 0.5


def test_a_folder_replaces_the_models_and_an_override_goes_before_both(tmp_path: Path) -> None:
    model, other = (
        folder(tmp_path / "m", QWEN),
        folder(tmp_path / "o", {"top_k": -1, "max_new_tokens": 7}),
    )
    assert defaults(model, other) == SamplingDefaults(max_tokens=7, limit=7)
    assert defaults(model, other, {"max_new_tokens": 3}) == SamplingDefaults(max_tokens=3, limit=3)
    assert defaults(model, "auto", {"top_p": 0.5}) == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.5
    )
    assert defaults(model, "vllm", {"max_new_tokens": 3}) == SamplingDefaults(max_tokens=3, limit=3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"top_p": 1.5}, "top_p must be at most 1.0, got 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_the_remedy(
    content: Any, said: str, tmp_path: Path
) -> None:
    model = folder(tmp_path / "m", content)
    with pytest.raises(ConfigError) as refused:
        defaults(model)
    assert refused.value.message.startswith(f"{model}/generation_config.json: ")
    assert said in refused.value.message
    assert refused.value.message.endswith("leave it out with --generation-config vllm")
    with pytest.raises(ConfigError, match=r"^override_generation_config: "):
        defaults(model, "vllm", content)


def test_a_folder_without_the_file_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"auto, vllm or a folder with a generation_config.json, got 'none'"
    ):
        defaults(str(tmp_path), "none")
    with pytest.raises(ConfigError, match=r"cannot set 'eos_token_id', only temperature, top_p"):
        EngineConfig("m", override_generation_config={"eos_token_id": 3})
