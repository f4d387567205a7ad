"""An engine opened to be measured, in this process and set up as its node would have it."""

from __future__ import annotations

import contextlib
import gc
import platform
from collections.abc import Iterator

import torch

from kvrelay.node.ranks import join_as_rank_0
from kvrelay.paged_engine.engine import Engine
from kvrelay.wire.config import EngineConfig

__all__ = ["hardware_of", "measured_engine"]


@contextlib.contextmanager
def measured_engine(config: EngineConfig) -> Iterator[Engine]:
    """Open an engine for the length of the block. Raises ConfigError."""
    engine = Engine(config, join_as_rank_0(config))
    gc.freeze()  # as in a node's own process (node/process.py)
    try:
        yield engine
    finally:
        gc.unfreeze()
        engine.close()


def hardware_of(device: torch.device) -> str:
    """Return a device's name, for a CPU with the threads that compute on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()
