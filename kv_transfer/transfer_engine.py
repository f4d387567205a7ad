"""The transfer engine: leases, fetches and peers of a node, over its backends.

Its lock guards the pure tables. `ControlThread` has sockets, heartbeats and deadlines; backends'
threads have the bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from kvrelay.kv_transfer.backend import Joined, ReadEnded, TransferBackend
from kvrelay.kv_transfer.backends import Backends
from kvrelay.kv_transfer.cached import Asks, Callers
from kvrelay.kv_transfer.checksums import MOST_BLOCKS, Sums
from kvrelay.kv_transfer.connector import (
    BlockIds,
    Completion,
    Doubted,
    Event,
    LeaseId,
    PeerKey,
    PoolRegion,
    Read,
    lease_of,
    peer_of,
)
from kvrelay.kv_transfer.control import ControlThread
from kvrelay.kv_transfer.fetches import FetchTable, Sum
from kvrelay.kv_transfer.host_memory import LeaseWords
from kvrelay.kv_transfer.messages import (
    Doubt,
    End,
    Ended,
    Follow,
    HandshakeReply,
    HandshakeRequest,
    LeaseCached,
    Leased,
    Message,
    Refused,
    Renew,
    Renewed,
)
from kvrelay.kv_transfer.offers import Offers
from kvrelay.kv_transfer.peers import Peers
from kvrelay.kv_transfer.rank_backends import make_backends, terms_of
from kvrelay.kv_transfer.ranks import Broke, FromRank, RankLink
from kvrelay.kv_transfer.sockets import JOIN_S
from kvrelay.kv_transfer.tickets import refusal, sealed_address, signed
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.engine_messages import TransferStats
from kvrelay.wire.errors import Incompatible, KvrelayError, PeerLost
from kvrelay.wire.transfer import Fingerprint, Source, Ticket

__all__ = ["TransferEngine"]

# A step loop silent for so long hangs. A long prompt's step on a CPU takes seconds.
STALL_S = 60.0


class TransferEngine:
    """A node's KV connector, both as source and as reader.

    The source leases offered blocks until somebody releases them, or the lease runs out. The reader
    renews it from `watch` on, and fetches. All methods but `close` return at once.
    """

    def __init__(
        self,
        engine_id: str,
        fingerprint: Fingerprint,
        region: PoolRegion,
        config: TransferConfig,
        wake: Callable[[], None],
        backends: Mapping[str, TransferBackend] | None = None,
        link: RankLink | None = None,
        kept: Sums | None = None,
    ) -> None:
        """Prepare the backends, by default those of `config.kv_connector`, and open the best.

        Others are opened when a peer needs them. `link` leads to ranks that call `join_connector`.
        `kept` gives checksums that came with the blocks, in place of new ones. `wake` is called
        from any thread when `events` has something. Raises ConfigError.
        """
        self.engine_id = engine_id
        """Stable name among its peers."""
        self.generation = uuid.uuid4().hex
        """Fresh for each process."""
        self._fingerprint = fingerprint
        self._config = config
        self._wake = wake
        self._lock = threading.Lock()
        self._words = LeaseWords(self.generation)
        self._offers = Offers(config.lease_s, self._words)
        self._callers_asks = Callers()
        self._asks = Asks(config.cluster_secret)
        self._stepped_at = time.monotonic()
        self._kept = kept
        heads = ((0, fingerprint.kv_heads),) if link is None else link.heads
        # All ranks hold equally many heads.
        self._fetches = FetchTable(config, len(heads) * region.block_bytes, keeps=kept is not None)
        self._tables = self._offers, self._fetches, self._asks, self._callers_asks
        self._callers: dict[bytes, list[str]] = {}  # readers, and backends that they await
        self._broken: Exception | None = None
        self._control = ControlThread(self, config.kv_host, config.kv_port, config.cluster_secret)
        self.address = self._control.address
        """Host and port that peers dial."""
        at = PeerKey(*self.address, self.generation)
        self.address_seal = sealed_address(at, config.cluster_secret)
        try:
            if backends is None:
                backends = make_backends(engine_id, region, terms_of(config))
            self._backends = Backends(
                backends, self, region, heads[0], link, checksums=config.kv_checksums > 0
            )
            self._backends.open_first(self._on_opened)
        except KvrelayError:
            self._control.close()
            if link is not None:
                link.close()
            raise
        hello = HandshakeRequest(engine_id, fingerprint)
        self._peers = Peers(hello, config, self._fetches, self._asks, self._control, self._backends)
        self._beat_at = time.monotonic()
        self._control.start()

    # The connector interface: called from the step loop.

    @property
    def planes(self) -> tuple[str, ...]:
        """Return the backends that peers can use, the best first; not all are open."""
        return tuple(self._backends)

    def offer(
        self,
        request_id: str,
        block_ids: BlockIds,
        num_tokens: int,
        ready: int | None = None,
        adapter: tuple[str, str] = ("", ""),
    ) -> Ticket:
        """Source: lease these blocks to whoever has the ticket. One Released follows.

        `ready`: so many blocks can be read while the KV grows; None: all. Raises ValueError for a
        repeated request.
        """
        host, port = self.address
        ticket = Ticket(
            remote_engine_id=self.engine_id,
            remote_block_ids=[list(block_ids)],
            remote_request_id=request_id,
            remote_host=host,
            remote_port=port,
            tp_size=self._fingerprint.tp_size,
            generation=self.generation,
            num_tokens=num_tokens,
            growing=ready is not None,
            adapter=adapter[0],
            adapter_digest=adapter[1],
        )
        with self._turn():
            readable = len(block_ids) if ready is None else ready
            ticket = self._offers.add(ticket, readable, time.monotonic())
        return signed(ticket, self._config.cluster_secret, time.time())

    def grow(self, request_id: str, ready: int) -> None:
        """Source: so many blocks of a growing offer can be read. Unknown ids are ignored."""
        with self._turn():
            self._offers.grow(request_id, ready)

    def complete(self, request_id: str, completion: Completion) -> Ticket | None:
        """Source: complete a growing offer; return the ticket, None for unknown ids."""
        with self._turn():
            ticket = self._offers.complete(request_id, completion, time.monotonic())
        return ticket and signed(ticket, self._config.cluster_secret, time.time())

    def prolong(self, request_id: str) -> None:
        """Source: restart the lease, for a waiting node without a connector."""
        with self._turn():
            self._offers.prolong(request_id, time.monotonic())

    def release(self, request_id: str) -> None:
        """Source: end the lease now. Unknown ids are ignored."""
        with self._turn():
            self._offers.release(request_id)

    def answer_cached(self, request_id: str, block_ids: BlockIds) -> None:
        """Source: answer a CachedAsked with the first of its blocks that are held for it, if any.

        A lease begins for this request id, as by `offer`.
        """
        with self._turn():
            caller, ask = self._callers_asks.take(request_id)
        tokens = (ask.first + len(block_ids)) * self._fingerprint.block_size
        ticket = self.offer(request_id, block_ids, tokens) if block_ids else None
        self._control.send_to_reader(caller, Leased(ask.token, ticket))

    def ask(
        self,
        request_id: str,
        source: Source,
        hashes: Sequence[bytes],
        first: int,
        within_s: float,
    ) -> None:
        """Reader: ask for a lease on the longest cached prefix of these hashes. One Granted follows.

        `first`: the number of their first block, with which the ticket's blocks begin.
        """
        now = time.monotonic()
        with self._turn():
            if self._asks.begin(request_id, source, hashes, first, now + within_s):
                self._peers.ask(peer_of(source), now)
        self._control.wake()

    def meet(self, source: Source) -> bool:
        """Reader: get ready to read from a source; return whether that is so."""
        with self._turn():
            return self._peers.meet(peer_of(source), source.seal, time.monotonic())

    def watch(self, request_id: str, ticket: Ticket) -> None:
        """Reader: renew this ticket's lease from now on.

        Raises ValueError if the request is watched or not settled yet.
        """
        peer, lease = peer_of(ticket), lease_of(ticket)
        refused = refusal(ticket, self._config.cluster_secret, time.time())
        with self._turn():
            growing = len(ticket.blocks) if ticket.growing else None
            self._fetches.watch(request_id, peer, lease, growing)
            # Before anything is dialled: the signature vouches for the address, too.
            if refused is not None:
                self._fetches.doom(request_id, Incompatible(refused))
            else:
                self._peers.want(request_id, peer, lease, time.monotonic())

    def fetch(
        self,
        request_id: str,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        within_s: float = 0.0,
    ) -> None:
        """Reader: read remote block i into local block i. Fetched or FetchFailed follows.

        It may take `within_s`; 0: what the configuration says. Empty lists release the source's
        lease. Raises ValueError for unwatched requests.
        """
        with self._turn():
            now = time.monotonic()
            self._fetches.fetch(request_id, remote_blocks, local_blocks, now, within_s)

    def cancel(self, request_id: str) -> None:
        """Reader: give the request up. One Settled follows if a fetch was running."""
        with self._turn():
            self._fetches.cancel(request_id)
            self._fetches.commands += self._asks.cancel(request_id)

    def events(self) -> list[Event]:
        """Return new events. Raises RuntimeError if a thread has ended."""
        if self._broken is not None:
            why = f"a thread of the KV connector has ended: {self._broken}"
            raise RuntimeError(why) from self._broken
        with self._lock:
            self._stepped_at = time.monotonic()
            news: list[Event] = [event for table in self._tables for event in table.events]
            for table in self._tables:
                table.events.clear()
        return news

    def stats(self) -> TransferStats:
        with self._lock:
            offers, stats = self._offers, self._fetches.stats
            return replace(
                stats,
                failures=stats.failures.copy(),
                ask_failures=self._asks.failures.copy(),
                leases_granted=offers.granted,
                leases_released=offers.released,
                leases_expired=offers.expired,
                silent_s=max(time.monotonic() - self._beat_at, self._backends.silent_s()),
            )

    def close(self) -> None:
        """End all threads and sockets within a second; give watched leases back."""
        with self._lock:
            self._peers.take_leave()
            self._words.close()
        # The backends first: whoever finds nobody at our address believes that nothing of ours is
        # in flight.
        self._backends.close(JOIN_S)
        self._control.close()

    # Called from the control thread.

    def answer(self, sender: bytes, message: Message) -> Message | None:
        now = time.monotonic()
        with self._turn():
            match message:
                case HandshakeRequest():
                    return self._welcome(sender, message)
                case Renew(sent_at, leases):
                    kept, lost = self._offers.renew(leases, now)
                    if now - self._stepped_at > STALL_S:
                        kept, lost = [], leases
                    return Renewed(sent_at, kept, lost)
                case Follow(lease, []):
                    return self._offers.follow(lease, sender) or Renewed(now, [], [lease])
                case Follow(lease, blocks):
                    asked = self._offers.ask(lease, sender, blocks)
                    if asked and self._kept is not None:
                        self._vouch(sender, lease, asked, self._kept(asked))
                    elif asked and self._backends.can_sum:
                        self._backends.sums(asked, partial(self._vouch, sender, lease, asked))
                    return Renewed(now, [], [lease]) if asked is None else None
                case LeaseCached():
                    return self._callers_asks.asked(sender, message)
                case Doubt(blocks) if self._kept is not None:
                    self._callers_asks.events.append(Doubted(tuple({*blocks[:MOST_BLOCKS]})))
                    return None
                case End(lease, token):
                    return Ended(token, self._offers.end(lease, sender, now))
                case _:
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
        with self._turn():
            self._offers.expire(now)
            self._fetches.tick(now)
            expiry, deadline = self._offers.next_expiry(), self._fetches.next_deadline()
            due = self._peers.tick(now)
        # At most a heartbeat: new leases are longer.
        return min(expiry, deadline, due, now + self._config.heartbeat_s) - now

    # Called from the threads of backends and of the link to other ranks.

    def on_rank(self, rank: int, message: FromRank) -> None:
        now = time.monotonic()
        if isinstance(message, Broke):
            self.on_error(KvrelayError(f"rank {rank}: {message.reason}"))
            return
        with self._turn():
            match self._backends.heard(rank, message):
                case Joined(peer, _, error):
                    self._peers.on_joined(peer, error, now)
                case ReadEnded(peer, read_id, None):
                    self._fetches.read_ended(read_id, now)
                    self._peers.on_read_over(peer)
                case ReadEnded(peer, read_id, error, in_flight) if error is not None:
                    if isinstance(error, PeerLost):
                        self._peers.on_way_lost(peer)
                    self._fetches.read_failed(read_id, error, in_flight=in_flight)
                    self._peers.on_read_over(peer)

    def on_error(self, error: Exception) -> None:
        self._broken = error
        self._wake()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            yield
            commands, self._fetches.commands = self._fetches.commands, []
            for command in commands:
                match command:
                    case Read():
                        self._backends.read(command)
                    case Sum(_, _, local_blocks):
                        self._backends.sums(local_blocks, partial(self._summed, command))
                    case (peer, message):
                        self._peers.say(peer, message, time.monotonic())
            progress, self._offers.news = self._offers.news, []
            for follower, grown in progress:
                self._control.send_to_reader(follower, grown)
            news = any(table.events for table in self._tables)
        if news:
            self._wake()

    def _welcome(self, caller: bytes, hello: HandshakeRequest) -> Message:
        difference = hello.fingerprint.difference(self._fingerprint)
        if difference is not None:
            return Refused(f"{difference}; both nodes need the same model and KV settings")
        if opening := [kind for kind in hello.opens if self._backends.open(kind)]:
            self._callers[caller] = opening
        return self._reply()

    def _reply(self) -> HandshakeReply:
        backends = self._backends
        return HandshakeReply(
            self.engine_id,
            self.generation,
            self._fingerprint,
            backends.ranks,
            self._words.place,
            backends.can_sum,
            backends.on_request,
            self._kept is not None,
        )

    def _on_opened(self, _: str) -> None:
        self._peers.on_opened(time.monotonic())
        for caller, kinds in list(self._callers.items()):
            if not any(map(self._backends.open, kinds)):
                del self._callers[caller]
                self._control.send_to_reader(caller, self._reply())

    def _vouch(
        self, reader: bytes, lease: LeaseId, blocks: list[int], checksums: list[bytes]
    ) -> None:
        told = self._offers.vouch(lease, reader, dict(zip(blocks, checksums, strict=True)))
        if told is not None:
            self._control.send_to_reader(reader, told)

    def _summed(self, command: Sum, checksums: list[bytes]) -> None:
        self._fetches.summed(command, checksums, time.monotonic())
