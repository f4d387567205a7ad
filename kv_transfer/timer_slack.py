"""How exactly a thread wakes that sleeps for microseconds. Owns one call to Linux; elsewhere
nothing happens.

Why threads that wait for a GPU sleep at all, instead of asking again and again: between two
questions a thread gives up the GIL for so short a time that no other one gets it, and the step loop
would get it only every 5 ms.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["wake_in_time"]

_PR_SET_TIMERSLACK, _NANOSECONDS = 29, 1000


def wake_in_time() -> None:
    """From here on this thread sleeps 1 us longer than it asks for, not 50 as is Linux's habit."""
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _NANOSECONDS, 0, 0, 0)
