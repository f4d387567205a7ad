"""Leases, fences and bytes between two processes, one of which is stopped or killed.

Over the direct backend, which needs nobody's help to read, and NIXL, which does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest
import torch
from engine_node import (
    AT_ONCE_S,
    CONFIG,
    HURRIED,
    SHORT,
    RealNode,
    of_another_host,
    reason,
    wait_until,
)
from peer_process import PeerProcess, peer_process
from shared_backend import BLOCK_BYTES, BLOCKS

from kvrelay.kv_transfer.connector import Released, Settled
from kvrelay.wire.config import TransferConfig

LARGE = (64, 64 << 10)
EVERYTHING = list(range(LARGE[0]))


short = pytest.mark.parametrize("config", [SHORT], indirect=True)
hurried = pytest.mark.parametrize("config", [HURRIED], indirect=True)


@pytest.fixture
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return getattr(request, "param", CONFIG)


@pytest.fixture
def here(config: TransferConfig) -> Iterator[RealNode]:
    with contextlib.closing(RealNode("here", "direct", config=config)) as it:
        yield it


@pytest.fixture
def child(config: TransferConfig) -> Iterator[PeerProcess]:
    with peer_process(RealNode, "child", "direct", BLOCKS, BLOCK_BYTES, "cpu", config) as it:
        yield it


def hand_to(child: PeerProcess, here: RealNode, *names: str) -> None:
    """The child watches offers of ours, and reads the last one."""
    child.ask("backend.gate.clear")
    for name in names:
        child.ask("engine.watch", name, here.engine.offer(name, [1, 2], 32))
    child.ask("engine.fetch", names[-1], [1, 2], [3, 4])
    assert child.ask("backend.posted.wait", 20.0)


def next_expiry(source: RealNode) -> float:
    with source.engine._lock:
        return source.engine._offers.next_expiry()


def read_from(child: PeerProcess, here: RealNode) -> None:
    """We read an offer of the child's; the READ does not end."""
    here.backend.gate.clear()
    here.fetch("r", child.offer("r", [1, 2]), [1, 2], [3, 4])
    assert here.backend.posted.wait(20.0)


@short
def test_leases_and_files_of_a_killed_reader_do_not_stay(
    here: RealNode, child: PeerProcess
) -> None:
    child.ask("engine.stats")  # it is there
    files = len(os.listdir("/proc/self/fd"))
    hand_to(child, here, "queued", "fetching")
    until = time.monotonic() + SHORT.lease_s
    wait_until(lambda: next_expiry(here) > until)  # both are kept alive
    child.kill()
    both = {Released(name, expired=True) for name in ("queued", "fetching")}
    assert set(here.wait(2)) == both
    # The control channel closes the connection when it notices.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)


@short
def test_reader_that_slept_past_its_lease_never_admits(here: RealNode, child: PeerProcess) -> None:
    hand_to(child, here, "queued", "fetching")
    child.stop()
    assert {e.request_id for e in here.wait(2)} == {"queued", "fetching"}  # both leases ran out
    child.go_on()
    child.ask("backend.gate.set")
    for name in ("fetching", "queued"):
        if name == "queued":
            child.ask("engine.fetch", name, [1], [3])
        failed, settled = child.events(2, within_s=AT_ONCE_S)
        assert reason(failed).startswith("LeaseLost: ")
        assert settled == Settled(name)


def test_killed_source_fails_the_fetch_at_once(here: RealNode, child: PeerProcess) -> None:
    read_from(child, here)
    child.kill()
    (failed,) = here.wait(1)
    assert reason(failed).startswith("PeerLost: ")
    here.backend.gate.set()
    assert here.wait(1) == [Settled("r")]


@hurried
def test_stopped_source_cannot_confirm_and_its_fetch_times_out(
    here: RealNode, child: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another_host(monkeypatch)
    read_from(child, here)
    child.stop()
    here.backend.gate.set()  # the bytes arrive all the same, as they would by DMA
    failed = here.fails()
    assert failed.startswith("TransferTimeout: ")
    assert "unconfirmed" in failed


def test_stopped_source_on_this_host_need_not_confirm(here: RealNode, child: PeerProcess) -> None:
    read_from(child, here)
    child.stop()
    here.backend.gate.set()
    here.fetched()
    child.go_on()
    assert child.events(1, within_s=AT_ONCE_S) == [Released("r", expired=False)]


# Real bytes. Over TCP a READ of NIXL's needs the source's help: stopping it holds the READ up.


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    of_another_host(monkeypatch)


@contextlib.contextmanager
def two(kind: str, *sizes: int) -> Iterator[tuple[RealNode, PeerProcess]]:
    with (
        contextlib.closing(RealNode("reader", kind, *sizes, config=HURRIED)) as reader,
        peer_process(filled, kind, *sizes) as source,
    ):
        yield reader, source


def filled(kind: str, *sizes: int) -> RealNode:
    return RealNode("source", kind, *sizes, filled=True)


def stop_mid_fetch(reader: RealNode, source: PeerProcess, name: str) -> None:
    reader.engine.watch(name, source.offer(name, EVERYTHING))
    reader.renewed(name)
    source.stop()
    reader.engine.fetch(name, EVERYTHING, EVERYTHING)
    reader.quiet()


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("kind", ["nixl", "direct"])
def test_bytes_are_equal_and_settled_means_settled(kind: str) -> None:
    with two(kind, *LARGE) as (reader, source):
        reader.fetch("first", source.offer("first", EVERYTHING), EVERYTHING, EVERYTHING[::-1])
        reader.fetched()
        content = torch.arange(LARGE[0], 0, -1, dtype=torch.uint8)
        assert torch.equal(reader.pool, content[:, None].expand(LARGE))
        assert source.events(1, within_s=AT_ONCE_S) == [Released("first", expired=False)]

        # Stopped: nothing fails before the deadline, nothing is settled before the bytes are in.
        reader.pool[:] = 0
        stop_mid_fetch(reader, source, "second")
        events = reader.wait(1 if kind == "nixl" else 2)
        assert reason(events[0]).startswith("TransferTimeout: ")
        reader.quiet(0.3)
        source.go_on()
        events += reader.wait(2 - len(events))
        assert events[1] == Settled("second")
        assert source.events(1, within_s=AT_ONCE_S) != []
        landed = reader.pool.clone()
        reader.quiet(0.2)
        assert torch.equal(landed, reader.pool)

        # Killed in the middle: fails at once and is settled.
        stop_mid_fetch(reader, source, "third")
        source.kill()
        assert reader.fails().startswith("PeerLost: ")
