"""The backends of a node: when each is opened, and which of them it shares with a peer."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from kvrelay.kv_transfer.backend import (
    BackendEvent,
    BackendJob,
    BackendThread,
    Source,
    TransferBackend,
    why_not,
)
from kvrelay.kv_transfer.checksums import Checksums
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.messages import HandshakeReply, RankCard
from kvrelay.kv_transfer.rank_backends import AllRanksBackend, LedBackends
from kvrelay.kv_transfer.ranks import (
    OPEN_S,
    BackendTerms,
    Broke,
    Do,
    FromRank,
    LinkAddress,
    News,
    Open,
    Opened,
    Prepared,
    RankLink,
    Stop,
    Sum,
    Summed,
)
from kvrelay.kv_transfer.shares import Heads, Share, order_of_heads, shares
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, Incompatible, KvrelayError

__all__ = ["Backends", "join_connector", "make_backends", "terms_of"]

log = logging.getLogger(__name__)


class BackendsListener(Protocol):
    """A receiver of what backends tell; its methods return at once."""

    def on_backend_event(self, event: BackendEvent) -> None:
        """Handle a backend's event."""

    def on_backend_opened(self, kind: str) -> None:
        """Note that a backend is open on all ranks, or cannot be had."""

    def serving(self) -> bool:
        """Return whether peers may be reading from here."""

    def on_error(self, error: Exception) -> None:
        """Note that a thread has ended by an error of ours."""


