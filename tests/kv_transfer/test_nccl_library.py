"""What is asked of NCCL, and in which order: by a library that the test scripts. That it works,
tests on GPUs tell.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvrelay.kv_transfer.nccl_library import NcclLibrary
from kvrelay.wire.errors import PeerLost

PARENT, CHILD = 0x1000, 0x2000
SUCCESS, INTERNAL_ERROR, IN_PROGRESS = 0, 3, 7


class Stream:
    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self) -> Stream:
        return self


class Call:
    """A function of the library; takes attributes as those of ctypes do."""

    restype: Any = None
    argtypes: Any = None

    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments: Any) -> Any:
        return self._library.called(self._name, arguments)


class Library:
    """NCCL: a call of a communicator that does not block is done when it has been asked about
    twice.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.blocking: dict[int, bool] = {}
        self.under_way = 0
        self.split_fails = self.split_hangs = False
        self._child: Any = None

    def __getattr__(self, name: str) -> Call:
        call = Call(self, name)
        setattr(self, name, call)
        return call

    def called(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "ncclGetErrorString":
            return b"internal error"
        if name == "ncclCommGetAsyncError":
            return self._state(*arguments)
        comm = arguments[4] if name in ("ncclSend", "ncclRecv") else arguments[0]
        if name == "ncclCommInitRankConfig":
            comm._obj.value = PARENT
            self.blocking[PARENT] = bool(arguments[-1]._obj.blocking)
            assert arguments[-1]._obj.split_share == 1
        elif name == "ncclCommSplit":
            self._child = arguments[3]
            self.blocking[CHILD] = bool(arguments[-1]._obj.blocking)
        handle = getattr(comm, "_obj", comm).value
        self.calls.append((name, handle))
        if name == "ncclCommAbort" and handle == PARENT and self.split_hangs:
            self._child._obj.value = CHILD
        if name == "ncclCommAbort" or self.blocking[handle]:
            return SUCCESS
        assert not self.under_way, "a call before the one before has ended"
        self.under_way = 2
        return IN_PROGRESS

    def _state(self, comm: Any, state: Any) -> int:
        if self.split_hangs and self._child is not None:
            state._obj.value = IN_PROGRESS
            return SUCCESS
        if self.under_way and not self.blocking[comm.value]:
            self.under_way -= 1
            state._obj.value = IN_PROGRESS
            return SUCCESS
        if self._child is not None and self.split_fails:
            state._obj.value = INTERNAL_ERROR
            return SUCCESS
        if self._child is not None:
            self._child._obj.value = CHILD
        state._obj.value = SUCCESS
        return SUCCESS


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return library


def opened(rank: int = 0) -> Any:
    deadline = time.monotonic() + 0.5
    return NcclLibrary(0, 10.0).open(rank, bytes(128), lambda: False, deadline)


@pytest.mark.parametrize(("rank", "operation"), [(0, "ncclSend"), (1, "ncclRecv")])
def test_ranks_meet_and_connect_before_calls_block(
    library: Library, rank: int, operation: str
) -> None:
    communicator = opened(rank)
    assert library.blocking == {PARENT: False, CHILD: True}
    met = [("ncclCommInitRankConfig", PARENT), (operation, PARENT), ("ncclCommSplit", PARENT)]
    assert library.calls == met
    stage = torch.zeros(8, dtype=torch.uint8)
    (communicator.send if rank == 0 else communicator.recv)(stage)()
    communicator.close()
    assert library.calls == [
        *met,
        (operation, CHILD),
        ("ncclCommAbort", CHILD),
        ("ncclCommAbort", PARENT),
    ]


@pytest.mark.parametrize("fault", ["split_fails", "split_hangs"])
def test_what_cannot_be_split_is_aborted(library: Library, fault: str) -> None:
    setattr(library, fault, True)
    with pytest.raises(PeerLost, match="could not split a communicator"):
        opened()
    left = [("ncclCommAbort", CHILD)] if fault == "split_hangs" else []
    assert library.calls[3:] == [("ncclCommAbort", PARENT), *left]
