"""A transfer engine over a backend of the test's or a real one, and its events."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fake_nccl import FakeNccl
from shared_backend import BLOCK_BYTES, BLOCKS, REGION, SharedBackend, pattern

import kvrelay.kv_transfer.peers
from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer.backend import TransferBackend
from kvrelay.kv_transfer.connector import Event, Fetched, FetchFailed, PoolRegion, Settled
from kvrelay.kv_transfer.direct import DirectBackend
from kvrelay.kv_transfer.nccl import NcclBackend
from kvrelay.kv_transfer.nixl import NixlBackend
from kvrelay.kv_transfer.ranks import RankLink
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import TransferError
from kvrelay.wire.transfer import Fingerprint, Ticket

FINGERPRINT = Fingerprint(1, "tiny", "float32", 16, 2, 8, 2, 0, 1)
# Nothing runs out: whoever waits that long, waits in vain.
CONFIG = TransferConfig(lease_s=60.0, heartbeat_s=0.3, transfer_deadline_s=60.0)
# A lease, or a transfer's time, runs out within a test.
SHORT = replace(CONFIG, lease_s=2.0)
HURRIED = replace(CONFIG, transfer_deadline_s=2.0)
# Heartbeats that never come within a test.
SLOW = TransferConfig(lease_s=60.0, heartbeat_s=20.0, transfer_deadline_s=60.0)
AT_ONCE_S = 20.0
"""All that happens at once has happened within it, and no lease has run out."""


class EngineNode:
    """A transfer engine, and its events as the step loop would see them."""

    backend: Any

    def __init__(
        self,
        name: str,
        region: PoolRegion,
        backends: Mapping[str, Any],
        config: TransferConfig = CONFIG,
        fingerprint: Fingerprint = FINGERPRINT,
        link: RankLink | None = None,
    ) -> None:
        self.region, self.backends, self.woken = region, backends, threading.Event()
        self.engine = TransferEngine(
            name, fingerprint, region, config, self.woken.set, backends, link
        )

    def fetch(self, name: str, ticket: Ticket, remote: Sequence[int], local: Sequence[int]) -> None:
        self.engine.watch(name, ticket)
        self.engine.fetch(name, remote, local)

    def wait(self, count: int, within_s: float = AT_ONCE_S) -> list[Event]:
        """The next `count` events, of which the engine has woken us."""
        got: list[Event] = []
        until = time.monotonic() + within_s
        while len(got) < count and self.woken.wait(max(0.0, until - time.monotonic())):
            self.woken.clear()
            got += self.engine.events()
        assert len(got) == count, got
        return got

    def fetched(self) -> Fetched:
        """The next event, the end of a fetch."""
        (event,) = self.wait(1)
        assert isinstance(event, Fetched), event
        return event

    def fails(self) -> str:
        """Why a fetch has failed, which is settled."""
        failed, settled = self.wait(2)
        assert isinstance(settled, Settled)
        return reason(failed)

    def quiet(self, for_s: float = 0.1) -> None:
        """No event comes; to be woken is none, as it may be about one that was taken already."""
        until = time.monotonic() + for_s
        while self.woken.wait(max(0.0, until - time.monotonic())):
            self.woken.clear()
            assert not (events := self.engine.events()), events

    def renewed(self, name: str) -> None:
        """Wait until the source of a watched request has said that it holds the KV."""
        fetch = self.engine._fetches._fetches[name]
        wait_until(lambda: fetch.held_until >= time.monotonic())

    def close(self) -> None:
        self.engine.close()


class SharedNode(EngineNode):
    """A node over a `SharedBackend`, each of whose blocks has its pattern if it is `filled`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: TransferConfig = CONFIG,
        fingerprint: Fingerprint = FINGERPRINT,
        *,
        filled: bool = False,
    ) -> None:
        self.backend = SharedBackend(folder / f"{name}-{time.monotonic_ns()}")
        for index in range(BLOCKS * filled):
            self.backend.write(index, pattern(index))
        super().__init__(name, REGION, {"shared": self.backend}, config, fingerprint)


class GatedBackend:
    """A backend whose reads go on only while `gate` is open; `posted`: one was asked for."""

    def __init__(self, backend: TransferBackend) -> None:
        self._backend = backend
        self.gate, self.posted = threading.Event(), threading.Event()
        self.gate.set()
        self.polls_left: int | None = None
        """If set: the gate closes after so many polls."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def post_read(self, *arguments: Any) -> object:
        self.posted.set()
        return self._backend.post_read(*arguments)

    def poll(self, handle: object) -> bool:
        if self.polls_left == 0:
            self.polls_left = None
            self.gate.clear()
        if not self.gate.is_set():
            return False
        if self.polls_left is not None:
            self.polls_left -= 1
        return self._backend.poll(handle)


class RealNode(EngineNode):
    """A node over a real backend. `pool` is uint8 [num_blocks, block_bytes]."""

    def __init__(
        self,
        name: str,
        kind: str,
        num_blocks: int = BLOCKS,
        block_bytes: int = BLOCK_BYTES,
        device: str = "cpu",
        config: TransferConfig = CONFIG,
        *,
        filled: bool = False,
    ) -> None:
        pool = zeros(num_blocks * block_bytes, torch.device(device))
        self.pool = pool.view(num_blocks, block_bytes)
        region = PoolRegion(self.pool.data_ptr(), num_blocks, block_bytes, device)
        self.backend = GatedBackend(real_backend(name, kind, region, config))
        super().__init__(name, region, {kind: cast(TransferBackend, self.backend)}, config)
        if filled:
            self.fill()

    def fill(self) -> None:
        """Block i is full of i + 1."""
        self.pool[:] = (torch.arange(len(self.pool)) + 1).to(self.pool)[:, None]
        if self.pool.is_cuda:
            torch.cuda.synchronize()


def real_backend(
    name: str, kind: str, region: PoolRegion, config: TransferConfig = CONFIG, **settings: Any
) -> TransferBackend:
    """A backend; NCCL is faked on CPUs."""
    if kind == "direct":
        return DirectBackend(region)
    if kind == "nixl":
        return NixlBackend(f"{name}-{time.monotonic_ns()}", region, config.kv_host)
    meet_s, patience_s = config.transfer_deadline_s, config.lease_s
    nccl: Any = FakeNccl(patience_s)
    return NcclBackend(region, config.kv_host, meet_s, patience_s, nccl=nccl, **settings)


@contextlib.contextmanager
def node(
    name: str, folder: Path, config: TransferConfig = CONFIG, fingerprint: Fingerprint = FINGERPRINT
) -> Iterator[SharedNode]:
    """A filled node."""
    with contextlib.closing(SharedNode(name, folder, config, fingerprint, filled=True)) as it:
        yield it


def reason(event: Event) -> str:
    assert isinstance(event, FetchFailed), event
    return event.reason


def of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of this process cannot look into their sources' tables of leases: they must ask."""

    def unseen(*_: object) -> None:
        raise TransferError("of another host")

    monkeypatch.setattr(kvrelay.kv_transfer.peers, "HeldWords", unseen)


def wait_until(true: Callable[[], object], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until, "not within the deadline"
        time.sleep(0.002)
