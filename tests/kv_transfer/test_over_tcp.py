"""A reader and a source meet by a TCP connection: only the invited do, and every wait ends."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest
import torch

from kvrelay.kv_transfer.communicators import Communicator
from kvrelay.kv_transfer.over_tcp import MAX_STRANGERS, TOKEN_BYTES, Invitation, TcpBackend
from kvrelay.wire.errors import PeerLost

PATIENCE_S = 10.0


def never() -> bool:
    return False


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


Invited = tuple[bytes, Future[Communicator]]


def invited(
    thread: ThreadPoolExecutor,
    given_up: Callable[[], bool] = never,
    meet_s: float = 20.0,
    host: str = "127.0.0.1",
) -> Invited:
    """What a reader says, and the end of its waiting."""
    said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    backend = TcpBackend(host, PATIENCE_S)
    meeting = thread.submit(backend.invite, said.put, given_up, time.monotonic() + meet_s)
    return said.get(timeout=20), meeting


def joined(facts: bytes, meet_s: float = 20.0, patience_s: float = PATIENCE_S) -> Communicator:
    return TcpBackend("127.0.0.1", patience_s).join(facts, never, time.monotonic() + meet_s)


def open_files() -> int:
    gc.collect()  # of tests before this one, too
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def both(thread: ThreadPoolExecutor) -> Iterator[tuple[Communicator, Communicator]]:
    """A source and its reader."""
    facts, meeting = invited(thread)
    source, reader = joined(facts), meeting.result(20)
    yield source, reader
    source.close()
    reader.close()


def test_slices_arrive_whole_and_in_order(
    both: tuple[Communicator, Communicator], thread: ThreadPoolExecutor
) -> None:
    source, reader = both
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 3 << 20, 70_001)]
    sending = [source.send(slice_) for slice_ in sent]
    received = [torch.zeros_like(slice_) for slice_ in sent]
    receiving = [reader.recv(slice_) for slice_ in received]
    done = thread.submit(lambda: [work.wait() for work in sending])
    for work in receiving:
        work.wait()
    done.result(20)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


@pytest.mark.parametrize(("number", "said"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "reader")])
def test_a_name_is_dialled_where_it_was_listened_at(
    number: str, said: str, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its numbers the source would find first."""
    looked_up = socket.getaddrinfo

    def here_or_there(host: str, *arguments: int, **more: int) -> list[tuple[object, ...]]:
        return list(looked_up(number if host == "reader" else host, *arguments, **more))

    monkeypatch.setattr(socket, "getaddrinfo", here_or_there)
    facts, meeting = invited(thread, host="reader")
    assert msgspec.msgpack.decode(facts, type=Invitation).host == said
    source, reader = joined(facts), meeting.result(20)
    source.close()
    reader.close()


def test_strangers_are_hung_up_on_and_who_was_invited_comes_in(thread: ThreadPoolExecutor) -> None:
    before = open_files()
    facts, meeting = invited(thread)
    to = msgspec.msgpack.decode(facts, type=Invitation)
    wrong = [
        bytes(4096),
        b"\x01" + bytes(7) + b"\x7f" * 99,
        bytes(TOKEN_BYTES),
        to.token[:-1] + b"?",
        to.token[:5],
        b"",
    ]
    strangers = [
        socket.create_connection((to.host, to.port), 20) for _ in range(MAX_STRANGERS + len(wrong))
    ]
    for stranger, bytes_ in zip(strangers, wrong, strict=False):
        stranger.sendall(bytes_)
    for stranger in strangers[:4]:
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    source = joined(facts)
    reader = meeting.result(20)
    slice_, into = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    source.send(slice_).wait()
    reader.recv(into).wait()
    assert torch.equal(slice_, into)
    source.close()
    reader.close()
    for stranger in strangers:
        stranger.close()
    assert open_files() == before


def test_nobody_is_waited_for_beyond_the_deadline_or_in_vain(thread: ThreadPoolExecutor) -> None:
    before = open_files()
    with pytest.raises(PeerLost, match="did not come in time"):
        invited(thread, meet_s=0.1)[1].result(20)
    over = threading.Event()
    _, meeting = invited(thread, over.is_set)
    over.set()
    with pytest.raises(PeerLost, match="gave up"):
        meeting.result(20)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        to = Invitation("127.0.0.1", gone.getsockname()[1], bytes(TOKEN_BYTES))
    with pytest.raises(PeerLost, match="cannot reach the reader"):
        joined(msgspec.msgpack.encode(to))
    for facts in (b"", b"\xc1", msgspec.msgpack.encode({"host": 3})):
        with pytest.raises(PeerLost, match="another release"):
            joined(facts)
    assert open_files() == before


@pytest.mark.parametrize("end", ["interrupt", "close of the other side", "patience"])
def test_a_wait_ends(end: str, thread: ThreadPoolExecutor) -> None:
    facts, meeting = invited(thread)
    source = joined(facts, patience_s=0.1)
    reader = meeting.result(20)
    try:
        if end == "patience":
            work = source.recv(torch.zeros(8, dtype=torch.uint8))
            with pytest.raises(PeerLost, match="has stopped"):
                work.wait()
            return
        waiting = thread.submit(reader.recv(torch.zeros(8, dtype=torch.uint8)).wait)
        began = time.monotonic()
        reader.interrupt() if end == "interrupt" else source.close()
        with pytest.raises(PeerLost, match="closed the connection"):
            waiting.result(20)
        assert time.monotonic() - began < PATIENCE_S / 2
    finally:
        source.close()
        reader.close()
        reader.interrupt()  # too late, and no error
