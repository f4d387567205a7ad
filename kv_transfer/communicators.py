"""Two processes that send and receive memory: gloo between CPUs, NCCL between GPUs, behind one small interface.

Owns groups of two ranks, 0 sends and 1 receives, and how a wait on them ends: done, or PeerLost after a deadline, a
lost connection or `interrupt`. Refuses to know blocks, pools or pairs.

NCCL is called directly, not through torch.distributed: the watchdog of a ProcessGroupNCCL takes the whole process down
when an operation times out or the peer is lost (unless an environment variable, which the tensor-parallel group of this
process needs otherwise, says no). Two ranks meet, and their GPUs connect, in a communicator that does not block (NCCL
2.14 and later): each call returns at once and is polled, so that `ncclCommAbort` is always possible. But each call of
such a communicator makes a thread, 150 to 230 us an operation. So bytes move in a child of it that does block: it is
split off without blocking, too, and has its parent's connections (`splitShare`; NCCL 2.18 and later), so that its calls
have nobody to wait for: they put a kernel into a stream, in 15 us. That one's end is polled, again.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from wire.errors import ConfigError, PeerLost

__all__ = ["Backend", "Communicator", "GlooBackend", "Mailbox", "NcclBackend", "Work"]

# gloo exchanges a few addresses of 170 bytes; what is more is no gloo.
MAX_WORDS, MAX_WORD_BYTES = 16, 16 << 10
# So often gloo (torch 2.13) tries to connect to a process that is stopped, and each time for the whole time-out.
GLOO_TRIES = 5
# How often an operation of NCCL is looked at: often for as long as one takes if all goes well (64 MiB over NVLink: 190
# us; the other end's launches).
POLL_S, LATER_POLL_S, LATER_S = 20e-6, 100e-6, 0.005


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when it is done. Raises PeerLost once it has taken as long as the backend's patience."""


class Communicator(Protocol):
    """All methods but `interrupt` are called from one thread."""

    def send(self, staging: torch.Tensor) -> Work:
        """Start to send bytes that were written by the current stream. Raises PeerLost."""

    def recv(self, staging: torch.Tensor) -> Work:
        """Start to receive, when the current stream has done what it was given. Raises PeerLost."""

    def interrupt(self) -> None:
        """From any thread, returns at once: every wait ends now."""

    def close(self) -> None:
        """Returns when nothing can be written to memory that was given to `recv` any more."""


class Backend(Protocol):
    """What makes communicators."""

    def facts(self) -> bytes:
        """What the receiving side makes up and the sending side must know. Raises PeerLost."""

    def open(self, rank: int, facts: bytes, mailbox: Mailbox, deadline: float) -> Communicator:
        """Meet the other rank, until `deadline` by the monotonic clock. Raises PeerLost."""


