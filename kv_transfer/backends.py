"""The backends of an engine over all of its ranks: when each is opened, and what peers read by it.

What is asked goes to the ranks in parts; what they tell becomes one event. A peer is joined when
all parts are. A read has ended when all its parts have, fails with the first part that does, and is
in flight until no part is: so long its blocks stay in quarantine.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvrelay.kv_transfer.backend import (
    AddPeer,
    BackendJob,
    DropPeer,
    Joined,
    Open,
    Opened,
    PeerEvent,
    PeerGone,
    ReadEnded,
    Source,
    TransferBackend,
)
from kvrelay.kv_transfer.connector import PeerKey, PoolRegion, Read
from kvrelay.kv_transfer.messages import HandshakeReply, RankCard
from kvrelay.kv_transfer.rank_backends import RankBackends
from kvrelay.kv_transfer.ranks import (
    OPEN_S,
    Broke,
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

__all__ = ["AllRanksBackend", "Backends", "Part"]

log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A part: our rank, and the process of the source's rank that it reads from."""

    rank: int
    source: PeerKey


@dataclass(slots=True)
class _Read:
    peer: PeerKey
    running: set[Part]
    error: KvrelayError | None = None


class AllRanksBackend:
    """A backend on all ranks, as if it were one. Called under the transfer engine's lock.

    A part's events come in order, those of different parts in any order.
    """

    def __init__(self, do: Callable[[int, BackendJob], None]) -> None:
        """`do` gives a job to a rank."""
        self._do = do
        self._parts: dict[PeerKey, tuple[Part, ...]] = {}
        self._missing: dict[PeerKey, set[Part]] = {}  # parts that have not joined
        # Joins that were not answered: only the last answer is about this attempt.
        self._asked: Counter[Part] = Counter()
        self._reads: dict[int, _Read] = {}

    def __len__(self) -> int:
        return len(self._parts) + len(self._reads)

    def add_peer(self, peer: PeerKey, sources: Sequence[tuple[int, Source]]) -> None:
        """Have each rank get ready to read from its source. Joined follows."""
        parts = tuple(
            Part(rank, PeerKey(peer.host, peer.port, source.generation)) for rank, source in sources
        )
        self._parts[peer], self._missing[peer] = parts, set(parts)
        self._asked.update(parts)
        for part, (_, source) in zip(parts, sources, strict=True):
            self._do(part.rank, AddPeer(part.source, source))

    def read(self, read: Read) -> None:
        parts = self._parts[read.peer]
        self._reads[read.read_id] = _Read(read.peer, set(parts))
        for part in parts:
            self._do(part.rank, msgspec.structs.replace(read, peer=part.source))

    def peer_gone(self, peer: PeerKey) -> None:
        for part in self._parts.get(peer, ()):
            if part.source == peer:
                self._do(part.rank, PeerGone(peer))

    def drop_peer(self, peer: PeerKey) -> None:
        self._missing.pop(peer, None)
        for part in self._parts.pop(peer, ()):
            self._do(part.rank, DropPeer(part.source))

    def on_event(self, rank: int, event: PeerEvent) -> PeerEvent | None:
        """Return the event of the whole; None if there is none yet."""
        part = Part(rank, event.peer)
        if isinstance(event, Joined):
            return self._joined(part, event.error)
        read = self._reads.get(event.read_id)
        if read is None:
            return None
        first = read.error is None
        read.error = read.error or event.error
        if not event.in_flight:
            read.running.discard(part)
        if not read.running:
            del self._reads[event.read_id]
            return ReadEnded(read.peer, event.read_id, read.error)
        if event.error is None or not first:
            return None
        return ReadEnded(read.peer, event.read_id, event.error, in_flight=True)

    def _joined(self, part: Part, error: KvrelayError | None) -> Joined | None:
        self._asked[part] -= 1
        if self._asked[part] > 0:
            return None
        del self._asked[part]
        peer = next((peer for peer, parts in self._parts.items() if part in parts), None)
        if peer is None:  # given up meanwhile
            return None
        if error is not None:
            self.drop_peer(peer)  # the other parts have joined, or are about to
            return Joined(peer, error)
        self._missing[peer].discard(part)
        return None if self._missing[peer] else Joined(peer, None)


