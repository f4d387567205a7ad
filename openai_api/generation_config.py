"""The sampling of requests that leave it to the model: generation_config.json, and what the command line puts above it.

Owns where it comes from and that it is valid. Which requests have it, openai_api/body.py says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from openai_api.folder_tokenizer import read_object
from wire.config import EngineConfig
from wire.errors import ConfigError, RequestError
from wire.sampling import GENERATION_FIELDS, SamplingDefaults, SamplingParams

__all__ = ["sampling_defaults"]

_FILE = "generation_config.json"
# What a model's card recommends and its files do not say. Without it, SmolLM2 talks until its context is full.
_FROM_CARDS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512}
}


def sampling_defaults(config: EngineConfig, name: str = "") -> SamplingDefaults:
    """The defaults of the model at a path, which is called `name`.

    As in vLLM, max_new_tokens of the model is a default, and one that an operator chose a limit. Raises ConfigError
    naming file, field and value.
    """
    source = config.generation_config
    if source == "auto":
        path = Path(config.model).expanduser()
        file = (path if path.is_dir() else path.parent) / _FILE
        found = _FROM_CARDS.get(name, {}) | ({} if path.suffix == ".gguf" else _sampling(read_object(file), str(file)))
    elif source == "vllm":
        found = {}
    else:
        file = Path(source).expanduser() / _FILE
        if not file.exists():
            raise ConfigError(f"generation_config must be auto, vllm or a folder with a {_FILE}, got {source!r}")
        found = _sampling(read_object(file), str(file))
    chosen = _sampling(config.override_generation_config or {}, "override_generation_config")
    limit = (chosen if source == "auto" else found | chosen).get("max_new_tokens")
    found |= chosen
    return SamplingDefaults(max_tokens=found.pop("max_new_tokens", None), limit=limit, **found)


def _sampling(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Those of the values that decide how is sampled, by the rules for requests."""
    found = {field: values[field] for field in GENERATION_FIELDS if values.get(field) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    own = dict(found)
    max_tokens = own.pop("max_new_tokens", 1)
    try:
        msgspec.convert({**own, "max_tokens": max_tokens}, SamplingDefaults)
        SamplingParams(max_tokens=max_tokens, seed=0, **own).check(1)
    except (msgspec.ValidationError, RequestError) as why:
        said = str(why).replace("max_tokens", "max_new_tokens")
        raise ConfigError(f"{where}: {said}; mend it, or leave it out with --generation-config vllm") from why
    return found
