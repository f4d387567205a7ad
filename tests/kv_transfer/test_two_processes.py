"""Leases and fences between two processes, one of which is stopped or killed.

Over the test plane and over the direct one, which needs nobody's help to read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from desk_node import Node, node, reason
from peer_process import AT_ONCE_S, CONFIG, PeerProcess, of_another_host, peer_process
from real_node import RealNode
from shared_plane import BLOCK_BYTES, BLOCKS

from kvrelay.kv_transfer.connector import Fetched, Released, Settled


@pytest.fixture(params=["shared", "direct"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def here(kind: str, tmp_path: Path) -> Iterator[Node | RealNode]:
    if kind == "shared":
        with node("here", tmp_path) as it:
            yield it
        return
    real = RealNode("here", kind, BLOCKS, BLOCK_BYTES)
    yield real
    real.desk.close()


@pytest.fixture
def child(kind: str, tmp_path: Path) -> Iterator[PeerProcess]:
    arguments = (
        [str(tmp_path / "child")] if kind == "shared" else [str(BLOCKS), str(BLOCK_BYTES), "cpu"]
    )
    with peer_process(kind, *arguments) as it:
        yield it


def hand_to(child: PeerProcess, here: Node | RealNode, name: str) -> None:
    """Offer here, watch there."""
    child.ask("watch", name, msgspec.to_builtins(here.desk.offer(name, [1, 2], 32)))


def test_leases_of_a_killed_reader_expire(here: Node | RealNode, child: PeerProcess) -> None:
    child.ask("gate", False)
    hand_to(child, here, "queued")
    hand_to(child, here, "fetching")
    child.ask("fetch", "fetching", [1, 2], [3, 4])
    assert child.ask("posted")
    here.quiet(CONFIG.lease_s * 1.3)  # both are kept alive
    child.kill()
    killed_at = time.monotonic()
    assert set(here.wait(2)) == {
        Released("queued", expired=True),
        Released("fetching", expired=True),
    }
    assert time.monotonic() - killed_at < CONFIG.lease_s + AT_ONCE_S


def test_reader_that_slept_past_its_lease_never_admits(
    here: Node | RealNode, child: PeerProcess
) -> None:
    child.ask("gate", False)
    hand_to(child, here, "queued")
    hand_to(child, here, "fetching")
    child.ask("fetch", "fetching", [1, 2], [3, 4])
    assert child.ask("posted")
    child.stop()
    assert {e.request_id for e in here.wait(2)} == {"queued", "fetching"}  # both leases ran out
    child.go_on()
    child.ask("gate", True)
    failed, settled = child.events(2, within_s=AT_ONCE_S)
    assert failed[:2] == ["FetchFailed", "fetching"]
    assert failed[2].startswith("LeaseLost: ")
    assert settled == ["Settled", "fetching"]
    child.ask("fetch", "queued", [1], [3])
    failed, settled = child.events(2, within_s=AT_ONCE_S)
    assert failed[:2] == ["FetchFailed", "queued"]
    assert failed[2].startswith("LeaseLost: ")


def test_reader_that_slept_shorter_than_its_lease_goes_on(
    here: Node | RealNode, child: PeerProcess
) -> None:
    child.ask("gate", False)
    hand_to(child, here, "r")
    child.ask("fetch", "r", [1, 2], [3, 4])
    assert child.ask("posted")
    child.stop()
    here.quiet(CONFIG.lease_s * 0.2)
    child.go_on()
    child.ask("gate", True)
    assert [e[:2] for e in child.events(1, within_s=AT_ONCE_S)] == [["Fetched", "r"]]
    assert here.wait(1) == [Released("r", expired=False)]


def test_killed_source_fails_the_fetch_at_once(here: Node | RealNode, child: PeerProcess) -> None:
    here.plane.gate.clear()
    here.desk.watch("r", child.offer("r", [1, 2]))
    here.desk.fetch("r", [1, 2], [3, 4])
    assert here.plane.posted.wait(20.0)
    child.kill()
    (failed,) = here.wait(1, within_s=AT_ONCE_S)
    assert reason(failed).startswith("PeerLost: ")
    here.plane.gate.set()
    assert here.wait(1) == [Settled("r")]


def test_stopped_source_cannot_confirm_and_its_fetch_times_out(
    here: Node | RealNode, child: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another_host(monkeypatch)
    here.plane.gate.clear()
    here.desk.watch("r", child.offer("r", [1, 2]))
    here.desk.fetch("r", [1, 2], [3, 4])
    assert here.plane.posted.wait(20.0)
    child.stop()
    here.plane.gate.set()  # the bytes arrive all the same, as they would by DMA
    failed, settled = here.wait(2)
    assert reason(failed).startswith("TransferTimeout: ")
    assert reason(failed).count("unconfirmed") == 1
    assert settled == Settled("r")


def test_stopped_source_on_this_host_need_not_confirm(
    here: Node | RealNode, child: PeerProcess
) -> None:
    here.plane.gate.clear()
    here.desk.watch("r", child.offer("r", [1, 2]))
    here.desk.fetch("r", [1, 2], [3, 4])
    assert here.plane.posted.wait(20.0)
    child.stop()
    here.plane.gate.set()
    (fetched,) = here.wait(1)
    assert isinstance(fetched, Fetched), fetched
    child.go_on()
    assert [event[:2] for event in child.events(1, within_s=AT_ONCE_S)] == [["Released", "r"]]


def test_a_lease_that_ended_is_not_seen_as_held(here: Node | RealNode, child: PeerProcess) -> None:
    here.plane.gate.clear()
    here.desk.watch("r", child.offer("r", [1, 2]))
    here.desk.fetch("r", [1, 2], [3, 4])
    assert here.plane.posted.wait(20.0)
    child.ask("release", "r")
    here.plane.gate.set()
    failed, settled = here.wait(2)
    assert reason(failed).startswith("LeaseLost: ")
    assert settled == Settled("r")


def test_no_read_starts_towards_a_source_that_went_silent(
    here: Node | RealNode, child: PeerProcess
) -> None:
    here.desk.watch("r", child.offer("r", [1, 2]))
    assert child.events(1, within_s=CONFIG.lease_s * 1.3) == []  # watched: renewed
    child.stop()
    here.quiet(CONFIG.lease_s)
    here.desk.fetch("r", [1, 2], [3, 4])
    failed, settled = here.wait(2)
    assert "no renewed lease" in reason(failed)
    assert settled == Settled("r")
    assert not here.plane.posted.is_set()
