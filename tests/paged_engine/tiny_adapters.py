"""Small random LoRA adapters in PEFT's layout, and the models that one gets by merging them by
hand.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvrelay.paged_engine.model_files import read_model_config
from kvrelay.paged_engine.model_tensors import tensor_shapes

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = ALL,
    **fields: Any,
) -> Path:
    """Write an adapter for the linear layers of the model `base` whose names end so, large enough
    to change text.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    shapes = tensor_shapes(read_model_config(str(base), "dummy"))
    for name, shape in sorted(shapes.items()):
        module = name.removesuffix(".weight")
        if module.endswith(targets) and ".layers." in module and len(shape) == 2:
            rows, columns = shape
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = (
                torch.randn(rank, columns, generator=generator) / columns**0.5
            )
            tensors[f"{key}.lora_B.weight"] = (
                torch.randn(rows, rank, generator=generator) * 0.4 / rank
            )
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "someone/tiny",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def merged(folder: Path, base: Path, adapter: Path, scale: float) -> Path:
    """A checkpoint with W + scale * B A in place of each W that the adapter is for."""
    shutil.copytree(base, folder)
    weights, matrices = (
        load_file(base / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for key, a in matrices.items():
        if key.endswith("lora_A.weight"):
            name = key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            weights[name] = weights[name] + scale * matrices[key.replace("lora_A", "lora_B")] @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
