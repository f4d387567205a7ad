"""The backends of an engine over all of its ranks: when each is opened, and what peers read by it.

A peer is joined when all parts are. A read has ended when all parts have, fails with the first that
does, and is in flight until no part is: so long its blocks stay in quarantine.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvrelay.kv_transfer.backend import (
    AddPeer,
    DropPeer,
    Joined,
    Open,
    Opened,
    PeerGone,
    ReadEnded,
    Source,
    TransferBackend,
)
from kvrelay.kv_transfer.checksums import Done
from kvrelay.kv_transfer.connector import BlockIds, PeerKey, PoolRegion, Read
from kvrelay.kv_transfer.messages import HandshakeReply, RankCard
from kvrelay.kv_transfer.rank_backends import RankBackends
from kvrelay.kv_transfer.ranks import (
    OPEN_S,
    Do,
    FromRank,
    News,
    RankLink,
    Stop,
    Sum,
    Summed,
    ToRank,
)
from kvrelay.kv_transfer.shares import Heads, Share, order_of_heads, shares
from kvrelay.wire.errors import ConfigError, Incompatible, KvrelayError

if TYPE_CHECKING:
    from kvrelay.kv_transfer.transfer_engine import TransferEngine

__all__ = ["Backends"]

log = logging.getLogger(__name__)


Part = tuple[int, PeerKey]
"""A rank of ours, and the process of the source's rank that it reads from."""


@dataclass(slots=True)
class _Way:
    kind: str
    attempt: int
    parts: list[Part]
    missing: set[Part]  # parts that have not joined


@dataclass(slots=True)
class _Read:
    peer: PeerKey
    running: set[Part]
    error: KvrelayError | None = None


