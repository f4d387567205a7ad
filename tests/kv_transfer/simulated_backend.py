"""The backend of the simulated world: READs whose blocks land one by one, and late, whoever
still wants them.

Over the real `BackendThread`, whose turns are events here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from simulated_world import CLOCK, QUICK_S, Violation

import kvrelay.kv_transfer.backend
from kvrelay.kv_transfer.backend import BackendJob, BackendThread, Open, Source
from kvrelay.kv_transfer.connector import Read
from kvrelay.wire.errors import PeerLost, TransferError

if TYPE_CHECKING:
    from simulated_node import SimulatedNode


class SimulatedBackendThread(BackendThread):
    """The real one, whose turns are events."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        node = CLOCK.world.here
        assert node is not None
        self._node, self._turn_at = node, float("inf")
        node.backend_thread = self

    def start(self) -> None:
        pass

    def do(self, job: BackendJob) -> None:
        if isinstance(job, Open):
            self._carry_out(job)
            return
        if isinstance(job, Read):
            self._node.read_begins(job)
        super().do(job)
        self.wake()

    def wake(self) -> None:
        """A turn soon."""
        world = self._node.world
        at = world.now + world.rng.random() * QUICK_S
        if at < self._turn_at or self._turn_at < world.now:
            self._turn_at = at
            world.after(at - world.now, self.turn)

    def turn(self) -> None:
        if not self._node.running:
            return
        self._turn_at = float("inf")
        with self._node.at_work():
            while self._todo:
                self._carry_out(self._todo.popleft())
            self._running = [running for running in self._running if not self._ended(running)]


class SimulatedChecksums:
    """The thread of checksums: they are computed a little later, and heard of later still."""

    def __init__(self, *_: object) -> None:
        node = CLOCK.world.here
        assert node is not None
        self._node = node

    def ask(self, blocks: Sequence[int], done: Callable[[list[bytes]], None]) -> None:
        self._soon(partial(self._compute, list(blocks), done))

    def silent_s(self) -> float:
        return 0.0

    def close(self, timeout_s: float) -> None:
        pass

    def _soon(self, what: Callable[[], None]) -> None:
        world = self._node.world
        world.after(world.rng.random() * QUICK_S, partial(self._when_it_runs, what))

    def _when_it_runs(self, what: Callable[[], None]) -> None:
        node = self._node
        if node.running:
            with node.at_work():
                what()
        elif node.alive:
            node.world.after(node.stopped_until - node.world.now, partial(self._when_it_runs, what))

    def _compute(self, blocks: list[int], done: Callable[[list[bytes]], None]) -> None:
        found = [repr(self._node.device.memory[block]).encode() for block in blocks]
        sums = [hashlib.blake2b(one, digest_size=8).digest() for one in found]
        self._soon(partial(done, sums))


@dataclass(eq=False, slots=True)
class Transfer:
    """A READ under way: blocks land one by one, and nothing but the end of a node stops them."""

    source: SimulatedNode
    generation: str
    missing: set[tuple[int, int]]
    broken: TransferError | None = None
    over: PeerLost | None = None


