"""What every connector does, shown over a plane whose transfers end when the test says so."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from desk_node import Node, node, reason
from peer_process import AT_ONCE_S, CONFIG, FINGERPRINT
from shared_plane import BLOCKS, REGION, pattern

from kvrelay.kv_transfer.connector import (
    Completion,
    Fetched,
    FetchFailed,
    PeerKey,
    Released,
    Settled,
)
from kvrelay.kv_transfer.control import ENDED
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, PeerLost, TransferError
from kvrelay.wire.transfer import Ticket

# Heartbeats that never come within a test: only the answer to the reader's End can tell it that the
# lease is lost.
SLOW = TransferConfig(lease_s=30.0, heartbeat_s=10.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def source(folder: Path) -> Iterator[Node]:
    with node("source", folder) as it:
        for index in range(BLOCKS):
            it.plane.write(index, pattern(index))
        yield it


@pytest.fixture
def reader(folder: Path) -> Iterator[Node]:
    with node("reader", folder) as it:
        yield it


def start(source: Node, reader: Node, name: str = "r") -> None:
    """Get a READ of request `name` in flight that does not end."""
    start_with(reader, source.desk.offer(name, [1, 2], 32), name)


def start_with(reader: Node, ticket: Ticket, name: str = "r") -> None:
    """The same with a ticket."""
    reader.plane.gate.clear()
    reader.desk.watch(name, ticket)
    reader.desk.fetch(name, [1, 2], [3, 4])
    assert reader.plane.posted.wait(20.0)


def test_scattered_blocks_arrive_and_the_source_is_free_again(source: Node, reader: Node) -> None:
    remote, local = [5, 0, 9, 15, 2], [7, 3, 11, 0, 14]
    params = source.desk.offer("r", remote, 80)
    assert (params.remote_engine_id, params.remote_block_ids, params.num_tokens) == (
        "source",
        [remote],
        80,
    )
    assert (params.remote_host, params.remote_port) == source.desk.address
    # As it travels: through JSON and a proxy.
    params = msgspec.json.decode(msgspec.json.encode(params), type=Ticket)
    reader.desk.watch("mine", params)
    reader.desk.fetch("mine", remote, local)
    (fetched,) = reader.wait(1)
    assert isinstance(fetched, Fetched)
    assert (fetched.request_id, fetched.num_bytes) == ("mine", 5 * REGION.block_bytes)
    assert [reader.plane.read(i) for i in local] == [pattern(i) for i in remote]
    assert source.wait(1) == [Released("r", expired=False)]
    mine, theirs = reader.desk.stats(), source.desk.stats()
    assert (mine.fetches, mine.failures, mine.fetched_bytes) == (1, {}, 5 * REGION.block_bytes)
    assert (theirs.leases_granted, theirs.leases_released, theirs.leases_held) == (1, 1, 0)
    assert 0 <= mine.silent_s < 5, "its threads have just been at work"


def test_empty_fetch_releases_without_a_read(source: Node, reader: Node) -> None:
    reader.desk.watch("r", source.desk.offer("r", [1], 16))
    reader.desk.fetch("r", [], [])
    assert reader.wait(1) == [Fetched("r", 0, reader.desk.stats().fetch_s)]
    assert source.wait(1) == [Released("r", expired=False)]
    assert not reader.plane.posted.is_set()


def test_lease_nobody_watches_expires(source: Node) -> None:
    source.desk.offer("r", [1], 16)
    started = time.monotonic()
    assert source.wait(1) == [Released("r", expired=True)]
    assert CONFIG.lease_s - 0.05 < time.monotonic() - started < CONFIG.lease_s + AT_ONCE_S
    assert source.desk.stats().leases_expired == 1


def test_watched_lease_outlives_its_time_and_a_cancel_ends_it(source: Node, reader: Node) -> None:
    reader.desk.watch("r", source.desk.offer("r", [1], 16))
    source.quiet(2.5 * CONFIG.lease_s)
    reader.desk.cancel("r")
    assert source.wait(1) == [Released("r", expired=False)]
    reader.quiet()


def test_release_at_the_source_fails_the_running_fetch_and_quarantines_its_blocks(
    source: Node, reader: Node
) -> None:
    start(source, reader)
    source.desk.release("r")
    assert source.wait(1) == [Released("r", expired=False)]
    (failed,) = reader.wait(1)  # a heartbeat later
    assert reason(failed).startswith("LeaseLost: ")
    reader.quiet()
    reader.plane.gate.set()
    assert reader.wait(1) == [Settled("r")]
    assert reader.desk.stats().failures == {"LeaseLost": 1}


def test_fetch_is_not_admitted_if_the_lease_was_released_before_the_last_byte(folder: Path) -> None:
    with node("source", folder, SLOW) as source, node("reader", folder, SLOW) as reader:
        start(source, reader)
        source.desk.release("r")
        reader.plane.gate.set()
        failed, settled = reader.wait(2)
        assert reason(failed).startswith("LeaseLost: ")
        assert settled == Settled("r")


def test_lease_of_a_second_offer_does_not_confirm_a_fetch_of_the_first(folder: Path) -> None:
    with node("source", folder, SLOW) as source, node("reader", folder, SLOW) as reader:
        start(source, reader)
        source.desk.release("r")
        source.desk.offer("r", [5, 6], 32)
        reader.plane.gate.set()
        assert reason(reader.wait(2)[0]).startswith("LeaseLost: ")
        assert source.desk.stats().leases_held == 1


def test_cancel_in_flight_frees_the_source_at_once_and_settles_once(
    source: Node, reader: Node
) -> None:
    start(source, reader)
    reader.desk.cancel("r")
    assert source.wait(1) == [Released("r", expired=False)]
    reader.quiet()
    reader.plane.gate.set()
    assert reader.wait(1) == [Settled("r")]
    reader.quiet()
    reader.desk.watch("r", source.desk.offer("r", [1], 16))  # the name is free again


def test_fetch_past_its_deadline_fails_and_settles_when_its_bytes_are_in(
    source: Node, reader: Node
) -> None:
    started = time.monotonic()
    start(source, reader)
    (failed,) = reader.wait(1)
    assert reason(failed).startswith("TransferTimeout: fetch of 2 blocks")
    assert (
        CONFIG.transfer_deadline_s
        <= time.monotonic() - started
        < CONFIG.transfer_deadline_s + AT_ONCE_S
    )
    assert source.wait(1) == [Released("r", expired=False)]
    reader.plane.gate.set()
    assert reader.wait(1) == [Settled("r")]


def test_broken_read_stays_quarantined_until_it_is_seen_to_end(source: Node, reader: Node) -> None:
    start(source, reader)
    reader.plane.error = TransferError("half of it broke")
    assert reader.wait(1) == [FetchFailed("r", "TransferError: half of it broke")]
    reader.quiet()
    reader.plane.error = PeerLost("all of it")
    assert reader.wait(1) == [Settled("r")]


def cut(source: Node, reader: Node) -> None:
    """The connection ends; both go on."""
    reader.desk.on_disconnect(PeerKey(*source.desk.address, source.desk.generation), ENDED)


def test_a_peer_is_met_again_while_a_read_of_it_hangs(source: Node, reader: Node) -> None:
    start(source, reader)
    cut(source, reader)
    (failed,) = reader.wait(1)
    assert reason(failed).startswith("PeerLost: the connection to")
    again = source.desk.offer("again", [5, 6], 32)
    reader.plane.posted.clear()
    reader.desk.watch("again", again)
    reader.desk.fetch("again", [5, 6], [7, 8])
    assert reader.plane.posted.wait(20.0)  # welcomed, renewed and reading
    reader.woken.clear()  # a thread that saw the failure in its turn, too, may have told it again
    reader.quiet()  # the blocks of the first one are where they were
    reader.plane.gate.set()
    settled, fetched = sorted(reader.wait(2), key=lambda event: isinstance(event, Fetched))
    assert settled == Settled("r")
    assert isinstance(fetched, Fetched)
    assert [reader.plane.read(block) for block in (7, 8)] == [pattern(5), pattern(6)]


def test_a_broken_read_stays_quarantined_while_its_peer_is_only_out_of_touch(
    source: Node, reader: Node
) -> None:
    start(source, reader)
    reader.plane.error = TransferError("half of it broke")
    assert reason(reader.wait(1)[0]).startswith("TransferError")
    cut(source, reader)
    reader.quiet(3 * CONFIG.heartbeat_s)  # met again meanwhile, and no wiser
    source.desk.close()
    assert reader.wait(1) == [Settled("r")]


def test_a_broken_read_settles_when_somebody_else_answers_for_its_peer(
    folder: Path, reader: Node
) -> None:
    with node("source", folder) as source:
        port = source.desk.address[1]
        start(source, reader)
        reader.plane.error = TransferError("half of it broke")
        reader.wait(1)
        reader.desk._control.probe = lambda peer: None  # type: ignore[method-assign]
    reader.quiet()
    with node("source", folder, dataclasses.replace(CONFIG, kv_port=port)):
        assert reader.wait(1) == [Settled("r")]


def test_a_way_that_the_plane_has_lost_is_looked_for_anew(source: Node, reader: Node) -> None:
    start(source, reader)
    reader.plane.peers.clear()
    reader.plane.error = PeerLost("the cable")
    failed, settled = reader.wait(2)
    assert (reason(failed), settled) == ("PeerLost: the cable", Settled("r"))
    reader.plane.error = None
    reader.plane.gate.set()
    reader.desk.watch("again", source.desk.offer("again", [5], 16))
    reader.desk.fetch("again", [5], [7])
    assert isinstance(reader.wait(1)[0], Fetched)
    assert reader.plane.read(7) == pattern(5)


def test_broken_read_settles_when_the_peer_is_gone(folder: Path, reader: Node) -> None:
    with node("source", folder) as source:
        start(source, reader)
        reader.plane.error = TransferError("half of it broke")
        reader.wait(1)
    assert reader.wait(1) == [Settled("r")]


def test_source_that_closes_fails_waiting_fetches_and_is_met_anew(
    folder: Path, reader: Node
) -> None:
    with node("source", folder) as source:
        start(source, reader)
        second = source.desk.offer("second", [1], 16)
        reader.desk.watch("second", second)
        closed_at = time.monotonic()
    (failed,) = reader.wait(1)
    assert reason(failed).startswith("PeerLost: the connection to 127.0.0.1:")
    assert time.monotonic() - closed_at < AT_ONCE_S
    reader.plane.gate.set()
    assert reader.wait(1) == [Settled("r")]
    reader.desk.fetch("second", [1], [1])
    failed, settled = reader.wait(2)
    assert reason(failed).startswith("PeerLost: ")
    assert settled == Settled("second")
    # Somebody else behind the same address: the old generation is refused, the new one is read.
    again = dataclasses.replace(CONFIG, kv_port=second.remote_port or 0)
    with node("source", folder, again) as source:
        reader.desk.watch("old", second)
        reader.desk.fetch("old", [1], [1])
        assert "has restarted: the KV is of" in reason(reader.wait(2)[0])
        reader.desk.watch("new", source.desk.offer("new", [1], 16))
        reader.desk.fetch("new", [1], [1])
        assert isinstance(reader.wait(1)[0], Fetched)


def test_refused_connection_fails_the_fetch_at_once(reader: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    params = Ticket(
        remote_host="127.0.0.1", remote_port=port, generation="g", remote_request_id="r"
    )
    reader.desk.watch("r", params)
    reader.desk.fetch("r", [1], [1])
    started = time.monotonic()
    failed, settled = reader.wait(2)
    assert reason(failed).startswith(
        f"PeerLost: the connection to 127.0.0.1:{port} has ended or was refused"
    )
    assert settled == Settled("r")
    assert time.monotonic() - started < AT_ONCE_S


def test_peer_that_never_answers_fails_the_fetch_within_a_lease(reader: Node) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        params = Ticket(
            remote_host="127.0.0.1", remote_port=port, generation="g", remote_request_id="r"
        )
        reader.desk.watch("r", params)
        reader.desk.fetch("r", [1], [1])
        failed, settled = reader.wait(2)
    assert (
        reason(failed) == f"PeerLost: no answer from 127.0.0.1:{port} within {CONFIG.lease_s:g} s"
    )
    assert settled == Settled("r")


@pytest.mark.parametrize(
    "params",
    [
        Ticket(),
        Ticket(remote_host="127.0.0.1", remote_port=1, generation="g"),
        Ticket(remote_host="127.0.0.1", remote_port=1, remote_request_id="r"),
        Ticket(remote_host="bad host;", remote_port=1, generation="g", remote_request_id="r"),
        Ticket(
            remote_host="127.0.0.1", remote_port=1, generation="g", remote_request_id="r" * 1000
        ),
    ],
)
def test_params_that_lead_nowhere_fail_the_fetch(reader: Node, params: Ticket) -> None:
    reader.desk.watch("r", params)
    reader.desk.fetch("r", [1], [1])
    failed, settled = reader.wait(2)
    assert reason(failed)
    assert settled == Settled("r")


def test_other_kv_dtype_is_refused_naming_both_values_before_any_metadata_is_used(
    folder: Path, source: Node
) -> None:
    other = msgspec.structs.replace(FINGERPRINT, kv_dtype="bfloat16")
    with node("reader", folder, fingerprint=other) as reader:
        reader.desk.watch("r", source.desk.offer("r", [1], 16))
        reader.desk.fetch("r", [1], [1])
        failed, settled = reader.wait(2)
        assert reason(failed).startswith("Incompatible: 127.0.0.1:")
        assert "kv_dtype is 'bfloat16' here and 'float32' there" in reason(failed)
        assert settled == Settled("r")
        assert reader.plane.peers == {}


@pytest.mark.parametrize(("oldest", "newest"), [(1, 0), (1, 2), (1, 1)])
def test_nodes_of_two_releases_hand_over_in_both_directions(
    folder: Path,
    source: Node,
    reader: Node,
    oldest: int,
    newest: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Version 1 said no newest one; a later release speaks ours, too."""
    other = msgspec.structs.replace(FINGERPRINT, protocol=oldest, protocol_newest=newest)
    with node("other", folder, fingerprint=other) as it, caplog.at_level("INFO"):
        for name, (giving, taking) in {"a": (source, it), "b": (it, reader)}.items():
            taking.desk.watch(name, giving.desk.offer(name, [1], 16))
            taking.desk.fetch(name, [1], [1])
            assert isinstance(taking.wait(1)[0], Fetched)
    assert [
        line.endswith("by shared, protocol 1") for line in caplog.messages if "comes by" in line
    ] == [True, True]


