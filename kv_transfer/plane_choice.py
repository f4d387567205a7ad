"""The data planes that a node has opened on all its ranks, and which of them it can share with a peer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from kv_transfer.checksums import Checksums, ChecksumThread
from kv_transfer.connector import PoolRegion
from kv_transfer.messages import RankCard, Welcome
from kv_transfer.parts import Part
from kv_transfer.planes import DataPlane, PlaneDesk, PlaneThread, Source
from kv_transfer.rank_link import RankLink
from kv_transfer.rank_messages import Broke, FromRank, Joined, Opened, ReadEnded, ReadFailed, Sum, Summed, error_of
from kv_transfer.rank_planes import RankPlane, RemotePlane
from kv_transfer.shares import Heads, Share, order_of_heads, shares
from wire.errors import ConfigError, Incompatible, KvrelayError

__all__ = ["OpenPlanes"]

log = logging.getLogger(__name__)


class OpenPlanes:
    """Planes by name, the best first; each on a thread of every rank."""

    def __init__(
        self,
        planes: Mapping[str, DataPlane],
        desk: PlaneDesk,
        region: PoolRegion,
        heads: Heads,
        link: RankLink | None = None,
        *,
        checksums: bool = False,
    ) -> None:
        """Open them. Of several, those that this engine cannot have on all its ranks are left out.

        `region` and `heads` are rank 0's; `checksums`: of blocks can be asked for, of all ranks together. Raises
        ConfigError if the only plane cannot be had, or none of several, or no checksums."""
        self._checksums: Checksums | None = None
        self.missing: dict[str, str] = {}
        """Those left out, and why."""
        self.wanted = tuple(planes)
        """Those in it and those left out."""
        self._planes: dict[str, RankPlane] = {}
        self._threads: dict[str, PlaneThread] = {}
        self._link = link
        self._desk = desk
        cards: dict[str, bytes] = {}
        for kind, plane in planes.items():
            self._planes[kind] = whole = RankPlane(desk)
            self._threads[kind] = thread = PlaneThread(plane, whole.ear)
            try:
                cards[kind] = thread.open()
            except ConfigError as error:
                if len(planes) == 1:
                    raise
                self._leave_out(kind, error.message)
        self.ranks = [RankCard(heads, region, cards)]
        """What peers need to read from here."""
        if checksums:
            own = ChecksumThread(region, heads[1] - heads[0], desk.broke)
            own.open()
            self._checksums = Checksums(own, 1 if link is None else len(link.heads), self._ask_rank)
        if link is not None:
            self._meet(link, link.opened())
        for kind, thread in self._threads.items():
            others = [RemotePlane(kind, rank, link) for rank in range(1, len(self.ranks)) if link is not None]
            self._planes[kind].begin(thread, others)
        if not self._threads:
            raise ConfigError(f"no KV can be handed over: {'; '.join(self.missing.values())}")

    def _meet(self, link: RankLink, others: list[Opened]) -> None:
        """Keep what all ranks have."""
        for other in others:
            for kind, why in other.missing.items():
                if kind in self._threads:
                    if len(self.wanted) == 1:
                        raise ConfigError(f"rank {other.rank}: {why}")
                    self._leave_out(kind, f"rank {other.rank}: {why}")
        own, *_ = self.ranks
        self.ranks = [
            RankCard(heads, region, {kind: cards[kind] for kind in self._threads})
            for heads, region, cards in [
                (own.heads, own.region, own.planes),
                *((link.heads[other.rank], other.region, other.cards) for other in others),
            ]
        ]
        link.serve(self._hear, self._desk.serving, self._desk.broke)

    def _leave_out(self, kind: str, why: str) -> None:
        log.info("no KV by %s on this node: %s", kind, why)
        self.missing[kind] = why
        self._threads.pop(kind).stop()
        del self._planes[kind]

    def _hear(self, rank: int, message: FromRank) -> None:
        match message:
            case Joined(kind, peer, error):
                self._planes[kind].joined(Part(rank, peer), None if error is None else error_of(error))
            case ReadEnded(kind, peer, read_id):
                self._planes[kind].read_ended(Part(rank, peer), read_id)
            case ReadFailed(kind, peer, read_id, error, in_flight):
                self._planes[kind].read_failed(Part(rank, peer), read_id, error_of(error), in_flight=in_flight)
            case Summed(number, checksums):
                assert self._checksums is not None
                self._checksums.heard(rank, number, checksums)
            case Broke(reason):
                self._desk.broke(KvrelayError(f"rank {rank}: {reason}"))

    def _ask_rank(self, rank: int, number: int, blocks: Sequence[int]) -> None:
        assert self._link is not None
        self._link.tell(rank, Sum(number, list(blocks)))

    def __getitem__(self, kind: str) -> RankPlane:
        """A plane that is open."""
        return self._planes[kind]

    def __iter__(self) -> Iterator[str]:
        """Those that are open."""
        return iter(self._planes)

    def shared(self, welcome: Welcome) -> list[tuple[str, list[tuple[int, Source]]]]:
        """The planes that all ranks of this peer have, too, the best first; and which rank of ours reads what.

        Raises Incompatible if its ranks' pools are not what ours need."""
        mine, theirs = ({_head_bytes(card) for card in cards} for cards in (self.ranks, welcome.ranks))
        if len(mine | theirs) != 1:
            raise Incompatible(f"a KV head has {sorted(mine)} bytes of a block here and {sorted(theirs)} there")
        (head_bytes,) = mine
        parts = [
            (rank, source, share)
            for rank in range(len(self.ranks))
            for source, share in shares(
                rank, [card.heads for card in self.ranks], [card.heads for card in welcome.ranks], head_bytes
            )
        ]
        return [
            (kind, [(rank, _source(welcome, source, kind, share)) for rank, source, share in parts])
            for kind in self._planes
            if welcome.ranks and all(kind in card.planes for card in welcome.ranks)
        ]

    @property
    def can_sum(self) -> bool:
        """Whether checksums of blocks can be asked for."""
        return self._checksums is not None

    def sums(self, blocks: Sequence[int], done: Callable[[list[bytes]], None]) -> None:
        """`done` is called, from any thread, with the checksums of each of these blocks, of all ranks."""
        assert self._checksums is not None
        self._checksums.ask(blocks, done)

    def order_of_heads(self, welcome: Welcome) -> list[int]:
        """Of each KV head of each of our ranks, where it lies among those of this peer's ranks. Raises Incompatible."""
        return order_of_heads([card.heads for card in self.ranks], [card.heads for card in welcome.ranks])

    def silent_s(self) -> float:
        """Seconds since the slowest of this process's threads was seen at work."""
        planes_s = max(thread.silent_s() for thread in self._threads.values())
        return planes_s if self._checksums is None else max(planes_s, self._checksums.silent_s())

    def nudge(self) -> None:
        """Somebody may be about to read from here."""
        for thread in self._threads.values():
            thread.nudge()
        if self._link is not None:
            self._link.nudge()

    def close(self, timeout_s: float) -> None:
        """End all threads; together they have so long."""
        until = time.monotonic() + timeout_s
        for thread in self._threads.values():
            thread.stop()
        if self._link is not None:
            self._link.close(max(0.0, until - time.monotonic()))
        for thread in self._threads.values():
            thread.close(max(0.0, until - time.monotonic()))
        if self._checksums is not None:
            self._checksums.close(max(0.0, until - time.monotonic()))


def _head_bytes(card: RankCard) -> int:
    """Bytes of a block that one KV head has. Raises Incompatible."""
    first, end = card.heads
    size, rest = divmod(card.region.block_bytes, max(1, end - first))
    if rest or end <= first:
        raise Incompatible(f"a block of {card.region.block_bytes} bytes cannot hold KV heads {first} to {end}")
    return size


def _source(welcome: Welcome, rank: int, kind: str, share: Share) -> Source:
    card = welcome.ranks[rank]
    # A rank is a process of its own, so it has a generation of its own.
    generation = f"{welcome.generation}/{rank}" if rank else welcome.generation
    return Source(welcome.engine_id, generation, card.region, card.planes[kind], share)