class Backends:
    """A node's backends, the best first, each on a thread of every rank.

    An open backend listens, and who reaches UCX's listener can write anywhere. So the first is
    opened at start, and another one when a peer asks for it that the earlier ones do not reach.
    """

    def __init__(
        self,
        backends: Mapping[str, TransferBackend],
        listener: BackendsListener,
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
        self._checksums: Checksums | None = None
        self.missing: dict[str, str] = {}
        """Those left out, and why."""
        self.wanted = tuple(backends)
        """Those in it and those left out."""
        self._backends = {kind: AllRanksBackend(listener.on_backend_event) for kind in backends}
        self._threads: dict[str, BackendThread] = {}
        self._link = link
        self._listener = listener
        self._pools = [(heads, region)]  # of each rank
        self._cards: dict[str, list[bytes]] = {}  # of open backends, by rank
        # What ranks have told of backends that are being opened.
        self._opening: dict[str, dict[int, bytes | Exception]] = {}
        self._open_by: dict[str, float] = {}  # the monotonic second at which these are given up
        self._lock = threading.Lock()  # of all of these; nothing of others is called under it
        first: queue.Queue[str] = queue.Queue()
        self._opened: Callable[[str], None] = first.put
        for kind, backend in backends.items():
            self._threads[kind] = thread = BackendThread(
                backend,
                partial(self._backends[kind].on_event, 0),
                listener.serving,
                listener.on_error,
            )
            try:
                thread.start()
            except ConfigError as error:
                if len(backends) == 1:
                    raise
                self._leave_out(kind, error.message)
        if checksums:
            self._checksums = Checksums(
                region,
                heads[1] - heads[0],
                listener.on_error,
                1 if link is None else len(link.heads),
                self._ask_rank,
            )
        if link is not None:
            self._meet(link, link.prepared())
        ranks = range(1, len(self._pools))
        for kind, thread in self._threads.items():
            others = [partial(self._do_there, rank, kind) for rank in ranks]
            self._backends[kind].begin([thread.do, *others])
        self._open_one(first)
        self._opened = listener.on_backend_opened

    def _meet(self, link: RankLink, others: list[Prepared]) -> None:
        link.serve(self._on_message, self._listener.serving, self._listener.on_error)
        self._pools += [(link.heads[other.rank], other.region) for other in others]
        for other in others:
            for kind, why in other.missing.items():
                if kind in self._threads:
                    if len(self.wanted) == 1:
                        raise ConfigError(f"rank {other.rank}: {why}")
                    self._leave_out(kind, f"rank {other.rank}: {why}")

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
        why = self.missing.values()
        raise (
            ConfigError(*why)
            if len(self.wanted) == 1
            else ConfigError(f"no KV can be handed over: {'; '.join(why)}")
        )

    def open(self, kind: str) -> None:
        """Have all ranks open a backend, if it is not open; `on_backend_opened` follows then."""
        with self._lock:
            if kind in self._cards or kind in self.missing or kind in self._opening:
                return
            self._opening[kind], self._open_by[kind] = {}, time.monotonic() + OPEN_S
        self._threads[kind].open(partial(self._told, kind, 0))
        for rank in range(1, len(self._pools)):
            assert self._link is not None
            self._link.send(rank, Open(kind))

    def _told(self, kind: str, rank: int, card: bytes | Exception) -> None:
        with self._lock:
            told = self._opening.get(kind)
            if told is None:
                return  # it was given up
            told[rank] = card
            if len(told) < len(self._pools):
                return
            cards = [card for _, card in sorted(told.items()) if isinstance(card, bytes)]
            if len(cards) == len(told):
                self._cards[kind] = cards
                del self._opening[kind], self._open_by[kind]
        if len(cards) < len(told):
            rank, error = next(
                (rank, card) for rank, card in sorted(told.items()) if isinstance(card, Exception)
            )
            self._leave_out(kind, f"rank {rank}: {why_not(error)}" if rank else why_not(error))
        self._opened(kind)

    def expire(self, now: float) -> None:
        """Give up backends whose opening hangs."""
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
            thread = self._threads.pop(kind)
        thread.stop()
        for rank in range(1, len(self._pools)):
            assert self._link is not None
            self._link.send(rank, Stop(kind))

    def is_open(self, kind: str) -> bool:
        """Return whether peers can use this backend."""
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
            case Opened(kind, card, why):
                self._told(kind, rank, ConfigError(why) if card is None else card)
            case News(kind, event):
                self._backends[kind].on_event(rank, event)
            case Summed(number, checksums):
                assert self._checksums is not None
                self._checksums.answer(rank, number, checksums)
            case Broke(reason):
                self._listener.on_error(KvrelayError(f"rank {rank}: {reason}"))

    def _do_there(self, rank: int, kind: str, job: BackendJob) -> None:
        assert self._link is not None
        self._link.send(rank, Do(kind, job))

    def _ask_rank(self, rank: int, number: int, blocks: Sequence[int]) -> None:
        assert self._link is not None
        self._link.send(rank, Sum(number, list(blocks)))

    def __getitem__(self, kind: str) -> AllRanksBackend:
        return self._backends[kind]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of those that are open or can be."""
        return (kind for kind in self.wanted if kind not in self.missing)

    def shared(self, welcome: HandshakeReply) -> list[str]:
        """Return the backends that all ranks of this peer have, too, the best first.

        Raises Incompatible if its ranks' pools are not what ours need.
        """
        self._shares(welcome)
        theirs = [set(card.planes) for card in welcome.ranks]
        has = set.intersection(*theirs) if theirs else set()
        return [kind for kind in self if kind in has or kind in welcome.on_request]

    def sources(self, welcome: HandshakeReply, kind: str) -> list[tuple[int, Source]]:
        """Return what each rank of ours reads through this backend. Raises Incompatible."""
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
        return [
            (rank, source, share)
            for rank in range(len(ours))
            for source, share in shares(
                rank,
                [card.heads for card in ours],
                [card.heads for card in welcome.ranks],
                head_bytes,
            )
        ]

    @property
    def can_sum(self) -> bool:
        """Return whether blocks are checked by checksum."""
        return self._checksums is not None

    def sums(self, blocks: Sequence[int], done: Callable[[list[bytes]], None]) -> None:
        """Call `done` later, from any thread, with checksums of these blocks of all ranks."""
        assert self._checksums is not None
        self._checksums.ask(blocks, done)

    def order_of_heads(self, welcome: HandshakeReply) -> list[int]:
        """Return where each KV head of each of our ranks lies in the peer's. Raises Incompatible."""
        return order_of_heads(
            [heads for heads, _ in self._pools], [card.heads for card in welcome.ranks]
        )

    def silent_s(self) -> float:
        """Return the seconds since the slowest thread of this process was seen at work."""
        backends_s = max((thread.silent_s() for thread in self._at_work()), default=0.0)
        return (
            backends_s if self._checksums is None else max(backends_s, self._checksums.silent_s())
        )

    def _at_work(self) -> list[BackendThread]:
        with self._lock:
            return list(self._threads.values())

    def nudge(self) -> None:
        """Wake the threads: somebody may be about to read from here."""
        for thread in self._at_work():
            thread.nudge()
        if self._link is not None:
            self._link.nudge()

    def close(self, timeout_s: float) -> None:
        """End all threads within so long."""
        until = time.monotonic() + timeout_s
        for thread in self._at_work():
            thread.stop()
        if self._link is not None:
            self._link.close(max(0.0, until - time.monotonic()))
        for thread in self._at_work():
            thread.close(max(0.0, until - time.monotonic()))
        if self._checksums is not None:
            self._checksums.close(max(0.0, until - time.monotonic()))


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


# The fastest first: so a pair of nodes chooses among those that both have.
KINDS = ("direct", "nixl", "nccl")


def join_connector(
    rank: int, region: PoolRegion, address: LinkAddress, host: str, lost: Callable[[str], None]
) -> LedBackends:
    """Prepare the backends of a rank other than 0, which rank 0 opens.

    `host` is an address of its machine that peers reach. `lost` is called, from another thread, if
    rank 0 is lost.
    """
    terms = BackendTerms(address.terms.kinds, host, address.terms.meet_s, address.terms.patience_s)
    return LedBackends(
        rank, region, make_backends(f"{address.engine_id}-{rank}", region, terms), address, lost
    )


def terms_of(config: TransferConfig, rank_heads: int = 0) -> BackendTerms:
    """Return what backends must know of the configuration.

    `rank_heads`: KV heads of each of several ranks.
    """
    kinds = KINDS if config.kv_connector == "auto" else (config.kv_connector,)
    # A pair that is not made by its fetch's deadline is of no use; and who is silent for a lease
    # has lost it.
    summed_heads = rank_heads if config.kv_checksums else 0
    return BackendTerms(
        kinds, config.kv_host, config.transfer_deadline_s, config.lease_s, summed_heads
    )


def make_backends(name: str, region: PoolRegion, terms: BackendTerms) -> dict[str, TransferBackend]:
    """Return the backends of these terms, by kind; none has taken anything yet."""
    return {kind: _backend(kind, name, region, terms) for kind in terms.kinds}


def _backend(kind: str, name: str, region: PoolRegion, terms: BackendTerms) -> TransferBackend:
    if kind == "direct":
        from kvrelay.kv_transfer.direct import DirectBackend

        return DirectBackend(region)
    if kind == "nixl":
        from kvrelay.kv_transfer.nixl import NixlBackend

        # NIXL knows its peers by name, so a restarted node must not come back under its old one.
        return NixlBackend(f"{name}-{uuid.uuid4().hex}", region, terms.host)
    from kvrelay.kv_transfer.nccl import NcclBackend

    return NcclBackend(region, terms.host, terms.meet_s, terms.patience_s)