class Mailbox(Store):
    """The store through which two gloo ranks find each other, made of messages: no port that anybody could dial."""

    def __init__(self, say: Callable[[str, bytes], None], deadline: float) -> None:
        """`say` sends a key and its value to the other side. Nothing is waited for beyond `deadline`."""
        super().__init__()
        self._say = say
        self._deadline = deadline
        self._changed = threading.Condition()
        self._words: dict[str, bytes] = {}
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """The other side said this. Raises ValueError for what gloo would not say."""
        with self._changed:
            if len(self._words) >= MAX_WORDS or len(value) > MAX_WORD_BYTES:
                raise ValueError(f"more than {MAX_WORDS} words, or one of more than {MAX_WORD_BYTES} bytes")
            self._words[key] = value
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the other side has given up, or we have."""
        return self._closed

    def close(self) -> None:
        """Nothing will come any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # What gloo calls.

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.put(key, value)
        self._say(key, value)

    def get(self, key: str) -> bytes:
        with self._changed:
            wait_s = max(0.0, self._deadline - time.monotonic())
            self._changed.wait_for(lambda: self._closed or key in self._words, wait_s)
            if key not in self._words:
                raise PeerLost("the other side did not say in time where it is")
            return self._words[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ours is the deadline."""


class GlooBackend:
    """Over TCP between addresses of these hosts."""

    def __init__(self, host: str, patience_s: float) -> None:
        """`host` is an address of this machine that the others reach. Raises ConfigError without gloo."""
        if not (dist.is_available() and dist.is_gloo_available()):
            raise ConfigError("kv_connector nccl needs gloo for a pool in CPU memory, and this build of torch has none")
        self._host = host
        self._patience = timedelta(seconds=patience_s)

    def facts(self) -> bytes:
        """The mailbox does it all."""
        return b""

    def open(self, rank: int, facts: bytes, mailbox: Mailbox, deadline: float) -> Communicator:
        """See Backend."""
        group: Any = dist.ProcessGroupGloo
        options = group._Options()
        try:
            options._devices = [group.create_device(hostname=self._host)]
            options._threads = 1
            options._timeout = timedelta(seconds=max(0.001, (deadline - time.monotonic()) / GLOO_TRIES))
            return _GlooCommunicator(group(mailbox, rank, 2, options), mailbox, 1 - rank, self._patience)
        except RuntimeError as error:
            raise PeerLost(f"gloo did not connect: {_first_line(error)}") from error


class _GlooCommunicator:
    DATA, POISON = 0, 1  # tags

    def __init__(self, group: Any, mailbox: Mailbox, peer: int, patience: timedelta) -> None:
        self._group = group
        self._mailbox = mailbox  # the group holds its C++ half only
        self._peer = peer
        self._patience = patience

    def send(self, staging: torch.Tensor) -> Work:
        return self._start(self._group.send, staging)

    def recv(self, staging: torch.Tensor) -> Work:
        return self._start(self._group.recv, staging)

    def interrupt(self) -> None:
        """gloo's own `abort` leaves waiting threads where they are; a receive that times out closes the connection and
        wakes them all (torch 2.13)."""
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, self.POISON).wait(
                timedelta(milliseconds=1)
            )

    def close(self) -> None:
        self.interrupt()

    def _start(self, operation: Callable[..., Any], staging: torch.Tensor) -> Work:
        try:
            return _GlooWork(operation([staging], self._peer, self.DATA), self._patience)
        except RuntimeError as error:
            raise PeerLost(f"gloo lost the other side: {_first_line(error)}") from error


class _GlooWork:
    def __init__(self, work: Any, patience: timedelta) -> None:
        self._work = work
        self._patience = patience

    def wait(self) -> None:
        """A wait that times out also closes the connection: whatever comes later finds no memory to land in."""
        try:
            self._work.wait(self._patience)
        except RuntimeError as error:
            raise PeerLost(f"gloo lost the other side: {_first_line(error)}") from error


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.18; newer libraries fill in what they have added, by `size` and `version`."""

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


class NcclBackend:
    """Between GPUs of one or of two hosts."""

    def __init__(self, device: int, patience_s: float) -> None:
        """Loads the NCCL that torch brought. Raises ConfigError without one."""
        try:
            self.library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise ConfigError(f"kv_connector nccl needs NCCL, which comes with torch for CUDA: {error}") from error
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.library.ncclCommInitRankConfig.argtypes = [pointer, number, _UniqueId, number, pointer]
        self.library.ncclCommGetAsyncError.argtypes = [pointer, pointer]
        self.library.ncclCommSplit.argtypes = [pointer, number, number, pointer, pointer]
        self.library.ncclCommAbort.argtypes = [pointer]
        for name in ("ncclSend", "ncclRecv"):
            getattr(self.library, name).argtypes = [pointer, ctypes.c_size_t, number, number, pointer, pointer]
        self.device = device
        self.patience_s = patience_s
        # A torch stream is one of 32, given out in turn: one that two pairs share would let a hung one hold up another.
        # So we keep ours, and reuse one only when nothing runs on it any more.
        self.spare_streams: list[torch.cuda.Stream] = []

    def facts(self) -> bytes:
        """The unique id of a communicator to be."""
        unique_id = _UniqueId()
        self.check(self.library.ncclGetUniqueId(ctypes.byref(unique_id)), "make a unique id")
        return bytes(unique_id)

    def open(self, rank: int, facts: bytes, mailbox: Mailbox, deadline: float) -> Communicator:
        """See Backend."""
        if len(facts) != ctypes.sizeof(_UniqueId):
            raise PeerLost(f"a unique id of NCCL has {ctypes.sizeof(_UniqueId)} bytes, got {len(facts)}")
        communicator = _NcclCommunicator(self, 1 - rank, mailbox)
        try:
            communicator.meet(rank, _UniqueId.from_buffer_copy(facts), deadline)
        except PeerLost:
            communicator.close()
            raise
        return communicator

    def check(self, result: int, doing: str) -> None:
        """Raises PeerLost unless NCCL has done it, or does it now."""
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise PeerLost(f"NCCL could not {doing}: {self.library.ncclGetErrorString(result).decode()}")


class _NcclCommunicator:
    def __init__(self, backend: NcclBackend, peer: int, mailbox: Mailbox) -> None:
        self._backend = backend
        self._peer = peer
        self._mailbox = mailbox
        # Written by NCCL, later than the call returns.
        self._parent, self._child = ctypes.c_void_p(), ctypes.c_void_p()
        self._comm = self._parent  # which operations go to
        self._interrupted = False
        spare = backend.spare_streams
        # 0 is the lowest priority there is.
        self._wire: torch.cuda.Stream
        self._wire = spare.pop() if spare else torch.cuda.Stream(backend.device, priority=0)  # type: ignore[no-untyped-call]

    def meet(self, rank: int, unique_id: _UniqueId, deadline: float) -> None:
        init = self._backend.library.ncclCommInitRankConfig
        result = init(ctypes.byref(self._parent), 2, unique_id, rank, ctypes.byref(self._config(blocking=0)))
        self._backend.check(result, "start a communicator")
        self.settle("meet the other rank", deadline)
        # The first operation connects the two GPUs, by all channels whatever its size.
        byte = torch.zeros(1, dtype=torch.uint8, device=self._wire.device)
        (self.send if rank == 0 else self.recv)(byte).wait()
        self._split(rank, deadline)

    def _split(self, rank: int, deadline: float) -> None:
        """From here on calls block."""
        doing = "split a communicator"
        config = ctypes.byref(self._config(blocking=1))
        result = self._backend.library.ncclCommSplit(self._parent, 0, rank, ctypes.byref(self._child), config)
        self._backend.check(result, doing)
        # It is the parent that tells the child's state until there is one.
        self.settle(doing, deadline)
        if not self._child:
            raise PeerLost(f"NCCL could not {doing}")
        self._comm = self._child

    def _config(self, *, blocking: int) -> _Config:
        undefined = [_UNDEFINED] * 3
        return _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21800, blocking, *undefined, None, 1)

    def send(self, staging: torch.Tensor) -> Work:
        return self._start(self._backend.library.ncclSend, staging)

    def recv(self, staging: torch.Tensor) -> Work:
        return self._start(self._backend.library.ncclRecv, staging)

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Abort: local, whatever the other side does. Its kernels end by a flag, which they look at now and then."""
        # The parent's ends a split that is under way, which may leave a child.
        for comm in (self._child, self._parent, self._child):
            if comm:
                self._backend.library.ncclCommAbort(comm)
                comm.value = None
        while not self._wire.query():
            time.sleep(0.001)
        self._backend.spare_streams.append(self._wire)

    def settle(self, doing: str, deadline: float) -> None:
        """Wait until NCCL has done on the host what it was asked. Raises PeerLost."""
        began = time.monotonic()
        while (state := self.state(doing)) == _IN_PROGRESS:
            self.patiently(doing, began, deadline)
        self._backend.check(state, doing)

    def state(self, doing: str) -> int:
        """What NCCL says of this communicator, without waiting."""
        state = ctypes.c_int(_IN_PROGRESS)
        self._backend.check(self._backend.library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)), doing)
        return state.value

    def patiently(self, doing: str, began: float, deadline: float) -> None:
        """One round of a wait. Raises PeerLost when it was long enough."""
        if self._interrupted or self._mailbox.closed:
            raise PeerLost(f"gave up while NCCL was to {doing}")
        now = time.monotonic()
        if now >= deadline:
            raise PeerLost(f"NCCL could not {doing} in time: the other side has stopped or is gone")
        time.sleep(POLL_S if now - began < LATER_S else LATER_POLL_S)

    def _start(self, operation: Callable[..., int], staging: torch.Tensor) -> Work:
        wire = self._wire
        wire.wait_stream(torch.cuda.current_stream(self._backend.device))
        result = operation(staging.data_ptr(), staging.numel(), _UINT8, self._peer, self._comm, wire.cuda_stream)
        self._backend.check(result, "start a transfer")
        # Of a communicator that does not block, not before this has ended is there a kernel in the stream.
        self.settle("start a transfer", time.monotonic() + self._backend.patience_s)
        return _NcclWork(self, wire.record_event(), self._backend.patience_s)


class _NcclWork:
    def __init__(self, communicator: _NcclCommunicator, done: torch.cuda.Event, patience_s: float) -> None:
        self._communicator = communicator
        self._done = done
        self._patience_s = patience_s

    def wait(self) -> None:
        """A kernel that was aborted ends, too: NCCL's own state is looked at behind the event."""
        began = time.monotonic()
        deadline = began + self._patience_s
        while not self._done.query():  # type: ignore[no-untyped-call]
            self._communicator.settle("move a slice", deadline)
            self._communicator.patiently("move a slice", began, deadline)
        self._communicator.settle("move a slice", deadline)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
