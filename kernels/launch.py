"""Helpers of all launchers: arithmetic, properties of the device, dependent launch.

triton.cdiv and triton.next_power_of_2 take 6 us each, for each of a step's 300 launches.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

__all__ = [
    "capability",
    "cdiv",
    "dependent",
    "pdl_works",
    "power_of_2",
    "processors",
    "wait_for_previous",
]


def cdiv(number: int, size: int) -> int:
    return -(-number // size)


def power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def processors(device: torch.device, interpreted: int) -> int:
    if device.type != "cuda":
        return interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def pdl_works(device: torch.device) -> bool:
    """Return whether kernels can start before their predecessor ends: compute capability 9.0."""
    return capability(device) >= (9, 0) and not triton.knobs.runtime.interpret


def dependent(device: torch.device) -> dict[str, bool]:
    """Return options of a launch that begins before the kernel ahead of it ends, where that works.

    Writers of what it reads, and readers of what it writes, must be on the same stream.
    """
    pdl = pdl_works(device)
    return {"PDL": pdl, "launch_pdl": pdl}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