def test_nodes_without_a_common_version_are_no_pair_and_the_reason_names_both_ranges(
    folder: Path, source: Node
) -> None:
    other = msgspec.structs.replace(FINGERPRINT, protocol=2, protocol_newest=3)
    with node("reader", folder, fingerprint=other) as reader:
        reader.desk.watch("r", source.desk.offer("r", [1], 16))
        reader.desk.fetch("r", [1], [1])
        assert "protocol is 2 to 3 here and 1 there" in reason(reader.wait(2)[0])
        assert reader.plane.peers == {}


def test_many_requests_of_one_peer_end_once_each(source: Node, reader: Node) -> None:
    names = [f"r{i}" for i in range(60)]
    for index, name in enumerate(names):
        reader.desk.watch(name, source.desk.offer(name, [index % BLOCKS], 16))
    for index, name in enumerate(names):
        if index % 3 == 0:
            reader.desk.cancel(name)
        else:
            reader.desk.fetch(name, [index % BLOCKS], [(index + 5) % BLOCKS])
    assert sorted(e.request_id for e in reader.wait(40)) == sorted(
        n for i, n in enumerate(names) if i % 3
    )
    assert {e.request_id for e in source.wait(60)} == set(names)
    assert source.desk.stats().leases_held == 0


def test_garbage_on_the_control_port_stops_nobody(source: Node, reader: Node) -> None:
    host, port = source.desk.address
    with socket.create_connection((host, port), timeout=2.0) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{host}:{port}")
        for frames in ([b""], [b"garbage"], [b"a", b"b", b"c"], [b"\x81\xa4type\xa5hello"]):
            dealer.send_multipart(frames)
            assert dealer.poll(2000)
            assert b"not understood" in dealer.recv()
        dealer.send(b"x" * (2 << 20))  # over the limit: the connection is closed
        assert dealer.poll(200) == 0
    reader.desk.watch("r", source.desk.offer("r", [1], 16))
    reader.desk.fetch("r", [1], [1])
    assert isinstance(reader.wait(1)[0], Fetched)


