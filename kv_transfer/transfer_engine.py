"""The transfer engine: leases, fetches and peers of a node, over its backends.

It has the lock under which the pure tables change. `ControlThread` has sockets, heartbeats and
deadlines; the threads of backends have the bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import msgspec

from kvrelay.kv_transfer.backend import Joined, PeerEvent, ReadEnded, TransferBackend
from kvrelay.kv_transfer.backends import Backends
from kvrelay.kv_transfer.chunk_progress import ProgressTable, Question
from kvrelay.kv_transfer.connector import (
    Completion,
    Event,
    LeaseId,
    PeerKey,
    PoolRegion,
    TransferStats,
    Way,
)
from kvrelay.kv_transfer.control import ControlThread
from kvrelay.kv_transfer.fetch import FetchLimits
from kvrelay.kv_transfer.fetches import FetchTable, Sum
from kvrelay.kv_transfer.host_memory import LeaseWords
from kvrelay.kv_transfer.leases import LeaseTable
from kvrelay.kv_transfer.messages import (
    End,
    Ended,
    Follow,
    HandshakeReply,
    HandshakeRequest,
    Message,
    Refused,
    Renew,
    Renewed,
)
from kvrelay.kv_transfer.peers import Peers
from kvrelay.kv_transfer.rank_backends import make_backends, terms_of
from kvrelay.kv_transfer.ranks import RankLink
from kvrelay.kv_transfer.tickets import refusal, signed
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import Incompatible, KvrelayError, PeerLost
from kvrelay.wire.transfer import Fingerprint, Ticket

__all__ = ["TransferEngine", "open_connector"]

MAX_ID_CHARS = 256
# Two threads to join, and close() promises a second.
JOIN_S = 0.4
# A step loop that has not looked for so long hangs. A step of a long prompt on a CPU takes seconds.
STALL_S = 60.0


class TransferEngine:
    """A node's KV connector, both as source and as reader.

    As the source it keeps a lease on offered blocks until the reader or the router releases them,
    or the lease runs out. As the reader it keeps the source's lease alive from `watch` on, and
    fetches. The step loop calls, and all methods but `close` return at once.
    """

    def __init__(
        self,
        engine_id: str,
        fingerprint: Fingerprint,
        region: PoolRegion,
        config: TransferConfig,
        wake: Callable[[], None],
        backends: Mapping[str, TransferBackend],
        link: RankLink | None = None,
    ) -> None:
        """Serve from here on. `backends`: this rank's, the best first; `link`: to the other ranks.

        `wake` is called from any thread when `events` has something. Raises ConfigError.
        """
        self.engine_id = engine_id
        """Stable name of this node among its peers."""
        self.generation = uuid.uuid4().hex
        """Fresh id of this process."""
        self._fingerprint = fingerprint
        self._region = region
        self._config = config
        self._wake = wake
        self._lock = threading.Lock()
        self._leases = LeaseTable(config.lease_s)
        self._words = LeaseWords(self.generation)
        self._growths = ProgressTable()
        self._growing: dict[str, Ticket] = {}  # as they will be when they are complete
        self._stepped_at = time.monotonic()
        heads = ((0, fingerprint.kv_heads),) if link is None else link.heads
        deadline_s, floor_bytes_s = config.transfer_deadline_s, config.transfer_floor_bytes_s
        # All ranks hold equally many heads.
        block_bytes = len(heads) * region.block_bytes
        limits = FetchLimits(config.lease_s, deadline_s, floor_bytes_s, block_bytes)
        self._fetches = FetchTable(limits, config.kv_checksums)
        self._heard_at = float("-inf")  # of any reader
        self._broken: Exception | None = None
        self._control = ControlThread(self, config.kv_host, config.kv_port, config.cluster_secret)
        self.address = self._control.address
        """Host and port of the control channel that peers dial."""
        try:
            self._backends = Backends(
                backends, self, region, heads[0], link, checksums=config.kv_checksums > 0
            )
        except KvrelayError:
            self._control.close(JOIN_S)
            if link is not None:
                link.close(JOIN_S)
            raise
        hello = HandshakeRequest(engine_id, fingerprint, [])
        self._peers = Peers(hello, config, self._fetches, self._control, self._backends)
        # Readers that wait for a HandshakeReply until these backends are open.
        self._callers: dict[bytes, list[str]] = {}
        self._beat_at = time.monotonic()  # of the control thread
        self._control.start()

    # The connector interface: called from the step loop.

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the backends that peers can use, the best first; not all are open."""
        return tuple(self._backends)

    def offer(
        self,
        request_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        ready: int | None = None,
        adapter: tuple[str, str] = ("", ""),
    ) -> Ticket:
        """Source: lease these blocks to whoever comes with the ticket. One Released follows.

        `ready`: the KV still grows, so many of the blocks can be read. None: all of it is there.
        Raises ValueError for a request that is offered already, or too long an id.
        """
        if len(request_id) > MAX_ID_CHARS:
            raise ValueError(
                f"request id of {len(request_id)} characters is over the limit of {MAX_ID_CHARS}"
            )
        with self._turn():
            lease = self._leases.grant(request_id, time.monotonic(), growing=ready is not None)
            self._words.begin(lease)
            self._growths.begin(lease, len(block_ids) if ready is None else ready, block_ids)
        self._backends.nudge()
        host, port = self.address
        ticket = Ticket(
            remote_engine_id=self.engine_id,
            remote_block_ids=[list(block_ids)],
            remote_request_id=request_id,
            remote_host=host,
            remote_port=port,
            tp_size=self._fingerprint.tp_size,
            generation=self.generation,
            lease_epoch=lease.epoch,
            num_tokens=num_tokens,
            growing=ready is not None,
            adapter=adapter[0],
            adapter_digest=adapter[1],
        )
        secret, now = self._config.cluster_secret, time.time()
        if ready is not None:  # whether it grows is signed, too
            whole = msgspec.structs.replace(ticket, growing=False)
            self._growing[request_id] = signed(whole, secret, now)
        return signed(ticket, secret, now)

    def grow(self, request_id: str, ready: int) -> None:
        """Source: so many blocks of a growing offer can be read. Unknown ids are ignored."""
        with self._turn():
            self._growths.grow(request_id, ready)

    def complete(self, request_id: str, completion: Completion) -> Ticket | None:
        """Source: a growing offer is complete. Returns the ticket; None for unknown ids."""
        with self._turn():
            if not self._leases.complete(request_id, time.monotonic()):
                return None
            ticket = self._growing.pop(request_id)
            self._growths.grow(request_id, _blocks(ticket), completion)
        return ticket

    def prolong(self, request_id: str) -> None:
        """Source: begin the lease anew, for somebody who waits without a connector."""
        with self._turn():
            self._leases.prolong(request_id, time.monotonic())

    def release(self, request_id: str) -> None:
        """Source: end the lease now. Unknown ids are ignored."""
        with self._turn():
            self._leases.release(request_id)

    def watch(self, request_id: str, ticket: Ticket) -> None:
        """Reader: keep this ticket's lease alive from now on.

        Raises ValueError if the request is watched already, or not settled yet.
        """
        peer = _source(ticket)
        lease = LeaseId(ticket.remote_request_id, ticket.lease_epoch)
        refused = refusal(ticket, self._config.cluster_secret, time.time())
        now = time.monotonic()
        if not all((*peer, lease.request_id)) or len(lease.request_id) > MAX_ID_CHARS:
            refused = (
                "kv_transfer_params must name remote_host, remote_port, generation and a "
                f"remote_request_id of at most {MAX_ID_CHARS} characters, got {peer.host!r}, "
                f"{peer.port}, {peer.generation!r} and {lease.request_id[:MAX_ID_CHARS]!r}"
            )
        with self._turn():
            growing = _blocks(ticket) if ticket.growing else None
            self._fetches.watch(request_id, peer, lease, growing)
            # Before anything is dialled: the address is part of what the signature vouches for.
            if refused is not None:
                self._fetches.doom(request_id, Incompatible(refused))
            else:
                self._peers.want(request_id, peer, lease, now)

    def fetch(
        self, request_id: str, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> None:
        """Reader: read remote block i into local block i. Fetched or FetchFailed follows.

        Empty lists release the source's lease: the reader had all of it cached. Raises ValueError
        for unwatched requests and blocks outside the pool.
        """
        if any(not 0 <= block < self._region.num_blocks for block in local_blocks):
            raise ValueError(
                f"local blocks {list(local_blocks)} reach outside the pool of "
                f"{self._region.num_blocks}"
            )
        with self._turn():
            self._fetches.fetch(request_id, remote_blocks, local_blocks, time.monotonic())

    def cancel(self, request_id: str) -> None:
        """Reader: give the request up.

        One Settled follows if a fetch was running, and nothing if the request was only watched.
        """
        with self._turn():
            self._fetches.cancel(request_id)

    def way(self, ticket: Ticket) -> Way | None:
        """Reader: how this ticket's source is read; None while that is not known, or no more."""
        with self._lock:
            return self._peers.way(_source(ticket))

    def events(self) -> list[Event]:
        """Return the events since the last call. Raises RuntimeError if a thread has ended."""
        if self._broken is not None:
            why = f"a thread of the KV connector has ended: {self._broken}"
            raise RuntimeError(why) from self._broken
        with self._lock:
            self._stepped_at = time.monotonic()
            news: list[Event] = [*self._leases.events, *self._fetches.events]
            self._leases.events.clear()
            self._fetches.events.clear()
        return news

    def stats(self) -> TransferStats:
        with self._lock:
            leases, stats = self._leases, self._fetches.stats
            return replace(
                stats,
                failures=stats.failures.copy(),
                leases_granted=leases.granted,
                leases_released=leases.released,
                leases_expired=leases.expired,
                leases_held=len(leases),
                silent_s=max(time.monotonic() - self._beat_at, self._backends.silent_s()),
            )

    def close(self) -> None:
        """End all threads and sockets within a second; watched leases are given back."""
        with self._lock:
            self._peers.take_leave()
            self._words.close()
        # The backends first: who finds nobody at our address believes that nothing of ours is on its
        # way.
        self._backends.close(JOIN_S)
        self._control.close(JOIN_S)

    # Called from the control thread.

    def answer(self, sender: bytes, message: Message) -> Message | None:
        now = time.monotonic()
        if not self.serving():
            self._backends.nudge()
        self._heard_at = now
        if isinstance(message, HandshakeRequest):
            return self._answer_to(sender, message)
        with self._turn():
            if isinstance(message, Renew):
                kept, lost = self._leases.renew(message.leases, now)
                if now - self._stepped_at > STALL_S:
                    kept, lost = [], message.leases
                return Renewed(message.sent_at, kept, lost)
            if isinstance(message, Follow):
                lease, blocks = message.lease, message.checksums
                told: Message | None = None
                if not blocks:
                    self._leases.want(lease)
                    told = self._growths.follow(lease, sender)
                elif not self._backends.can_sum or self._growths.ask(sender, lease, blocks):
                    return None  # the checksums come later, or never
                return told or Renewed(now, [], [lease])
            if isinstance(message, End):
                # A reader whose place another one has taken ends nothing; but what it has read
                # counts while it is held.
                replaced = self._growths.superseded(message.lease, sender)
                end = self._leases.holds if replaced else self._leases.end
                return Ended(message.token, end(message.lease, now))
        return Refused(f"a source does not expect {type(message).__name__}")

    def on_message(self, peer: PeerKey, message: Message) -> None:
        with self._turn():
            self._peers.on_message(peer, message, time.monotonic())

    def on_disconnect(self, peer: PeerKey, how: str) -> None:
        with self._turn():
            self._peers.on_disconnect(peer, how, time.monotonic())

    def on_process_gone(self, peer: PeerKey) -> None:
        with self._turn():
            self._peers.on_process_gone(peer, time.monotonic())

    def tick(self, now: float) -> float:
        self._beat_at = now
        self._backends.expire(now)
        with self._turn():
            self._leases.expire(now)
            self._fetches.tick(now)
            expiry = self._leases.next_expiry()
            due = [self._peers.tick(now), self._fetches.next_deadline()]
        # Never longer than a heartbeat: leases granted meanwhile are longer than that.
        soonest = min(*due, now + self._config.heartbeat_s)
        return (soonest if expiry is None else min(soonest, expiry)) - now

    # Called from the threads of backends.

    def on_backend_opened(self, kind: str) -> None:
        with self._turn():
            self._peers.on_opened(kind, time.monotonic())
            for caller, kinds in list(self._callers.items()):
                if not any(map(self._backends.is_opening, kinds)):
                    del self._callers[caller]
                    self._control.send_to_reader(caller, self._welcome())

    def on_backend_event(self, kind: str, rank: int, event: PeerEvent) -> None:
        now = time.monotonic()
        with self._turn():
            match self._backends[kind].on_event(rank, event):
                case Joined(peer, error):
                    self._peers.on_joined(peer, error, now)
                case ReadEnded(peer, read_id, None):
                    self._fetches.read_ended(read_id, now)
                    self._peers.on_read_over(peer)
                case ReadEnded(peer, read_id, error, in_flight) if error is not None:
                    if isinstance(error, PeerLost):
                        self._peers.on_way_lost(peer)
                    self._fetches.read_failed(read_id, error, now, in_flight=in_flight)
                    self._peers.on_read_over(peer)

    def serving(self) -> bool:
        return len(self._leases) > 0 or time.monotonic() - self._heard_at < self._config.lease_s

    def on_error(self, error: Exception) -> None:
        self._broken = error
        self._wake()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            yield
            commands, self._fetches.commands = self._fetches.commands, []
            for command in commands:
                if isinstance(command, Sum):
                    self._backends.sums(command.local_blocks, partial(self._summed, command))
                else:
                    self._peers.carry_out(command, time.monotonic())
            for ended in self._leases.events:
                self._words.end(ended.request_id)
                self._growths.forget(ended.request_id)
                self._growing.pop(ended.request_id, None)
            while (question := self._growths.next()) is not None:
                self._backends.sums(question.blocks, partial(self._vouched, question))
            growth, self._growths.news = self._growths.news, []
            for follower, grown in growth:
                self._control.send_to_reader(follower, grown)
            news = any(chain(self._leases.events, self._fetches.events))
        if news:
            self._wake()

    def _answer_to(self, caller: bytes, hello: HandshakeRequest) -> Message | None:
        difference = hello.fingerprint.difference(self._fingerprint)
        if difference is not None:
            return Refused(f"{difference}; both nodes need the same model and KV settings")
        with self._lock:
            kinds = [kind for kind in self._backends if hello.opens is None or kind in hello.opens]
            for kind in kinds:
                self._backends.open(kind)
            if any(map(self._backends.is_opening, kinds)):
                self._callers[caller] = kinds
                return None
        return self._welcome()

    def _welcome(self) -> HandshakeReply:
        backends, words = self._backends, self._words.place
        return HandshakeReply(
            self.engine_id,
            self.generation,
            self._fingerprint,
            backends.ranks,
            words,
            backends.can_sum,
            backends.on_request,
        )

    def _vouched(self, question: Question, checksums: list[bytes]) -> None:
        with self._turn():
            told = self._growths.answered(question, checksums)
        if told is not None:
            self._control.send_to_reader(question.sender, told)

    def _summed(self, command: Sum, checksums: list[bytes]) -> None:
        with self._turn():
            self._fetches.summed(command, checksums, time.monotonic())


def _source(ticket: Ticket) -> PeerKey:
    return PeerKey(ticket.remote_host, ticket.remote_port, ticket.generation)


def _blocks(ticket: Ticket) -> int:
    return sum(map(len, ticket.remote_block_ids))


def open_connector(
    engine_id: str,
    fingerprint: Fingerprint,
    region: PoolRegion,
    config: TransferConfig,
    wake: Callable[[], None],
    link: RankLink | None = None,
) -> TransferEngine:
    """Prepare the backends that `config.kv_connector` names, and open the best.

    The others are opened when a peer needs them. `link` leads to the other ranks, which call
    `join_connector`. `wake` is called from any thread when `events` has something. Raises
    ConfigError.
    """
    backends = make_backends(engine_id, region, terms_of(config))
    return TransferEngine(engine_id, fingerprint, region, config, wake, backends, link)
