"""Times GPU work: captured in a CUDA graph, so that launches cost what they cost in the engine, on
rotating inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Row", "median_us"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of `python -m benchmarks.kernels`."""

    kernel: str
    work: str
    """Shapes and dtypes, for example `b32 x 1k, H32/8 D128 bf16, block 64`."""
    us: float
    """Median time of one call in microseconds."""
    bytes_moved: float = 0.0
    """The fewest bytes the work must read and write in device memory; 0 where arithmetic is the
    limit.
    """
    flop: float = 0.0
    """Floating-point operations that the work needs; 0 where memory is the limit."""
    config: str = ""
    """Tile shapes and launch options, if the row is one of a sweep."""

    def __str__(self) -> str:
        rate = f"{self.bytes_moved / self.us * 1e-6:7.3f} TB/s" if self.bytes_moved else ""
        rate += f"{self.flop / self.us * 1e-6:7.1f} TFLOP/s" if self.flop else ""
        return f"{self.kernel:<18} {self.work:<52} {self.us:10.2f} us  {rate:<18} {self.config}"


def median_us(
    calls: Sequence[Callable[[], object]], *, replays: int = 7, min_ms: float = 2.0
) -> float:
    """Median time of one call in microseconds.

    `calls` do equal work on different inputs; together these should exceed the L2 cache several
    times. They are run once to compile, captured one after the other (repeated until a graph takes
    about `min_ms`), and the graph is replayed.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = 1
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        took = [_replay_ms(graph) for _ in range(2)][-1]
        if took >= min_ms or rounds >= 64:
            break
        rounds = min(64, max(rounds + 1, int(rounds * min_ms * 1.3 / max(took, 1e-3))))
    times = [_replay_ms(graph) for _ in range(replays)]
    return statistics.median(times) * 1e3 / (rounds * len(calls))


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
