"""Uploads of a step's integers by a kernel that reads pinned memory.

A copy would wait for the GPU's copy engine, which ends a load of KV from host memory first: steps
stood still for up to 84 ms (H200, 32k tokens of an 8B model).
"""

from __future__ import annotations

from collections import deque

import torch
import triton
import triton.language as tl

__all__ = ["Uploads", "copy_words"]

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _copy_words(source, target, count, BLOCK: tl.constexpr):
    # grid: (cdiv(count, BLOCK),)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < count
    tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy int32 of pinned memory to the GPU, in the current stream.

    `source` must keep its words until the kernel has run: torch does not know that it is read.
    """
    assert source.dtype == target.dtype == torch.int32
    assert source.numel() == target.numel()
    count = source.numel()
    _copy_words[(triton.cdiv(count, _BLOCK),)](source, target, count, BLOCK=_BLOCK)


class Uploads:
    """A sender of int32 arrays that keeps each in memory until the GPU has read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unread: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def send(self, words: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy on the device, in the first words of `into` if given.

        For a GPU, `words` is pinned.
        """
        if into is None:
            into = torch.empty(words.shape, dtype=torch.int32, device=self._device)
        into = into[: len(words)]
        if self._device.type != "cuda":
            return into.copy_(words)
        copy_words(words, into)
        while self._unread and self._unread[0][0].query():  # type: ignore[no-untyped-call]
            self._unread.popleft()
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record()
        self._unread.append((read, words))
        return into
