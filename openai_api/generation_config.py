"""A model's sampling defaults: generation_config.json and overrides."""

from __future__ import annotations

from pathlib import Path

from kvrelay.openai_api.tokenizer_files import read_object
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.json_object import JsonObject
from kvrelay.wire.sampling import SamplingDefaults, generation_values

__all__ = ["sampling_defaults"]

_FILE = "generation_config.json"
# What a model's card recommends and its files do not say. Without it, SmolLM2 talks until its
# context is full.
_FROM_CARDS: dict[str, JsonObject] = {
    "SmolLM2-135M-Instruct": {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512}
}


def sampling_defaults(config: EngineConfig, name: str = "") -> SamplingDefaults:
    """Return a model's defaults. Raises ConfigError.

    As in vLLM, the model's max_new_tokens is a default, an operator's a limit.
    """
    source = config.generation_config
    if source == "auto":
        path = Path(config.model).expanduser()
        file = (path if path.is_dir() else path.parent) / _FILE
        found = _FROM_CARDS.get(name, {}) | ({} if path.suffix == ".gguf" else _sampling(file))
    elif source == "vllm":
        found = {}
    else:
        file = Path(source).expanduser() / _FILE
        if not file.exists():
            raise ConfigError(
                f"generation_config must be auto, vllm or a folder with a {_FILE}, got {source!r}"
            )
        found = _sampling(file)
    chosen = generation_values(config.override_generation_config or {})
    limit = (chosen if source == "auto" else found | chosen).get("max_new_tokens")
    found |= chosen
    return SamplingDefaults(max_tokens=found.pop("max_new_tokens", None), limit=limit, **found)


def _sampling(file: Path) -> JsonObject:
    return generation_values(
        read_object(file), str(file), "mend it, or leave it out with --generation-config vllm"
    )