class Backends:
    """An engine's backends, the best first.

    An open backend listens, and who reaches UCX's listener can write anywhere. So the first is
    opened at start, and another one when a peer asks for it that the earlier ones do not reach.
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
        """Prepare all, and open the first; leave out those that some rank cannot have.

        `region` and `heads` are rank 0's. Raises ConfigError if the only backend cannot be had, or
        none of several, or no checksums.
        """
        self.can_sum = checksums
        """True if blocks are checked by checksum."""
        self.missing: dict[str, str] = {}
        """Backends that are left out, and why."""
        self.wanted = tuple(backends)
        """Backends that were named: those here, and those left out."""
        self._kinds = {kind: AllRanksBackend(partial(self._do, kind)) for kind in backends}
        self._link, self._engine = link, engine
        self._pools = [(heads, region)]  # of each rank
        self._cards: dict[str, list[bytes]] = {}  # of open backends, by rank
        # What ranks have told of backends that are being opened.
        self._opening: dict[str, dict[int, Opened]] = {}
        self._open_by: dict[str, float] = {}  # the monotonic second at which these are given up
        self._sums: dict[int, tuple[dict[int, list[bytes]], Callable[[list[bytes]], None]]] = {}
        self._questions = 0
        self._lock = threading.Lock()  # of the fields above
        first: queue.Queue[str] = queue.Queue()
        self._opened: Callable[[str], None] = first.put
        self._local = RankBackends(
            region,
            backends,
            heads[1] - heads[0] if checksums else 0,
            engine.serving,
            partial(self._on_message, 0),
            engine.on_error,
        )
        missing = [self._local.missing]
        if link is not None:
            link.serve(self._on_message, engine.serving, engine.on_error)
            others = link.prepared()
            self._pools += [(link.heads[other.rank], other.region) for other in others]
            missing += [other.missing for other in others]
        for rank, lacks in enumerate(missing):
            for kind, why in lacks.items():
                if kind not in self.missing:
                    self._leave_out(kind, f"rank {rank}: {why}" if rank else why)
        self._open_one(first)
        self._opened = engine.on_backend_opened

    def _open_one(self, ended: queue.Queue[str]) -> None:
        for kind in list(self):
            self.open(kind)
            try:
                ended.get(timeout=OPEN_S)
            except queue.Empty:
                raise ConfigError(
                    f"kv_connector {kind} was not opened on all ranks within {OPEN_S:g} s"
                ) from None
            if self.is_open(kind):
                return
        why = "; ".join(self.missing.values())
        alone = len(self.wanted) == 1
        raise ConfigError(why if alone else f"no KV can be handed over: {why}")

    def open(self, kind: str) -> None:
        """Have all ranks open a backend, if it is not open; `on_backend_opened` follows then."""
        with self._lock:
            if kind in self._cards or kind in self.missing or kind in self._opening:
                return
            self._opening[kind], self._open_by[kind] = {}, time.monotonic() + OPEN_S
        self._send_all(Do(kind, Open()))

    def _told(self, kind: str, rank: int, card: Opened) -> None:
        with self._lock:
            told = self._opening.get(kind)
            if told is None:
                return  # it was given up
            told[rank] = card
            if len(told) < len(self._pools):
                return
            cards = [card.metadata for _, card in sorted(told.items()) if card.metadata is not None]
            if len(cards) == len(told):
                self._cards[kind] = cards
                del self._opening[kind], self._open_by[kind]
        if len(cards) < len(told):
            rank = min(rank for rank, card in told.items() if card.metadata is None)
            why = told[rank].why
            self._leave_out(kind, f"rank {rank}: {why}" if rank else why)
        self._opened(kind)

    def expire(self, now: float) -> None:
        with self._lock:
            late = [kind for kind, by in self._open_by.items() if now >= by]
        for kind in late:
            self._leave_out(kind, f"it was not opened on all ranks within {OPEN_S:g} s")
            self._opened(kind)

    def _leave_out(self, kind: str, why: str) -> None:
        log.info("no KV by %s on this node: %s", kind, why)
        with self._lock:
            self.missing[kind] = why
            self._opening.pop(kind, None)
            self._open_by.pop(kind, None)
        self._send_all(Stop(kind))

    def is_open(self, kind: str) -> bool:
        return kind in self._cards

    def is_opening(self, kind: str) -> bool:
        """Return whether `on_backend_opened` will be called for this backend."""
        return kind in self._opening

    @property
    def ranks(self) -> list[RankCard]:
        """Cards of all ranks, with what peers need to read through the open backends."""
        with self._lock:
            return [
                RankCard(heads, region, {kind: cards[rank] for kind, cards in self._cards.items()})
                for rank, (heads, region) in enumerate(self._pools)
            ]

    @property
    def on_request(self) -> list[str]:
        """Names of backends that are not open, and can be."""
        return [kind for kind in self if not self.is_open(kind)]

    def _on_message(self, rank: int, message: FromRank) -> None:
        match message:
            case News(kind, event):
                if isinstance(event, Opened):
                    self._told(kind, rank, event)
                else:
                    self._engine.on_backend_event(kind, rank, event)
            case Summed(number, checksums):
                self._summed(rank, number, checksums)
            case Broke(reason):
                self._engine.on_error(KvrelayError(f"rank {rank}: {reason}"))

    def _do(self, kind: str, rank: int, job: BackendJob) -> None:
        self._send(rank, Do(kind, job))

    def _send(self, rank: int, message: ToRank) -> None:
        if rank == 0:
            self._local.do(message)
        else:
            assert self._link is not None
            self._link.send(rank, message)

    def _send_all(self, message: ToRank) -> None:
        for rank in range(len(self._pools)):
            self._send(rank, message)

    def __getitem__(self, kind: str) -> AllRanksBackend:
        return self._kinds[kind]

    def __iter__(self) -> Iterator[str]:
        return (kind for kind in self.wanted if kind not in self.missing)

    def shared(self, welcome: HandshakeReply) -> list[str]:
        """Return the backends that all ranks of both have, the best first. Raises Incompatible."""
        self._shares(welcome)
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
        """Return where each KV head of our ranks lies in the peer's. Raises Incompatible."""
        return order_of_heads(
            [heads for heads, _ in self._pools], [card.heads for card in welcome.ranks]
        )

    def sums(self, blocks: Sequence[int], done: Callable[[list[bytes]], None]) -> None:
        """Call `done` later, from any thread, with a checksum per block: rank 0's heads first."""
        with self._lock:
            self._questions += 1
            number = self._questions
            self._sums[number] = {}, done
        self._send_all(Sum(number, list(blocks)))

    def _summed(self, rank: int, number: int, checksums: list[bytes]) -> None:
        with self._lock:
            parts, done = self._sums[number]
            parts[rank] = checksums
            if len(parts) < len(self._pools):
                return
            del self._sums[number]
        ordered = [part for _, part in sorted(parts.items())]
        done([b"".join(of_block) for of_block in zip(*ordered, strict=True)])

    def silent_s(self) -> float:
        return self._local.silent_s()

    def nudge(self) -> None:
        self._local.nudge()
        if self._link is not None:
            self._link.nudge()

    def close(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        if self._link is not None:
            self._link.close(timeout_s)
        self._local.close(max(0.0, until - time.monotonic()))


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
    # A rank is a process of its own, so it has a generation of its own.
    generation = f"{welcome.generation}/{rank}" if rank else welcome.generation
    return Source(welcome.engine_id, generation, card.region, card.planes[kind], share)
