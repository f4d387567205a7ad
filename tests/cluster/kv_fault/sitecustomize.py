"""Python itself loads this in each process that has the folder in its PYTHONPATH: an engine process
that reads wrongly.

When the file named by KV_FAULT appears the next READ of the direct plane ends with other bytes in
one block than its source has, in the way that the file names, and the file goes: `flipped` (a bit),
`shifted` (by a word), `stale` (what the pool had there before).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if any("kvrelay.node.engine_process" in word for word in sys.orig_argv):
    from typing import Any

    from kvrelay.kv_transfer.direct import DirectBackend

    trigger = Path(os.environ["KV_FAULT"])
    post_read, poll = DirectBackend.post_read, DirectBackend.poll
    before: dict[int, tuple[Any, Any]] = {}

    def post(plane: Any, source: Any, remote_blocks: Any, local_blocks: Any) -> Any:
        size, last = plane._region.block_bytes, local_blocks[-1]
        block = plane._side._local[last * size : (last + 1) * size]
        handle = post_read(plane, source, remote_blocks, local_blocks)
        before[id(handle)] = block, block.copy()
        return handle

    def look(plane: Any, handle: Any) -> bool:
        if not poll(plane, handle):
            return False
        block, content = before.pop(id(handle))
        if trigger.exists():
            how = trigger.read_text()
            if how == "flipped":
                block[len(block) // 2] ^= 4
            elif how == "shifted":
                block[8:] = block[:-8].copy()
            else:
                block[:] = content
            trigger.unlink()
        return True

    DirectBackend.post_read = post  # type: ignore[assignment, method-assign]
    DirectBackend.poll = look  # type: ignore[method-assign]
