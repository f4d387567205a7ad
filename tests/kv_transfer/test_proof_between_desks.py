"""The proof of what was read travels over real sockets at once, not with the next heartbeat."""

from __future__ import annotations

import time
from pathlib import Path

from desk_node import node
from shared_plane import BLOCKS, pattern

from kvrelay.kv_transfer.connector import FetchFailed, Settled
from kvrelay.wire.config import TransferConfig

# Heartbeats that never come within a test.
SLOW = TransferConfig(lease_s=30.0, heartbeat_s=10.0)


def test_what_was_read_is_proven_a_round_trip_later(tmp_path: Path) -> None:
    with node("source", tmp_path, SLOW) as source, node("reader", tmp_path, SLOW) as reader:
        for index in range(BLOCKS):
            source.plane.write(index, pattern(index))
        ticket = source.desk.offer("r", [5, 6, 7], 48, ready=0)
        reader.desk.watch("mine", ticket)
        reader.desk.fetch("mine", [5, 6, 7], [1, 2, 3])
        source.desk.grow("r", 2)
        until = time.monotonic() + 10.0
        while reader.desk._fetches._fetches["mine"].verified < 2:
            assert time.monotonic() < until
            time.sleep(0.005)
        reader.plane.gate.clear()  # the last block is being read, from now on for ever
        source.desk.grow("r", 3)
        source.desk.close()
        (failed,) = reader.wait(1)
        assert isinstance(failed, FetchFailed)
        assert (failed.cause, failed.verified) == ("PeerLost", 2)
        assert [reader.plane.read(i) for i in (1, 2)] == [pattern(i) for i in (5, 6)]
        reader.plane.gate.set()
        while reader.desk._fetches._fetches:
            assert time.monotonic() < until
            time.sleep(0.005)
        assert reader.desk.events() in ([], [Settled("mine")])
