"""How a process of ours ends: without teardown, and on an error with one sentence that says why;
how others ended.

A CUDA error is *sticky*: every later call on that GPU fails in this process, and what CUDA and its
libraries do when the interpreter ends may wait for the GPU forever. So the process leaves at once;
whoever watches it starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
from typing import NoReturn

from kvrelay.wire.errors import KvrelayError

__all__ = ["fate_of", "leave", "sentence"]

# torch (AcceleratorError and what NCCL says), our own calls of the runtime, Triton's launcher,
# cuBLAS.
_STICKY = re.compile(
    r"CUDA error|\bcuda[A-Z]\w+ failed|Triton Error \[CUDA\]|CUBLAS_STATUS_\w+", re.IGNORECASE
)


def sentence(why: BaseException) -> str:
    """Why the process ends, in one sentence; of a GPU that has failed, however deep in the chain of
    causes.
    """
    if isinstance(why, KvrelayError):
        return why.message
    cause: BaseException | None = why
    failure = None
    while cause is not None:
        if _STICKY.search(str(cause)):
            failure = _first_line(cause)
        cause = cause.__cause__ or cause.__context__
    if failure is None:
        return _first_line(why)
    return (
        f"the GPU has failed in this process ({failure}); only a new process can use it again, "
        f"so this one ends"
    )


def fate_of(code: int) -> str:
    """Say in few words how another process ended, by its exit code or, where that is negative, its
    signal.

    Nobody but the kernel sends SIGKILL to a process that we have not given up.
    """
    if code == -signal.SIGKILL:
        return "killed, probably out of memory"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def leave(code: int) -> NoReturn:
    """End the process now, with nothing but its output written out: no atexit, no destructors, no
    wait for threads.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _first_line(why: BaseException) -> str:
    return str(why).partition("\n")[0].strip() or type(why).__name__
