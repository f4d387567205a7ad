"""Python itself loads this in each process that has the folder in its PYTHONPATH: an engine process
whose GPU can fail.

It does when the file named by GPU_FAULT appears, in the place that the file names: `step` or
`plane`. From then on the end of the interpreter hangs, as CUDA's teardown may; with `stuck` in the
file even leaving at once does. With `real` in the file a GPU does fail: a kernel reads outside of
its tensor, and every later call says so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MESSAGE = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be incorrect."""

if any("kvrelay.node.engine_process" in word for word in sys.orig_argv):
    import atexit
    import time
    from typing import Any

    import torch

    from kvrelay.kv_transfer.backend import BackendThread
    from kvrelay.paged_engine.engine import Engine

    trigger = Path(os.environ["GPU_FAULT"])

    def told(place: str) -> str:
        """What the file says of this place, to one thread of all that look."""
        try:
            said = trigger.read_text()
            if place not in said:
                return ""
            trigger.unlink()
        except FileNotFoundError:
            return ""
        return said

    def failing(place: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if asked := told(place):
                atexit.register(time.sleep, 600)
                if "stuck" in asked:
                    os._exit = time.sleep  # type: ignore[assignment]
                if "real" in asked:
                    torch.zeros(1, device="cuda")[torch.full((1,), 1 << 20, device="cuda")]
                    return real(*arguments, **options)
                raise torch.AcceleratorError(MESSAGE)
            return real(*arguments, **options)

        return call

    Engine.step = failing("step", Engine.step)  # type: ignore[method-assign]
    BackendThread._turn = failing("plane", BackendThread._turn)  # type: ignore[method-assign]
