"""NCCL between planes of one process: bytes go through a queue for each pair."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import torch

from kvrelay.wire.errors import PeerLost

POLL_S = 0.005


class _Wire:
    def __init__(self) -> None:
        self.joined = threading.Event()
        self.slices: queue.Queue[bytes] = queue.Queue(1)


class FakeNccl:
    """One side's NCCL. While it is `stopped` nothing of this side moves, as if its process slept."""

    communicator_bytes = 0
    _invited: ClassVar[dict[bytes, _Wire]] = {}

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.stopped = threading.Event()

    def invite(
        self, say: Callable[[bytes], None], given_up: Callable[[], bool], deadline: float
    ) -> FakeCommunicator:
        facts, wire = os.urandom(16), _Wire()
        self._invited[facts] = wire
        say(facts)
        self.wait_for(wire.joined.is_set, given_up, deadline)
        return FakeCommunicator(self, wire)

    def join(self, facts: bytes, given_up: Callable[[], bool], deadline: float) -> FakeCommunicator:
        self.wait_for(lambda: facts in self._invited, given_up, deadline)
        wire = self._invited.pop(facts)
        wire.joined.set()
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
    def __init__(self, nccl: FakeNccl, wire: _Wire) -> None:
        self._nccl, self._wire, self._interrupted = nccl, wire, threading.Event()

    def send(self, staging: torch.Tensor) -> FakeWork:
        return FakeWork(self._nccl, self._interrupted, lambda: self._put(staging))

    def recv(self, staging: torch.Tensor) -> FakeWork:
        return FakeWork(self._nccl, self._interrupted, lambda: self._get(staging))

    def interrupt(self) -> None:
        self._interrupted.set()

    close = interrupt

    def _put(self, staging: torch.Tensor) -> bool:
        try:
            self._wire.slices.put_nowait(staging.numpy().tobytes())
        except queue.Full:
            return False
        return True

    def _get(self, staging: torch.Tensor) -> bool:
        try:
            data = self._wire.slices.get_nowait()
        except queue.Empty:
            return False
        staging.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return True


class FakeWork:
    """Moves its bytes while it is waited for."""

    def __init__(
        self, nccl: FakeNccl, interrupted: threading.Event, move: Callable[[], bool]
    ) -> None:
        self._nccl, self._interrupted, self._move = nccl, interrupted, move

    def wait(self) -> None:
        deadline = time.monotonic() + self._nccl.patience_s
        self._nccl.wait_for(self._move, self._interrupted.is_set, deadline)