def test_misuse_is_refused(source: Node, reader: Node) -> None:
    params = source.desk.offer("r", [1], 16)
    with pytest.raises(ValueError, match="'r' already has a lease"):
        source.desk.offer("r", [1], 16)
    with pytest.raises(ValueError, match="over the limit of 256"):
        source.desk.offer("r" * 257, [1], 16)
    reader.desk.watch("r", params)
    with pytest.raises(ValueError, match="already watched"):
        reader.desk.watch("r", params)
    with pytest.raises(ValueError, match="outside the pool of 16"):
        reader.desk.fetch("r", [1], [BLOCKS])
    reader.desk.cancel("unknown")
    source.desk.release("unknown")


def test_address_in_use_is_a_config_error(folder: Path, source: Node) -> None:
    taken = dataclasses.replace(CONFIG, kv_port=source.desk.address[1])
    with pytest.raises(
        ConfigError, match=f"cannot listen at kv_host '127.0.0.1', kv_port {taken.kv_port}"
    ):
        Node("other", folder, taken, FINGERPRINT)


def test_close_takes_no_time_and_gives_watched_leases_back(folder: Path, source: Node) -> None:
    with node("reader", folder) as reader:
        start(source, reader)
        before = time.monotonic()
    assert time.monotonic() - before < AT_ONCE_S
    assert reader.plane.has_closed.is_set()
    assert source.wait(1) == [Released("r", expired=False)]


