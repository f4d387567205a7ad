"""Profiles of a serving engine, with the names of vLLM's `--profiler-config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from kvrelay.wire.config_checks import check_fields, require

__all__ = ["ProfilerConfig"]


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """A profile that POST /start_profile starts on a node."""

    profiler: Literal["torch", "cuda"] = "torch"
    """torch writes a trace for each rank; cuda marks the range for the profiler that started the
    node.
    """
    torch_profiler_dir: str = ""
    """Folder for the traces, an absolute path."""
    torch_profiler_with_stack: bool = True
    """Record the call stack of each operation."""
    torch_profiler_with_flops: bool = False
    """Count the floating-point operations."""
    torch_profiler_use_gzip: bool = True
    """Compress the traces."""
    torch_profiler_record_shapes: bool = False
    """Record the shapes of tensors."""
    torch_profiler_with_memory: bool = False
    """Record allocations."""
    max_iterations: Annotated[int, Meta(ge=0)] = 1000
    """Steps after which a profile ends by itself; 0 sets no limit, and may fill the memory or hold
    the engine up until routers take the node for dead.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        folder = self.torch_profiler_dir
        require(
            folder.startswith("/") if self.profiler == "torch" else not folder,
            f"torch_profiler_dir must be an absolute path with torch, and left out with cuda; got "
            f"{folder!r}",
        )
