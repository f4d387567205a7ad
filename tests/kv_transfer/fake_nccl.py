"""NCCL between backends of one process: bytes go through a queue for each pair."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from kvrelay.kv_transfer.nccl_library import RECEIVES
from kvrelay.wire.errors import PeerLost

POLL_S = 0.005


class FakeNccl:
    """One side's NCCL. While it is `stopped` nothing of this side moves, as if its process slept."""

    communicator_bytes = 0
    _invited: ClassVar[dict[bytes, queue.Queue[bytes]]] = {}

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.stopped = threading.Event()
        self.stops = False
        """Have it stop itself behind the next slice that it moves."""
        self._own: dict[bytes, queue.Queue[bytes]] = {}

    def facts(self) -> bytes:
        facts = os.urandom(16)
        self._own[facts] = self._invited[facts] = queue.Queue(1)
        return facts

    def open(
        self, rank: int, facts: bytes, given_up: Callable[[], bool], deadline: float
    ) -> FakeCommunicator:
        if rank == RECEIVES:
            wire = self._own[facts]
            self.wait_for(lambda: facts not in self._invited, given_up, deadline)
        else:
            self.wait_for(lambda: facts in self._invited, given_up, deadline)
            wire = self._invited.pop(facts)
        return FakeCommunicator(self, wire)

    def wait_for(
        self, true: Callable[[], bool], given_up: Callable[[], bool], deadline: float
    ) -> None:
        while self.stopped.is_set() or not true():
            if given_up():
                raise PeerLost("gave up")
            if not self.stopped.is_set() and time.monotonic() >= deadline:
                raise PeerLost("the other side did not move in time")
            time.sleep(POLL_S if self.stopped.is_set() else POLL_S / 20)


class FakeCommunicator:
    """Moves a slice while it is waited for."""

    def __init__(self, nccl: FakeNccl, wire: queue.Queue[bytes]) -> None:
        self._nccl, self._wire, self._interrupted = nccl, wire, threading.Event()

    def send(self, staging: torch.Tensor) -> Callable[[], None]:
        return partial(self._wait, partial(self._put, staging))

    def recv(self, staging: torch.Tensor) -> Callable[[], None]:
        return partial(self._wait, partial(self._get, staging))

    def interrupt(self) -> None:
        self._interrupted.set()

    close = interrupt

    def _wait(self, moved: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._nccl.patience_s
        self._nccl.wait_for(moved, self._interrupted.is_set, deadline)

    def _put(self, staging: torch.Tensor) -> bool:
        try:
            self._wire.put_nowait(staging.numpy().tobytes())
        except queue.Full:
            return False
        return self._moved()

    def _get(self, staging: torch.Tensor) -> bool:
        try:
            data = self._wire.get_nowait()
        except queue.Empty:
            return False
        staging.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return self._moved()

    def _moved(self) -> bool:
        if self._nccl.stops:
            self._nccl.stops = False
            self._nccl.stopped.set()
        return True