def test_step_loop_hears_of_a_broken_thread(reader: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(reader.plane, "progress", explode)
    assert reader.woken.wait(2.0)
    with pytest.raises(RuntimeError, match="a thread of the KV connector has ended: boom"):
        reader.desk.events()


def test_growing_kv_is_read_as_it_grows(source: Node, reader: Node) -> None:
    ticket = source.desk.offer("r", [5, 0, 9], 48, ready=1)
    assert ticket.growing
    reader.desk.watch("mine", ticket)
    reader.desk.fetch("mine", [5, 0, 9], [7, 3, 11])
    wait_until(lambda: reader.plane.read(7) == pattern(5))
    source.desk.grow("r", 2)
    wait_until(lambda: reader.plane.read(3) == pattern(0))
    reader.quiet()
    final = source.desk.complete("r", Completion([42]))
    assert final is not None
    assert not final.growing
    assert final.remote_block_ids == ticket.remote_block_ids
    (fetched,) = reader.wait(1)
    assert isinstance(fetched, Fetched)
    assert (fetched.num_bytes, fetched.completion) == (3 * REGION.block_bytes, Completion([42]))
    assert fetched.exposed_s < fetched.seconds
    assert reader.plane.read(11) == pattern(9)
    assert source.wait(1) == [Released("r", expired=False)]
    assert source.desk.complete("r", Completion([42])) is None


def test_a_reader_that_comes_late_hears_all_at_once(source: Node, reader: Node) -> None:
    ticket = source.desk.offer("r", [5, 0], 32, ready=0)
    source.desk.complete("r", Completion([42]))
    reader.desk.watch("mine", ticket)
    reader.desk.fetch("mine", [5, 0], [7, 3])
    (fetched,) = reader.wait(1)
    assert isinstance(fetched, Fetched)
    assert fetched.completion == Completion([42])


def test_a_second_reader_takes_over_a_growing_ticket(
    source: Node, reader: Node, folder: Path
) -> None:
    ticket = source.desk.offer("r", [5, 0], 32, ready=1)
    with node("first", folder) as first:
        first.desk.watch("mine", ticket)
        first.desk.fetch("mine", [5, 0], [1, 2])
        wait_until(lambda: first.plane.read(1) == pattern(5))
        first.desk._control.close(1.0)  # without a word, as a killed one
    reader.desk.watch("mine", ticket)
    reader.desk.fetch("mine", [5, 0], [7, 3])
    wait_until(lambda: reader.plane.read(7) == pattern(5))
    source.desk.complete("r", Completion([42]))
    assert isinstance(reader.wait(1)[0], Fetched)


def test_a_second_reader_takes_over_with_the_complete_ticket(
    source: Node, reader: Node, folder: Path
) -> None:
    ticket = source.desk.offer("r", [5, 0], 32, ready=1)
    with node("first", folder) as first:
        first.desk.watch("mine", ticket)
        first.desk.fetch("mine", [5, 0], [1, 2])
        wait_until(lambda: first.plane.read(1) == pattern(5))
        first.desk._control.close(1.0)  # without a word, as a killed one
    complete = source.desk.complete("r", Completion([42]))
    assert complete is not None
    reader.desk.watch("mine", complete)
    reader.desk.fetch("mine", [5, 0], [7, 3])
    assert isinstance(reader.wait(1)[0], Fetched)
    assert source.wait(1) == [Released("r", expired=False)]


def test_the_farewell_of_a_reader_that_was_replaced_ends_nothing(
    source: Node, reader: Node, folder: Path
) -> None:
    ticket = source.desk.offer("r", [5, 0], 32)
    with node("first", folder) as first:
        first.desk.watch("mine", ticket)
        wait_until(lambda: first.desk.way(ticket) is not None)
        growth = source.desk._growths._growths["r"]
        wait_until(lambda: growth.follower is not None)
        follower = growth.follower
        start_with(reader, ticket)
        wait_until(lambda: growth.follower != follower)  # the source knows that it was replaced
        first.desk.cancel("mine")
    source.quiet()
    reader.plane.gate.set()
    assert isinstance(reader.wait(1)[0], Fetched)
    assert source.wait(1) == [Released("r", expired=False)]


def test_a_reader_that_was_replaced_may_admit_what_it_has_read_and_leaves_the_lease_alone(
    source: Node, reader: Node, folder: Path
) -> None:
    ticket = source.desk.offer("r", [1, 2], 32)
    start_with(reader, ticket)
    with node("second", folder) as second:
        second.desk.watch("mine", ticket)
        second.renewed("mine")
        reader.plane.gate.set()
        assert isinstance(reader.wait(1)[0], Fetched)
        source.quiet()
        second.desk.fetch("mine", [1, 2], [3, 4])
        assert isinstance(second.wait(1)[0], Fetched)
    assert source.wait(1) == [Released("r", expired=False)]


def test_a_growing_ticket_that_is_released_fails_its_fetch(source: Node, reader: Node) -> None:
    reader.desk.watch("mine", source.desk.offer("r", [5, 0], 32, ready=1))
    reader.desk.fetch("mine", [5, 0], [7, 3])
    wait_until(lambda: reader.plane.read(7) == pattern(5))
    source.desk.release("r")
    failed, settled = reader.wait(2)
    assert reason(failed).startswith("LeaseLost:")
    assert settled == Settled("mine")


def test_a_hung_step_loop_keeps_no_lease_alive(
    source: Node, reader: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.kv_transfer.transfer_engine.STALL_S", 0.0)
    reader.desk.watch("mine", source.desk.offer("r", [5, 0], 32, ready=1))
    reader.desk.fetch("mine", [5, 0], [7, 3])
    assert reason(reader.wait(2)[0]).startswith("LeaseLost:")


def wait_until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)
