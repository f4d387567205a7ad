"""Times of KV transfers between two processes of this host, by connector and size.

Between two GPUs if there are two, else within one; with several ranks the share of one, since they
read side by side. Measured is what a request waits for its KV (exposed) after a ticket of 10 ms.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from kvrelay.paged_engine.before_loading import (
    block_bytes,
    checked_model,
    choose_device,
    default_block_tokens,
    kv_dtype_name,
)
from kvrelay.paged_engine.sharding import shard_config
from kvrelay.profiling.transfer_pair import Pair, Part, open_pair
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import TransferError

__all__ = ["BlocksMoved", "transfer_times"]

CONNECTORS = ("direct", "nixl", "nccl")
_LEAD_S = 0.010
_WARM_UPS, _FEWEST, _MOST, _SIZE_S = 2, 3, 9, 0.5
# For all of it: processes that start, compilers, connectors that hang.
_PATIENCE_S = 300.0
# Of the largest transfer; the ends' pools are twice that.
_MOST_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}


class BlocksMoved:
    """A set of blocks to move: of which model, of which size, between which devices.

    Raises ConfigError for a model that cannot be served as configured.
    """

    def __init__(self, config: EngineConfig) -> None:
        device = choose_device(config.device)
        model = checked_model(config, device.type)
        dtype = kv_dtype_name(config, model, device.type)
        self.block_size = config.block_size or default_block_tokens(device.type)
        self.block_bytes = block_bytes(
            shard_config(model, config.tensor_parallel_size), self.block_size, dtype
        )
        self.most_blocks = max(1, _MOST_BYTES[device.type] // self.block_bytes)
        """More are not moved at once."""
        self.longest = config.max_model_len or model.max_position
        """Tokens of a context, unless the KV pool has less room."""
        other = min(1, torch.cuda.device_count() - 1)
        self.devices = ("cpu", "cpu") if device.type == "cpu" else ("cuda:0", f"cuda:{other}")


def transfer_times(
    of: BlocksMoved,
    sizes: Sequence[int],
    connector: str,
    seconds: float,
    told: Callable[[str], None],
) -> dict[str, dict[int, float]]:
    """Return median milliseconds by connector and number of blocks.

    `auto` tries all connectors. After `seconds` no further one is begun, and the one that runs does
    its shortest and longest size alone. `told` gets why one cannot be measured.
    """
    times: dict[str, dict[int, float]] = {}
    ends_at = time.monotonic() + seconds
    left = list(CONNECTORS) if connector == "auto" else [connector]
    if of.devices[0] == of.devices[1] and "nccl" in left:
        left.remove("nccl")
        told("nccl: its two ends need a GPU each")
    while left:
        kind = left.pop(0)
        if times and time.monotonic() > ends_at:
            told(f"{kind}: no time was left for it")
            continue
        try:
            # New processes only where one has broken: they take seconds to start.
            pool_bytes = 2 * max(sizes) * of.block_bytes
            with open_pair(
                of.devices, pool_bytes, of.block_bytes, time.monotonic() + _PATIENCE_S
            ) as pair:
                while kind:
                    pair.open(kind, of.block_bytes)
                    for blocks in sizes:
                        wanted = blocks in (sizes[0], sizes[-1]) or time.monotonic() < ends_at
                        if wanted and blocks < min(pair.num_blocks):
                            times.setdefault(kind, {})[blocks] = _median_ms(pair, blocks)
                    kind = left.pop(0) if left and time.monotonic() < ends_at else ""
        except TransferError as why:
            # With some sizes missing it would seem to be faster or slower than it is, and it is not
            # to be used.
            times.pop(kind, None)
            told(f"{kind}: {why.message}")
    return times


def _median_ms(pair: Pair, blocks: int) -> float:
    rng = random.Random(blocks)
    times: list[float] = []
    began = time.monotonic()
    for count in range(_WARM_UPS + _MOST):
        remote, local = (rng.sample(range(1, there), blocks) for there in pair.num_blocks)
        took = pair.hand_over([Part(remote, local)], _LEAD_S)
        if count >= _WARM_UPS:
            times.append(took.exposed_s * 1e3)
        if len(times) >= _FEWEST and time.monotonic() - began > _SIZE_S:
            break
    return statistics.median(times)
