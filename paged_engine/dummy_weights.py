"""Random weights of the right shapes, for speed tests without a checkpoint. Equal on every CPU."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import torch

from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_tensors import tensor_shapes

__all__ = ["dummy_tensors"]

_POOL = 4_194_301
_STD = 0.02


def dummy_tensors(
    config: ModelConfig, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the config's dtype: std 0.02, norms around 1.

    A function of names and shapes alone. Values are cut from one random pool: seconds, not minutes.
    """
    values = _pool()
    dtype: torch.dtype = getattr(torch, config.dtype)
    weights, norms = values.to(dtype).to(device), (1 + values).to(dtype).to(device)
    for name, shape in tensor_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        _fill(tensor.view(-1), norms if name.endswith("norm.weight") else weights, _start(name))
        yield name, tensor


def _pool() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    limit = 1 << 16
    total = torch.zeros(_POOL, dtype=torch.int32)
    for _ in range(4):
        total += torch.randint(limit, (_POOL,), generator=generator, dtype=torch.int32)
    std = limit * (4 / 12) ** 0.5
    values: torch.Tensor = (total - 2 * (limit - 1)).to(torch.float32) * (_STD / std)
    return values


def _start(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") % _POOL


def _fill(flat: torch.Tensor, pool: torch.Tensor, start: int) -> None:
    done = 0
    while done < flat.numel():
        piece = pool[start : start + flat.numel() - done]
        flat[done : done + piece.numel()] = piece
        done, start = done + piece.numel(), 0