class Backends:
    """An engine's backends on all ranks, the best first. Called under the engine's lock.

    An open backend listens, and who reaches UCX's listener can write anywhere: the first is opened
    at start, others when a peer asks that the earlier ones do not reach.
    """

    def __init__(
        self,
        backends: Mapping[str, TransferBackend],
        engine: TransferEngine,
        region: PoolRegion,
        heads: Heads,
        link: RankLink | None = None,
        *,
        checksums: bool = False,
    ) -> None:
        """Prepare all; leave out those that some rank cannot have.

        `region` and `heads` are rank 0's. `engine.on_rank` hands ranks' messages to `heard`. Raises
        ConfigError without other ranks or checksums.
        """
        self.can_sum = checksums
        self.missing: dict[str, str] = {}
        """Backends that are left out, and why."""
        self.wanted = tuple(backends)
        self._link = link
        self._pools = [(heads, region)]  # of each rank
        self._cards: dict[str, list[bytes]] = {}  # of open backends, by rank
        self._opening: dict[str, dict[int, Opened]] = {}
        self._ways: dict[PeerKey, _Way] = {}
        self._reads: dict[int, _Read] = {}
        self._sums: dict[int, tuple[dict[int, list[bytes]], Done]] = {}
        self._numbers = count(1)  # of attempts and sums
        self._first: queue.Queue[str] = queue.Queue()
        self._opened: Callable[[str], None] = self._first.put
        self._local = RankBackends(
            region,
            backends,
            heads[1] - heads[0] if checksums else 0,
            partial(engine.on_rank, 0),
            engine.on_error,
        )
        missing = [self._local.missing]
        if link is not None:
            others = link.prepared(engine.on_rank, engine.on_error)
            self._pools += [(link.heads[other.rank], other.region) for other in others]
            missing += [other.missing for other in others]
        for rank, lacks in enumerate(missing):
            for kind, why in lacks.items():
                if kind not in self.missing:
                    self._leave_out(kind, rank, why)

    def open_first(self, on_opened: Callable[[str], None]) -> None:
        """Open the first that can be; `on_opened` follows for each later one.

        Raises ConfigError if the only one cannot be had, or none of several.
        """
        for kind in list(self):
            self.open(kind)
            try:
                self._first.get(timeout=OPEN_S)
            except queue.Empty:
                raise ConfigError(
                    f"kv_connector {kind} was not opened on all ranks within {OPEN_S:g} s"
                ) from None
            if kind in self._cards:
                self._opened = on_opened
                return
        why = "; ".join(self.missing.values())
        alone = len(self.wanted) == 1
        raise ConfigError(why if alone else f"no KV can be handed over: {why}")

    def open(self, kind: str) -> bool:
        """Have all ranks open a backend, if it is not open. Returns whether `on_opened` follows."""
        if kind in self.on_request and kind not in self._opening:
            self._opening[kind] = {}
            self._do_all(Do(kind, Open()))
        return kind in self._opening

    def heard(self, rank: int, message: FromRank) -> Joined | ReadEnded | None:
        """Take a rank's message; return the event of all ranks that it completes."""
        match message:
            case News(kind, Opened() as opened):
                self._told(kind, rank, opened)
            case News(_, Joined() as joined):
                return self._joined(rank, joined)
            case News(_, ReadEnded() as ended):
                return self._read_ended(rank, ended)
            case Summed(number, checksums):
                self._summed(rank, number, checksums)
        return None

    def _told(self, kind: str, rank: int, opened: Opened) -> None:
        told = self._opening[kind]
        told[rank] = opened
        if len(told) < len(self._pools):
            return
        del self._opening[kind]
        cards = [each.metadata for _, each in sorted(told.items()) if each.metadata is not None]
        if len(cards) == len(told):
            self._cards[kind] = cards
        else:
            rank = min(rank for rank, each in told.items() if each.metadata is None)
            self._leave_out(kind, rank, told[rank].why)
        self._opened(kind)

    def _leave_out(self, kind: str, rank: int, why: str) -> None:
        self.missing[kind] = f"rank {rank}: {why}" if rank else why
        log.info("no KV by %s on this node: %s", kind, self.missing[kind])
        self._do_all(Stop(kind))

    # Peers, in parts: questions go to ranks, answers become one event. A part's events come in
    # order, those of different parts in any.

    def add_peer(self, peer: PeerKey, kind: str, sources: Sequence[tuple[int, Source]]) -> None:
        """Have each rank get ready to read from its source. Joined follows."""
        parts = [
            (rank, PeerKey(peer.host, peer.port, source.generation)) for rank, source in sources
        ]
        self._ways[peer] = way = _Way(kind, next(self._numbers), parts, set(parts))
        for (rank, process), (_, source) in zip(parts, sources, strict=True):
            self._do(rank, Do(kind, AddPeer(process, source, way.attempt)))

    def read(self, read: Read) -> None:
        way = self._ways[read.peer]
        self._reads[read.read_id] = _Read(read.peer, set(way.parts))
        for rank, process in way.parts:
            self._do(rank, Do(way.kind, replace(read, peer=process)))

    def peer_gone(self, peer: PeerKey) -> None:
        if (way := self._ways.get(peer)) is not None:
            for rank, process in way.parts:
                if process == peer:
                    self._do(rank, Do(way.kind, PeerGone(peer)))

    def drop_peer(self, peer: PeerKey) -> None:
        if (way := self._ways.pop(peer, None)) is not None:
            for rank, process in way.parts:
                self._do(rank, Do(way.kind, DropPeer(process)))

    def _joined(self, rank: int, joined: Joined) -> Joined | None:
        ways = self._ways.items()
        peer, way = next((each for each in ways if each[1].attempt == joined.attempt), (None, None))
        if peer is None or way is None:  # given up meanwhile
            return None
        if joined.error is not None:
            self.drop_peer(peer)  # the other parts have joined, or are about to
        else:
            way.missing.discard((rank, joined.peer))
            if way.missing:
                return None
        return Joined(peer, way.attempt, joined.error)

    def _read_ended(self, rank: int, ended: ReadEnded) -> ReadEnded | None:
        read = self._reads.get(ended.read_id)
        if read is None:
            return None
        first = read.error is None
        read.error = read.error or ended.error
        if not ended.in_flight:
            read.running.discard((rank, ended.peer))
        if not read.running:
            del self._reads[ended.read_id]
            return ReadEnded(read.peer, ended.read_id, read.error)
        if ended.error is None or not first:
            return None
        return ReadEnded(read.peer, ended.read_id, ended.error, in_flight=True)

    @property
    def ranks(self) -> list[RankCard]:
        """Return all ranks' cards, with what peers need for the open backends."""
        return [
            RankCard(heads, region, {kind: cards[rank] for kind, cards in self._cards.items()})
            for rank, (heads, region) in enumerate(self._pools)
        ]

    @property
    def on_request(self) -> list[str]:
        """Return the backends that can still be opened."""
        return [kind for kind in self if kind not in self._cards]

    def __iter__(self) -> Iterator[str]:
        return (kind for kind in self.wanted if kind not in self.missing)

    def shared(self, welcome: HandshakeReply) -> list[str]:
        """Return the backends that all ranks of both have, or can open, the best first."""
        theirs = [set(card.planes) for card in welcome.ranks]
        has = set.intersection(*theirs) if theirs else set()
        return [kind for kind in self if kind in has or kind in welcome.on_request]

    def sources(self, welcome: HandshakeReply, kind: str) -> list[tuple[int, Source]]:
        return [
            (rank, _source(welcome, source, kind, share))
            for rank, source, share in self._shares(welcome)
        ]

    def _shares(self, welcome: HandshakeReply) -> list[tuple[int, int, Share]]:
        ours = self.ranks
        mine, theirs = ({_head_bytes(card) for card in cards} for cards in (ours, welcome.ranks))
        if len(mine | theirs) != 1:
            raise Incompatible(
                f"a KV head has {sorted(mine)} bytes of a block here and {sorted(theirs)} there"
            )
        (head_bytes,) = mine
        readers, sources = ([card.heads for card in cards] for cards in (ours, welcome.ranks))
        return [
            (rank, source, share)
            for rank in range(len(ours))
            for source, share in shares(rank, readers, sources, head_bytes)
        ]

    def order_of_heads(self, welcome: HandshakeReply) -> list[int]:
        """Return where each of our KV heads lies in the peer's. Raises Incompatible."""
        self._shares(welcome)
        return order_of_heads(
            [heads for heads, _ in self._pools], [card.heads for card in welcome.ranks]
        )

    def sums(self, blocks: BlockIds, done: Done) -> None:
        """Call `done` later, under the lock, with a checksum per block: rank 0's heads first."""
        number = next(self._numbers)
        self._sums[number] = {}, done
        self._do_all(Sum(number, list(blocks)))

    def _summed(self, rank: int, number: int, checksums: list[bytes]) -> None:
        parts, done = self._sums[number]
        parts[rank] = checksums
        if len(parts) == len(self._pools):
            del self._sums[number]
            ordered = [part for _, part in sorted(parts.items())]
            done([b"".join(of_block) for of_block in zip(*ordered, strict=True)])

    def silent_s(self) -> float:
        return self._local.silent_s()

    def close(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        if self._link is not None:
            self._link.close(timeout_s)
        self._local.close(max(0.0, until - time.monotonic()))

    def _do(self, rank: int, message: ToRank) -> None:
        if rank == 0:
            self._local.do(message)
        else:
            assert self._link is not None
            self._link.send(rank, message)

    def _do_all(self, message: ToRank) -> None:
        for rank in range(len(self._pools)):
            self._do(rank, message)


def _head_bytes(card: RankCard) -> int:
    first, end = card.heads
    size, rest = divmod(card.region.block_bytes, max(1, end - first))
    if rest or end <= first:
        raise Incompatible(
            f"a block of {card.region.block_bytes} bytes cannot hold KV heads {first} to {end}"
        )
    return size


def _source(welcome: HandshakeReply, rank: int, kind: str, share: Share) -> Source:
    card = welcome.ranks[rank]
    # Each rank is a process with a generation of its own.
    generation = f"{welcome.generation}/{rank}" if rank else welcome.generation
    return Source(welcome.engine_id, generation, card.region, card.planes[kind], share)
