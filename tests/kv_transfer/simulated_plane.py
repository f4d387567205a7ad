"""The data plane of the simulated world: READs whose blocks land one by one, and late, whoever still wants them.

Over the real `PlaneThread`, whose turns are events here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from simulated_world import CLOCK, QUICK_S

from kv_transfer.commands import PeerKey, Read
from kv_transfer.planes import DataPlane, PlaneDesk, PlaneThread, Source
from wire.errors import PeerLost, TransferError

if TYPE_CHECKING:
    from simulated_node import SimulatedNode


class SimulatedPlaneThread(PlaneThread):
    """The real one, whose turns are events."""

    def __init__(self, plane: DataPlane, desk: PlaneDesk) -> None:
        super().__init__(plane, desk)
        node = CLOCK.world.here
        assert node is not None
        self._node, self._turn_at = node, float("inf")
        node.plane_thread = self

    def open(self) -> bytes:
        return self._plane.open()

    def read(self, read: Read) -> None:
        self._node.read_begins(read)
        super().read(read)
        self.wake()

    def add_peer(self, peer: PeerKey, source: Source) -> None:
        super().add_peer(peer, source)
        self.wake()

    def peer_gone(self, peer: PeerKey) -> None:
        super().peer_gone(peer)
        self.wake()

    def drop_peer(self, peer: PeerKey) -> None:
        super().drop_peer(peer)
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
            while not self._todo.empty():
                self._todo.get()()
            self._poll()


@dataclass(eq=False, slots=True)
class Transfer:
    """A READ under way: blocks land one by one, and nothing but the end of a node stops them."""

    source: SimulatedNode
    generation: str
    missing: set[tuple[int, int]]
    broken: TransferError | None = None
    over: PeerLost | None = None


class SimulatedPlane:
    """A `DataPlane` over the pools of the world.

    READs land late, also those that nobody wants any more. One thing is taken for granted, as kv_transfer/planes.py
    does: a READ that broke *and* whose source's connection is gone writes no more."""

    helps_readers = False

    def __init__(self, node: SimulatedNode) -> None:
        self._node, self._world = node, node.world
        self._peers: dict[str, SimulatedNode] = {}
        self.transfers: list[Transfer] = []

    def open(self) -> bytes:
        return str(len(self._world.nodes)).encode()

    def add_peer(self, source: Source) -> None:
        there = self._world.nodes[int(source.metadata)]
        if not there.alive:
            raise TransferError("nobody is there to be joined")
        self._peers[source.generation] = there

    def post_read(self, generation: str, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> object:
        source, world = self._peers.get(generation), self._world
        if source is None:
            raise TransferError("no such peer")
        if world.rng.random() < 0.03:
            raise TransferError("the READ was refused")
        transfer = Transfer(source, generation, set(zip(remote_blocks, local_blocks, strict=True)))
        self.transfers.append(transfer)
        longest_s = world.slowest_read_s * world.rng.random()
        for pair in sorted(transfer.missing):
            world.after(world.rng.random() * longest_s, partial(self._land, transfer, pair))
        if world.rng.random() < 0.03:
            world.after(world.rng.random() * longest_s, partial(self._break, transfer))
        return transfer

    def poll(self, handle: object) -> bool:
        assert isinstance(handle, Transfer)
        if handle.over is not None:
            self._forget(handle)
            raise handle.over
        if handle.broken is not None and handle.missing:
            if any(peer.generation == handle.generation for peer in self._node.plane_thread._gone):
                handle.missing.clear()
                self._forget(handle)
            raise handle.broken
        if not handle.missing:
            self._forget(handle)
        return not handle.missing

    def drop_peer(self, generation: str) -> None:
        self._peers.pop(generation, None)

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
            transfer.over = PeerLost("the peer has disconnected during a READ")
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
            node.plane_thread.wake()

    def _stalled_s(self, source: SimulatedNode) -> float:
        world = self._world
        until = max(world.dark_until(self._node, source), source.stopped_until)
        return until - world.now + world.rng.random() * QUICK_S if until > world.now else 0.0

    def _break(self, transfer: Transfer) -> None:
        if transfer.missing:
            transfer.broken = TransferError("the READ broke")
            self._node.plane_thread.wake()

    def _forget(self, transfer: Transfer) -> None:
        with suppress(ValueError):
            self.transfers.remove(transfer)