class SimulatedBackend:
    """A `TransferBackend` over the pools of the world.

    READs land late, also those that nobody wants any more, and those that broke. Where nodes read
    blindly (as the direct backend does) none breaks, and no way is lost; else both happen, and the
    end of a READ that broke is never seen (as NIXL's).
    """

    helps_readers = False

    def __init__(self, node: SimulatedNode) -> None:
        self._node, self._world = node, node.world
        self._peers: dict[str, SimulatedNode] = {}
        self._broken_ways: set[str] = set()
        self.transfers: list[Transfer] = []

    def prepare(self) -> None:
        pass

    def open(self) -> bytes:
        return str(len(self._world.nodes)).encode()

    def add_peer(self, source: Source) -> None:
        there = self._world.nodes[int(source.metadata)]
        if not there.alive:
            raise TransferError("nobody is there to be joined")
        self._peers[source.generation] = there

    def post_read(
        self, there: Source, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> object:
        generation, world = there.generation, self._world
        source = self._peers[generation]
        if world.rng.random() < 0.03:
            raise TransferError("the READ was refused")
        transfer = Transfer(source, generation, set(zip(remote_blocks, local_blocks, strict=True)))
        if generation in self._broken_ways:
            transfer.missing.clear()
            transfer.over = PeerLost("the way is lost")
            return transfer
        self.transfers.append(transfer)
        longest_s = world.slowest_read_s * world.rng.random()
        for pair in sorted(transfer.missing):
            world.after(world.rng.random() * longest_s, partial(self._land, transfer, pair))
        if not world.blind_reads and world.rng.random() < 0.03:
            world.after(world.rng.random() * longest_s, partial(self._break, transfer))
        if not world.blind_reads and world.rng.random() < 0.02:
            world.after(world.rng.random() * longest_s, partial(self._lose_way, generation))
        return transfer

    def poll(self, handle: object) -> bool:
        assert isinstance(handle, Transfer)
        end = handle.over or handle.broken
        if end is None and handle.missing:
            return False
        if handle.over is not None or end is None:
            self._forget(handle)
        if end is not None:
            if handle.over is None:  # the thread will look again
                self._world.after(
                    kvrelay.kv_transfer.backend.BROKEN_S, self._node.backend_thread.wake
                )
            raise end
        return True

    def peer_gone(self, generation: str) -> None:
        if self._peers[generation].alive:
            raise Violation(f"{self._node.name}: {generation} is taken for gone, and is alive")
        for transfer in self.transfers:
            if transfer.generation == generation and not self._world.blind_reads:
                self._end(transfer, "the process of the peer is gone")

    def drop_peer(self, generation: str) -> None:
        del self._peers[generation]
        self._broken_ways.discard(generation)

    def progress(self) -> None:
        pass

    def close(self) -> None:
        pass

    def touches(self) -> set[int]:
        """Local blocks that bytes may still land in."""
        return {local for transfer in self.transfers for _, local in transfer.missing}

    def _land(self, transfer: Transfer, pair: tuple[int, int]) -> None:
        node, source, world = self._node, transfer.source, self._world
        if not node.alive or pair not in transfer.missing:
            return
        if not world.blind_reads and not source.alive:
            if transfer.broken is None:
                self._end(transfer, "the peer has disconnected during a READ")
            transfer.missing.clear()
        elif not world.blind_reads and (wait_s := self._stalled_s(source)) > 0:
            world.after(wait_s, partial(self._land, transfer, pair))
            return
        else:
            transfer.missing.discard(pair)
            remote, local = pair
            node.written_to(local)
            node.device.memory[local] = list(source.device.memory[remote])
        if not transfer.missing:
            world.disturbed_until(world.now)
            node.backend_thread.wake()

    def _stalled_s(self, source: SimulatedNode) -> float:
        world = self._world
        until = max(world.dark_until(self._node, source), source.stopped_until)
        return until - world.now + world.rng.random() * QUICK_S if until > world.now else 0.0

    def _break(self, transfer: Transfer) -> None:
        if transfer.missing:
            transfer.broken = TransferError("the READ broke")
            self._node.backend_thread.wake()

    def _lose_way(self, generation: str) -> None:
        """The backend's connection to a peer breaks, which may be there all the same."""
        if generation in self._peers:
            self._broken_ways.add(generation)
        for transfer in self.transfers:
            if transfer.generation == generation:
                self._end(transfer, "the way is lost")

    def _end(self, transfer: Transfer, why: str) -> None:
        transfer.missing.clear()
        transfer.over = PeerLost(why)
        self._node.backend_thread.wake()

    def delays(self) -> bool:
        """Blocks are not free by no fault of the reader: bytes are on their way, or may be for all
        that it knows.
        """
        running = [running.handle for running in self._node.backend_thread._running]
        unseen = [
            t for t in self.transfers if t in running and t.broken is not None and t.over is None
        ]
        return any(t.missing for t in self.transfers) or any(t.source.alive for t in unseen)

    def _forget(self, transfer: Transfer) -> None:
        with suppress(ValueError):
            self.transfers.remove(transfer)
