"""Communicators of two ranks over NCCL: 0 sends and 1 receives.

NCCL is called directly: torch's watchdog ends the process on a time-out. Two ranks meet in a
communicator that does not block (NCCL 2.14), so that `ncclCommAbort` is always possible. Its calls
take 150 to 230 us, so bytes move in a blocking child (15 us), split off with its parent's
connections (`splitShare`; NCCL 2.18).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial

import torch

from kvrelay.wire.errors import ConfigError, PeerLost

__all__ = ["RECEIVES", "SENDS", "NcclCommunicator", "NcclLibrary", "Work"]

SENDS, RECEIVES = 0, 1  # ranks
Work = Callable[[], None]
"""Waits for one slice. Raises PeerLost."""
# How often NCCL is asked: often for as long as an operation takes (64 MiB over NVLink: 190 us).
POLL_S, LATER_POLL_S, LATER_S = 20e-6, 100e-6, 0.005


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


_UNDEFINED = -(1 << 31)
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1


class NcclLibrary:
    communicator_bytes = 96 << 20
    """GPU memory of a communicator: about 100 MB with 16 channels."""

    def __init__(self, device: int, patience_s: float) -> None:
        """Load torch's NCCL. Raises ConfigError without one."""
        try:
            self.library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise ConfigError(
                f"kv_connector nccl needs NCCL, which comes with torch for CUDA: {error}"
            ) from error
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.library.ncclCommInitRankConfig.argtypes = [pointer, number, _UniqueId, number, pointer]
        self.library.ncclCommGetAsyncError.argtypes = [pointer, pointer]
        self.library.ncclCommSplit.argtypes = [pointer, number, number, pointer, pointer]
        self.library.ncclCommAbort.argtypes = [pointer]
        for move in (self.library.ncclSend, self.library.ncclRecv):
            move.argtypes = [pointer, ctypes.c_size_t, number, number, pointer, pointer]
        self.device = device
        self.patience_s = patience_s
        # torch's 32 shared streams could let a hung pair block another.
        self.spare_streams: list[torch.cuda.Stream] = []

    def facts(self) -> bytes:
        """Return a communicator's unique id, for both ranks."""
        unique_id = _UniqueId()
        self.check(self.library.ncclGetUniqueId(ctypes.byref(unique_id)), "make a unique id")
        return bytes(unique_id)

    def open(
        self, rank: int, facts: bytes, given_up: Callable[[], bool], deadline: float
    ) -> NcclCommunicator:
        """Meet the other rank of this unique id. Raises PeerLost."""
        if len(facts) != ctypes.sizeof(_UniqueId):
            raise PeerLost(
                f"a unique id of NCCL has {ctypes.sizeof(_UniqueId)} bytes, got {len(facts)}"
            )
        communicator = NcclCommunicator(self, 1 - rank, given_up)
        try:
            communicator.meet(rank, _UniqueId.from_buffer_copy(facts), deadline)
        except PeerLost:
            communicator.close()
            raise
        return communicator

    def check(self, result: int, doing: str) -> None:
        """Raise PeerLost unless NCCL has done it, or does it now."""
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise PeerLost(
                f"NCCL could not {doing}: {self.library.ncclGetErrorString(result).decode()}"
            )


class NcclCommunicator:
    """A communicator with one peer, of one thread but for `interrupt`."""

    def __init__(self, nccl: NcclLibrary, peer: int, given_up: Callable[[], bool]) -> None:
        self._nccl = nccl
        self._peer = peer
        self._given_up = given_up
        # Written by NCCL after the call returns.
        self._parent, self._child = ctypes.c_void_p(), ctypes.c_void_p()
        self._comm = self._parent  # which operations go to
        self._interrupted = False
        spare = nccl.spare_streams
        # 0 is the lowest priority.
        self._wire: torch.cuda.Stream
        self._wire = spare.pop() if spare else torch.cuda.Stream(nccl.device, priority=0)  # type: ignore[no-untyped-call]

    def meet(self, rank: int, unique_id: _UniqueId, deadline: float) -> None:
        parent, config = ctypes.byref(self._parent), ctypes.byref(self._config(blocking=0))
        library = self._nccl.library
        result = library.ncclCommInitRankConfig(parent, 2, unique_id, rank, config)
        self._nccl.check(result, "start a communicator")
        self.settle("meet the other rank", deadline)
        # The first operation connects the two GPUs by all channels.
        byte = torch.zeros(1, dtype=torch.uint8, device=self._wire.device)
        (self.send if rank == SENDS else self.recv)(byte)()
        self._split(rank, deadline)

    def _split(self, rank: int, deadline: float) -> None:
        doing = "split a communicator"
        config = ctypes.byref(self._config(blocking=1))
        result = self._nccl.library.ncclCommSplit(
            self._parent, 0, rank, ctypes.byref(self._child), config
        )
        self._nccl.check(result, doing)
        # The parent tells the child's state until there is one.
        self.settle(doing, deadline)
        if not self._child:
            raise PeerLost(f"NCCL could not {doing}")
        self._comm = self._child

    def _config(self, *, blocking: int) -> _Config:
        undefined = [_UNDEFINED] * 3
        return _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21800, blocking, *undefined, None, 1)

    def send(self, staging: torch.Tensor) -> Work:
        return self._start(self._nccl.library.ncclSend, staging)

    def recv(self, staging: torch.Tensor) -> Work:
        return self._start(self._nccl.library.ncclRecv, staging)

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Abort, whatever the other side does."""
        # The parent's abort ends a split under way, which may leave a child.
        for comm in (self._child, self._parent, self._child):
            if comm:
                self._nccl.library.ncclCommAbort(comm)
                comm.value = None
        while not self._wire.query():
            time.sleep(0.001)
        self._nccl.spare_streams.append(self._wire)

    def settle(self, doing: str, deadline: float) -> None:
        """Wait until NCCL has done its work on the host. Raises PeerLost."""
        began = time.monotonic()
        while (state := self.state(doing)) == _IN_PROGRESS:
            self.patiently(doing, began, deadline)
        self._nccl.check(state, doing)

    def state(self, doing: str) -> int:
        state = ctypes.c_int(_IN_PROGRESS)
        self._nccl.check(
            self._nccl.library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)), doing
        )
        return state.value

    def patiently(self, doing: str, began: float, deadline: float) -> None:
        """Wait for a moment. Raises PeerLost when that was long enough."""
        if self._interrupted or self._given_up():
            raise PeerLost(f"gave up while NCCL was to {doing}")
        now = time.monotonic()
        if now >= deadline:
            raise PeerLost(f"NCCL could not {doing} in time: the other side has stopped or is gone")
        time.sleep(POLL_S if now - began < LATER_S else LATER_POLL_S)

    def _start(self, operation: Callable[..., int], staging: torch.Tensor) -> Work:
        wire = self._wire
        wire.wait_stream(torch.cuda.current_stream(self._nccl.device))
        result = operation(
            staging.data_ptr(), staging.numel(), _UINT8, self._peer, self._comm, wire.cuda_stream
        )
        self._nccl.check(result, "start a transfer")
        # Only then is the kernel in the stream.
        self.settle("start a transfer", time.monotonic() + self._nccl.patience_s)
        return partial(self._finish, wire.record_event())

    def _finish(self, done: torch.cuda.Event) -> None:
        doing, began = "move a slice", time.monotonic()
        deadline = began + self._nccl.patience_s
        while not done.query():  # type: ignore[no-untyped-call]
            self.settle(doing, deadline)
            self.patiently(doing, began, deadline)
        self.settle(doing, deadline)  # an aborted kernel ends, too
