"""NIXL's own: what is said when it is not installed, when a READ is over, who can reach UCX."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_node import CONFIG, FINGERPRINT, RealNode
from peer_process import PeerProcess, peer_process

from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer.connector import Event, Fetched, FetchFailed, PeerKey, PoolRegion, Settled
from kvrelay.kv_transfer.nixl import COPIED_S, NixlBackend, addresses_here
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.transfer import Ticket
from tests.listening import Port, listening

LARGE = BLOCKS, BLOCK_BYTES = 64, 1 << 20


def test_missing_nixl_is_a_config_error_naming_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)
    config, before = replace(CONFIG, kv_connector="nixl"), set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"pip install 'kvrelay\[node,nixl\]'"):
        TransferEngine("x", FINGERPRINT, PoolRegion(0, 1, 4096, "cpu"), config, lambda: None)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("kv-")]


EVERYTHING = list(range(BLOCKS))


def filled() -> RealNode:
    return RealNode("source", "nixl", *LARGE, filled=True)


@contextlib.contextmanager
def two() -> Iterator[tuple[RealNode, PeerProcess]]:
    with (
        contextlib.closing(RealNode("reader", "nixl", *LARGE)) as reader,
        peer_process(filled) as source,
    ):
        yield reader, source


def test_a_connection_of_ucx_that_breaks_between_two_living_nodes_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    with two() as (reader, source):

        def fetch(name: str, events: int) -> list[Event]:
            reader.fetch(name, source.offer(name, EVERYTHING), EVERYTHING, EVERYTHING)
            return reader.wait(events)

        before = connections()
        assert isinstance(fetch("first", 1)[0], Fetched)
        for number in connections() - before - engine_connections(source.offer("where", [1])):
            with socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        failed, settled = fetch("second", 2)
        assert isinstance(failed, FetchFailed)
        assert failed.cause == "PeerLost"
        assert settled == Settled("second")
        assert isinstance(fetch("third", 1)[0], Fetched)


def test_a_read_that_hangs_is_over_when_its_peer_is_known_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    with two() as (reader, source):
        ticket = source.offer("r", EVERYTHING)
        reader.engine.watch("r", ticket)
        reader.renewed("r")
        source.stop()
        reader.engine.fetch("r", EVERYTHING, EVERYTHING)
        assert reader.backend.posted.wait(20.0)
        reader.engine.cancel("r")
        reader.quiet(2 * COPIED_S)
        assert ticket.remote_host is not None
        assert ticket.remote_port is not None
        assert ticket.generation is not None
        reader.engine.on_process_gone(
            PeerKey(ticket.remote_host, ticket.remote_port, ticket.generation)
        )
        reader.quiet(COPIED_S / 2)
        assert reader.wait(1) == [Settled("r")]


def connections() -> set[int]:
    """File descriptors of this process that are established TCP connections."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()
                found.add(number)
    return found


def engine_connections(ticket: Ticket) -> set[int]:
    """Those of them that lead to the control channel of whoever made this ticket."""
    found = set()
    for number in connections():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.getpeername()[1] == ticket.remote_port:
                found.add(number)
    return found


# Who can reach UCX.


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> PoolRegion:
    """A pool; and UCX takes the devices of kv_host, whatever nodes of other tests have left in the
    environment.
    """
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_NET_DEVICES", "")
    monkeypatch.delenv("UCX_NET_DEVICES")
    memory = zeros(4 * BLOCK_BYTES, torch.device("cpu"))
    monkeypatch.setattr(
        sys.modules[__name__], "_POOL", memory, raising=False
    )  # must outlive the backend
    return PoolRegion(memory.data_ptr(), 4, BLOCK_BYTES, "cpu")


def own_ports() -> set[Port]:
    return set(listening([os.getpid()]))


def other_addresses() -> list[str]:
    """Of this machine, none of the loopback; one of each interface that UCX can have."""
    found = {name: host for name, host in addresses_here() if name != "lo" and ":" not in host}
    return list(found.values())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1", *other_addresses()])
def test_ucx_listens_on_the_interface_of_kv_host_alone_and_not_before_it_is_opened(
    pool: PoolRegion, host: str
) -> None:
    interfaces = {each: name for name, each in addresses_here()}
    backend, before = NixlBackend("sockets", pool, host), own_ports()
    backend.prepare()
    assert own_ports() <= before  # an earlier test's may end late
    backend.open()
    opened = own_ports() - before
    backend.close()
    assert opened
    assert {port.protocol for port in opened} == {"tcp"}
    assert {interfaces[port.address] for port in opened} == {interfaces.get(host, "lo")}
    assert own_ports() <= before


def test_an_operators_own_devices_win(pool: PoolRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    backend, before = NixlBackend("sockets", pool, "203.0.113.1"), own_ports()
    backend.prepare()
    backend.open()
    opened = own_ports() - before
    backend.close()
    assert {port.address for port in opened} == {"127.0.0.1"}


def test_a_backend_that_cannot_be_opened_leaves_no_listener(pool: PoolRegion) -> None:
    nowhere = replace(pool, address=1 << 40)
    backend, before = NixlBackend("sockets", nowhere, "127.0.0.1"), own_ports()
    backend.prepare()
    backend._ours = lambda *_: (_ for _ in ()).throw(ValueError("no such pool"))  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match="NIXL cannot take the KV pool"):
        backend.open()
    assert own_ports() <= before  # an earlier test's may end late
