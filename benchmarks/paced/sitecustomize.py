"""Has the engine processes below take as long for each step as a rate card says, whatever their
model.

For `python -m benchmarks.reality --paced`, which puts this folder into PYTHONPATH: Python imports a
module of this name at its start. In all other processes it does nothing. The model is computed,
too, and the rest of the time is slept.
"""

from __future__ import annotations

import os
import sys

CARD = "KVRELAY_BENCH_CARD"


def pace(card_file: str) -> None:
    """From now on."""
    import time
    from collections.abc import Sequence
    from pathlib import Path

    from kvrelay.paged_engine.runner import CpuRunner, Launched
    from kvrelay.paged_engine.step_plan import Chunk
    from kvrelay.planner.rate_card import read_card
    from kvrelay.planner.speeds import Speeds

    speeds, launch = Speeds(read_card(Path(card_file))), CpuRunner.launch

    def step_ms(chunks: Sequence[Chunk]) -> float:
        pieces = [(each.count, each.start) for each in chunks if each.count > 1]
        contexts = [each.start + 1 for each in chunks if each.count == 1]
        if not contexts:
            return speeds.chunk_ms(pieces)
        running = len(contexts), sum(contexts)
        return speeds.mixed_ms(*running, pieces) if pieces else speeds.step_ms(*running)

    def paced(self: CpuRunner, chunks: Sequence[Chunk]) -> Launched:
        until = time.monotonic() + step_ms(chunks) / 1e3
        launched = launch(self, chunks)
        time.sleep(max(0.0, until - time.monotonic()))
        return launched

    CpuRunner.launch = paced  # type: ignore[method-assign]


if CARD in os.environ and any("kvrelay.node.engine_process" in word for word in sys.orig_argv):
    pace(os.environ[CARD])
