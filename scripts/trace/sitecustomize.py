"""Python loads this in every process of a traced cluster: it notes which of our files run.

Code counts while the file that TRACE_ON names exists.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from pathlib import Path
from types import CodeType, FrameType

_LOOK_S = 0.02
on, folder, root = (
    Path(os.environ["TRACE_ON"]),
    Path(os.environ["TRACE_TO"]),
    os.environ["TRACE_OF"],
)
seen: set[CodeType] = set()
active = False


def note(frame: FrameType, event: str, _: object) -> None:
    if active and event == "call":
        seen.add(frame.f_code)


def watch() -> None:
    global active
    while True:
        time.sleep(_LOOK_S)
        if active and not on.exists():
            active = False
            ran: dict[str, bool] = {}
            for code in seen:
                name = os.path.realpath(code.co_filename)
                if name.startswith(root):
                    waits = bool(code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR))
                    ran[name] = ran.get(name, False) or waits
            seen.clear()
            lines = [f"{name.removeprefix(root)}{' *' * waits}\n" for name, waits in ran.items()]
            (folder / f"{os.getpid()}.new").write_text("".join(lines))
            (folder / f"{os.getpid()}.new").rename(folder / f"{os.getpid()}")
        elif not active and on.exists():
            active = True


threading.setprofile(note)
sys.setprofile(note)
threading.Thread(target=watch, name="trace", daemon=True).start()
