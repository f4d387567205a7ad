"""A child's tie to its parent: it dies when `kvrelay up` does, even by kill -9.

Owns the one system call for it (Linux). The parent asks for it with an environment variable,
because nothing may run between fork and exec in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["PARENT_PID", "die_with_parent"]

PARENT_PID = "KVRELAY_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """If a parent asked for it: have the kernel kill this process when that parent ends. Call it
    first of all.

    SIGKILL and not SIGTERM, because nobody is left who could end a child that does not listen.
    """
    asked = os.environ.pop(
        PARENT_PID, None
    )  # taken away, so that our own children are not tied to our parent
    if asked is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(asked):  # it died before the line above
        os._exit(1)
