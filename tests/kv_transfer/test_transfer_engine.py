"""A transfer engine over a backend whose transfers end when the test says so."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from engine_node import (
    AT_ONCE_S,
    CONFIG,
    FINGERPRINT,
    SHORT,
    SLOW,
    SharedNode,
    node,
    reason,
)
from shared_backend import REGION, pattern

from kvrelay.kv_transfer.connector import (
    Released,
    Settled,
)
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.transfer import Ticket


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SharedNode]:
    with node("source", tmp_path) as it:
        yield it


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[SharedNode]:
    with node("reader", tmp_path) as it:
        yield it


def start(source: SharedNode, reader: SharedNode, ticket: Ticket | None = None) -> None:
    """Get a READ of request r in flight that does not end."""
    reader.backend.gate.clear()
    reader.fetch("r", ticket or source.engine.offer("r", [1, 2], 32), [1, 2], [3, 4])
    assert reader.backend.posted.wait(20.0)


def test_scattered_blocks_arrive_and_the_source_is_free_again(
    source: SharedNode, reader: SharedNode
) -> None:
    remote, local = [5, 0, 9, 15, 2], [7, 3, 11, 0, 14]
    params = source.engine.offer("r", remote, 80)
    assert (params.remote_engine_id, params.remote_block_ids, params.num_tokens) == (
        "source",
        [remote],
        80,
    )
    assert (params.remote_host, params.remote_port) == source.engine.address
    # As it travels: through JSON and a proxy.
    params = msgspec.json.decode(msgspec.json.encode(params), type=Ticket)
    reader.fetch("mine", params, remote, local)
    fetched = reader.fetched()
    assert (fetched.request_id, fetched.num_bytes) == ("mine", 5 * REGION.block_bytes)
    assert [reader.backend.read(i) for i in local] == [pattern(i) for i in remote]
    assert source.wait(1) == [Released("r", expired=False)]
    mine, theirs = reader.engine.stats(), source.engine.stats()
    assert (mine.fetches, mine.failures, mine.fetched_bytes) == (1, {}, 5 * REGION.block_bytes)
    assert (theirs.leases_granted, theirs.leases_released) == (1, 1)
    assert 0 <= mine.silent_s < 5, "its threads have just been at work"


@pytest.mark.parametrize("again", [False, True])
def test_a_fetch_is_not_admitted_if_the_lease_ended_before_the_last_byte(
    tmp_path: Path, again: bool
) -> None:
    with node("source", tmp_path, SLOW) as source, node("reader", tmp_path, SLOW) as reader:
        start(source, reader)
        source.engine.release("r")
        if again:  # a second offer confirms no fetch of the first
            source.engine.offer("r", [5, 6], 32)
        reader.backend.gate.set()
        assert reader.fails().startswith("LeaseLost: ")
        assert len(source.engine._offers) == again


def test_source_that_closes_fails_waiting_fetches_and_is_met_anew(
    tmp_path: Path, reader: SharedNode
) -> None:
    with node("source", tmp_path) as source:
        start(source, reader)
        second = source.engine.offer("second", [1], 16)
        reader.engine.watch("second", second)
    (failed,) = reader.wait(1)
    assert reason(failed).startswith("PeerLost: the connection to 127.0.0.1:")
    reader.backend.gate.set()
    assert reader.wait(1) == [Settled("r")]
    reader.engine.fetch("second", [1], [1])
    assert reader.fails().startswith("PeerLost: ")
    # Somebody else behind the same address: the old generation is refused, the new one is read.
    again = dataclasses.replace(CONFIG, kv_port=second.remote_port or 0)
    with node("source", tmp_path, again) as source:
        reader.fetch("old", second, [1], [1])
        assert "has restarted: the KV is of" in reason(reader.wait(2)[0])
        reader.fetch("new", source.engine.offer("new", [1], 16), [1], [1])
        reader.fetched()


def ticket_to(port: int) -> Ticket:
    host = "127.0.0.1"
    return Ticket(remote_host=host, remote_port=port, generation="g", remote_request_id="r")


def test_refused_connection_fails_the_fetch_at_once(reader: SharedNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reader.fetch("r", ticket_to(port), [1], [1])
    why = f"PeerLost: the connection to 127.0.0.1:{port} has ended or was refused"
    assert reader.fails().startswith(why)


def test_peer_that_never_answers_fails_the_fetch_within_a_lease(tmp_path: Path) -> None:
    with (
        node("reader", tmp_path, SHORT) as reader,
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as mute,
    ):
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        reader.fetch("r", ticket_to(port), [1], [1])
        assert reader.fails() == f"PeerLost: no answer from 127.0.0.1:{port} within 2 s"


@pytest.mark.parametrize(
    "fields",
    [
        {"remote_host": ""},
        {"remote_request_id": ""},
        {"generation": ""},
        {"remote_host": "bad host;"},
    ],
)
def test_params_that_lead_nowhere_fail_the_fetch(
    reader: SharedNode, fields: dict[str, str]
) -> None:
    reader.fetch("r", msgspec.structs.replace(ticket_to(1), **fields), [1], [1])
    assert reader.fails()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_dtype": "bfloat16"}, "kv_dtype is 'bfloat16' here and 'float32' there"),
        ({"protocol": 2, "protocol_newest": 3}, "protocol is 2 to 3 here and 1 there"),
    ],
)
def test_another_fingerprint_is_refused_naming_both_values_before_any_metadata_is_used(
    tmp_path: Path, source: SharedNode, fields: dict[str, str], why: str
) -> None:
    other = msgspec.structs.replace(FINGERPRINT, **fields)
    with node("reader", tmp_path, fingerprint=other) as reader:
        reader.fetch("r", source.engine.offer("r", [1], 16), [1], [1])
        refused = reader.fails()
        assert refused.startswith("Incompatible: 127.0.0.1:")
        assert why in refused
        assert reader.backend.peers == {}


@pytest.mark.parametrize(("oldest", "newest"), [(1, 0), (1, 2), (1, 1)])
def test_nodes_of_two_releases_hand_over_in_both_directions(
    tmp_path: Path,
    source: SharedNode,
    reader: SharedNode,
    oldest: int,
    newest: int,
) -> None:
    """Version 1 said no newest one; a later release speaks ours, too."""
    other = msgspec.structs.replace(FINGERPRINT, protocol=oldest, protocol_newest=newest)
    with node("other", tmp_path, fingerprint=other) as it:
        for name, (giving, taking) in {"a": (source, it), "b": (it, reader)}.items():
            taking.fetch(name, giving.engine.offer(name, [1], 16), [1], [1])
            taking.fetched()


def test_garbage_on_the_control_port_stops_nobody(source: SharedNode, reader: SharedNode) -> None:
    host, port = source.engine.address
    with socket.create_connection((host, port), timeout=2.0) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{host}:{port}")
        for frames in ([b""], [b"garbage"], [b"a", b"b", b"c"], [b"\x81\xa4type\xa5hello"]):
            dealer.send_multipart(frames)
            assert dealer.poll(AT_ONCE_S * 1e3)
            assert b"not understood" in dealer.recv()
        dealer.send(b"x" * (2 << 20))  # over the limit: the connection is closed
        assert dealer.poll(200) == 0
    reader.fetch("r", source.engine.offer("r", [1], 16), [1], [1])
    reader.fetched()


def test_address_in_use_is_a_config_error(tmp_path: Path, source: SharedNode) -> None:
    port = source.engine.address[1]
    taken = dataclasses.replace(CONFIG, kv_port=port)
    why = f"cannot listen at kv_host '127.0.0.1', kv_port {port}"
    with pytest.raises(ConfigError, match=why):
        SharedNode("other", tmp_path, taken)


def test_close_gives_watched_leases_back(tmp_path: Path, source: SharedNode) -> None:
    with node("reader", tmp_path) as reader:
        start(source, reader)
    assert reader.backend.has_closed.wait(AT_ONCE_S)
    assert source.wait(1) == [Released("r", expired=False)]


def test_step_loop_hears_of_a_broken_thread(
    reader: SharedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(reader.backend, "progress", explode)
    assert reader.woken.wait(AT_ONCE_S)
    with pytest.raises(RuntimeError, match="a thread of the KV connector has ended: boom"):
        reader.engine.events()


def test_a_hung_step_loop_keeps_no_lease_alive(
    source: SharedNode, reader: SharedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.kv_transfer.transfer_engine.STALL_S", 0.0)
    reader.fetch("mine", source.engine.offer("r", [5, 0], 32, ready=1), [5, 0], [7, 3])
    assert reason(reader.wait(2)[0]).startswith("LeaseLost:")
