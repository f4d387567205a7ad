"""Tensor parallelism: what each rank holds of a model. Pure; never imports torch.

Source: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["kv_head_range", "shard", "shard_config", "shard_weights", "vocab_shard"]

# Layers whose outputs or inputs are cut; rank 0 adds the latter's biases.
_KEY_ROWS = (".k_proj", ".v_proj")
_OTHER_ROWS = (".q_proj", ".gate_proj", ".up_proj")
_COLUMNS = (".o_proj", ".down_proj")


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the sizes of one of `size` ranks. Raises ConfigError if heads do not divide evenly.

    Several ranks hold the same KV head if there are fewer.
    """
    if size == 1:
        return config
    counts = [("query heads", config.num_heads), ("MLP columns", config.intermediate_size)]
    if config.moe is not None:
        counts.append(("columns of an expert", config.moe.intermediate_size))
    for what, count in counts:
        if count % size:
            raise ConfigError(
                f"{count} {what} cannot be shared by {size} ranks; choose a divisor of {count}"
            )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ConfigError(
            f"{config.num_kv_heads} KV heads cannot be shared by {size} ranks; choose a divisor "
            f"or a multiple"
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        moe=config.moe
        and replace(config.moe, intermediate_size=config.moe.intermediate_size // size),
    )


def shard_weights(
    weights: Iterable[tuple[str, torch.Tensor]], config: ModelConfig, rank: int, size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        yield name, shard(name, weight, config, rank, size)


def kv_head_range(num_kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    first = rank * num_kv_heads // size
    return first, first + max(1, num_kv_heads // size)


def vocab_shard(vocab_size: int, rank: int, size: int) -> slice:
    rows = -(-vocab_size // size)
    return slice(rank * rows, min((rank + 1) * rows, vocab_size))


def shard(
    name: str, weight: torch.Tensor, config: ModelConfig, rank: int, size: int
) -> torch.Tensor:
    if size == 1:
        return weight
    layer, _, kind = name.rpartition(".")
    if layer.endswith(_OTHER_ROWS):
        return weight.chunk(size, dim=0)[rank]
    if layer.endswith(_KEY_ROWS):
        heads = weight.reshape(config.num_kv_heads, config.head_dim, *weight.shape[1:])
        first, end = kv_head_range(config.num_kv_heads, rank, size)
        return heads[first:end].flatten(0, 1)
    if layer.endswith(_COLUMNS) and kind == "weight":
        return weight.chunk(size, dim=1)[rank]
    if layer.endswith(_COLUMNS) and kind == "bias" and rank:
        return weight.new_zeros(weight.shape)
    return weight
