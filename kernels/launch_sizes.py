"""Whole-number arithmetic of launchers.

triton.cdiv and triton.next_power_of_2 take 6 us each on the host; a step without a graph, with its
300 launches, would spend milliseconds in them.
"""

from __future__ import annotations

__all__ = ["cdiv", "power_of_2"]


def cdiv(number: int, of: int) -> int:
    """How many pieces of `of` hold `number`."""
    return -(-number // of)


def power_of_2(number: int) -> int:
    """The least power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
