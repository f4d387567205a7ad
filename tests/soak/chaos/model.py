"""The models that chaos serves, as flags of a node.

Owns the tiny one: two layers that attend to every block.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["CONTEXT", "flags_of"]

CONTEXT = 4096

_LOUDER = 15
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "max_position_embeddings": CONTEXT,
}
_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def flags_of(model: str, folder: Path) -> list[str]:
    if model == "embedded":
        from kvrelay.machine import embedded_model

        return ["--model", str(embedded_model())]
    return ["--model", str(_tiny(folder / "tiny") if model == "tiny" else model)]


def _tiny(folder: Path) -> Path:
    from safetensors.torch import save_file
    from tokenizers.decoders import ByteLevel

    from kvrelay.openai_api.tokenizer_files import byte_tokenizer
    from kvrelay.paged_engine.before_loading import checked_model
    from kvrelay.paged_engine.model_files import dummy_tensors
    from kvrelay.wire.config import EngineConfig

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_TINY))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    config = EngineConfig(model=str(folder), load_format="dummy", device="cpu")
    tensors = {
        name: tensor * (1 if name.endswith("norm.weight") else _LOUDER)
        for name, tensor in dummy_tensors(checked_model(config, "cpu"))
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    backend = byte_tokenizer(folder / "config.json").backend
    backend.decoder = ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder
