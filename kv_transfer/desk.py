"""The part of a connector that is the same for every data plane: leases, fetches, peers and the talk between nodes.

`Desk` implements the `Connector` interface over a `DataPlane`. It owns the lock under which the pure tables change, and
two threads that do nothing but carry: `ControlThread` (sockets, heartbeats, deadlines) and `PlaneThread` (bytes).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

import msgspec

from kv_transfer.connector import Completion, Event, PoolRegion, TransferStats, Way
from kv_transfer.control import ControlThread
from kv_transfer.fetches import FetchLimits, FetchTable, PeerKey, Prove, Read
from kv_transfer.growth import GrowthTable
from kv_transfer.lease_words import HeldWords, LeaseWords
from kv_transfer.leases import LeaseId, LeaseTable
from kv_transfer.messages import End, Ended, Follow, Grown, Hello, Message, Refused, Renew, Renewed, Welcome
from kv_transfer.plane_choice import OpenPlanes
from kv_transfer.planes import DataPlane, Source
from kv_transfer.rank_link import RankLink
from kv_transfer.tickets import refusal, signed
from wire.config import TransferConfig
from wire.errors import Incompatible, KvrelayError, PeerLost, TransferError
from wire.transfer import Fingerprint, KvTransferParams

__all__ = ["Desk"]

log = logging.getLogger(__name__)

# 1,000 leases of the longest request id make a message of half the size limit.
RENEW_BATCH, MAX_ID_CHARS = 1000, 256
# Two threads to join, and close() promises a second.
JOIN_S = 0.4
# A step loop that has not looked for so long hangs: what it was computing will not be there. One step of a long prompt
# on a CPU takes seconds.
STALL_S = 60.0


@dataclass(slots=True)
class _Peer:
    """A process that we read from, or are about to, or did."""

    answer_by: float
    welcomed: bool = False
    renew_at: float = 0.0
    lost: KvrelayError | None = None
    words: HeldWords | None = None
    """Its leases, if it runs on this host."""
    plane: str = ""
    """The plane that we read through, or are about to."""
    choices: list[tuple[str, list[tuple[int, Source]]]] = field(default_factory=list)
    """Planes that were not tried yet, the best first; and which rank of ours reads what."""
    missed: dict[str, str] = field(default_factory=dict)
    """Planes that one of us does not have, or that did not work; and why."""


class Desk:
    """A connector over data planes. See `kv_transfer.connector.Connector` for the contract of its methods."""

    def __init__(
        self,
        engine_id: str,
        fingerprint: Fingerprint,
        region: PoolRegion,
        config: TransferConfig,
        wake: Callable[[], None],
        planes: Mapping[str, DataPlane],
        link: RankLink | None = None,
    ) -> None:
        """Serves from here on. `planes`: the best first; those of several that cannot be had here are left out.

        `region` and `planes` are this process's; `link` leads to those of the engine's other ranks, if it has any.
        `wake` is called from any thread when `events` has something. Raises ConfigError."""
        self._engine_id = engine_id
        self._generation = uuid.uuid4().hex
        self._fingerprint = fingerprint
        self._region = region
        self._config = config
        self._wake = wake
        self._lock = threading.Lock()
        self._leases = LeaseTable(config.lease_s)
        self._words = LeaseWords(self._generation)
        self._growths = GrowthTable()
        self._offers: dict[str, KvTransferParams] = {}  # of tickets that grow
        self._stepped_at = time.monotonic()
        heads = ((0, fingerprint.kv_heads),) if link is None else link.heads
        num_bytes = len(heads) * region.block_bytes  # of a block on all ranks, which hold equally many heads
        self._fetches = FetchTable(
            FetchLimits(config.lease_s, config.transfer_deadline_s, config.transfer_floor_bytes_s, num_bytes)
        )
        self._peers: dict[PeerKey, _Peer] = {}
        self._heard_at = float("-inf")  # of any reader
        self._broken: Exception | None = None
        self._control = ControlThread(self, config.kv_host, config.kv_port, config.cluster_secret)
        try:
            self._planes = OpenPlanes(planes, self, region, heads[0], link)
        except KvrelayError:
            self._control.close(JOIN_S)
            if link is not None:
                link.close(JOIN_S)
            raise
        self._control.start()

    # The connector interface: called from the step loop.

    @property
    def engine_id(self) -> str:
        """Stable name of this node among its peers."""
        return self._engine_id

    @property
    def generation(self) -> str:
        """Fresh at every process start."""
        return self._generation

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the control channel that peers dial."""
        return self._control.address

    def offer(
        self, request_id: str, block_ids: Sequence[int], num_tokens: int, ready: int | None = None
    ) -> KvTransferParams:
        """Source: see Connector. Raises ValueError for a request that is offered already, or too long an id."""
        if len(request_id) > MAX_ID_CHARS:
            raise ValueError(f"request id of {len(request_id)} characters is over the limit of {MAX_ID_CHARS}")
        with self._turn():
            lease = self._leases.grant(request_id, time.monotonic(), growing=ready is not None)
            self._words.begin(lease)
            self._growths.begin(lease, len(block_ids) if ready is None else ready)
        self._planes.nudge()
        host, port = self.address
        ticket = KvTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._engine_id,
            remote_block_ids=[list(block_ids)],
            remote_request_id=request_id,
            remote_host=host,
            remote_port=port,
            tp_size=self._fingerprint.tp_size,
            generation=self._generation,
            lease_epoch=lease.epoch,
            num_tokens=num_tokens,
            growing=ready is not None,
        )
        secret, now = self._config.cluster_secret, time.time()
        if ready is not None:
            # As it will be when it is complete: whether it grows is signed, too.
            self._offers[request_id] = signed(msgspec.structs.replace(ticket, growing=False), secret, now)
        return signed(ticket, secret, now)

    def grow(self, request_id: str, ready: int) -> None:
        """Source: see Connector."""
        with self._turn():
            self._growths.grow(request_id, ready)

    def complete(self, request_id: str, completion: Completion) -> KvTransferParams | None:
        """Source: see Connector."""
        with self._turn():
            if not self._leases.complete(request_id, time.monotonic()):
                return None
            ticket = self._offers.pop(request_id)
            self._growths.complete(request_id, _blocks(ticket), completion)
        return ticket

    def release(self, request_id: str) -> None:
        """Source: see Connector."""
        with self._turn():
            self._leases.release(request_id)

    def watch(self, request_id: str, params: KvTransferParams) -> None:
        """Reader: see Connector. Raises ValueError if the request is watched already, or not settled yet."""
        peer = _source(params)
        lease = LeaseId(params.remote_request_id or "", params.lease_epoch)
        refused = refusal(params, self._config.cluster_secret, time.time())
        now = time.monotonic()
        with self._turn():
            self._fetches.watch(request_id, peer, lease, _blocks(params) if params.growing else None)
            known = self._peers.get(peer)
            if not all((*peer, lease.request_id)) or len(lease.request_id) > MAX_ID_CHARS:
                self._fetches.doom(
                    request_id,
                    Incompatible(
                        "kv_transfer_params must name remote_host, remote_port, generation and a remote_request_id of"
                        f" at most {MAX_ID_CHARS} characters, got {peer.host!r}, {peer.port}, {peer.generation!r} and"
                        f" {lease.request_id[:MAX_ID_CHARS]!r}"
                    ),
                )
            elif refused is not None:
                # Before anything is dialled: the address is part of what the signature vouches for.
                self._fetches.doom(request_id, Incompatible(refused))
            elif known is None:
                # Whoever does not answer for a lease has let it run out, too.
                self._peers[peer] = _Peer(answer_by=now + self._config.lease_s)
                self._control.dial(peer, Hello(self._engine_id, self._fingerprint))
            elif known.lost is not None:
                self._fetches.doom(request_id, known.lost)
            elif known.welcomed:
                self._renew(peer, [lease], now)
                self._control.say(peer, Follow(lease))

    def fetch(self, request_id: str, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> None:
        """Reader: see Connector. Raises ValueError for unwatched requests and blocks outside the pool."""
        if any(not 0 <= block < self._region.num_blocks for block in local_blocks):
            raise ValueError(f"local blocks {list(local_blocks)} reach outside the pool of {self._region.num_blocks}")
        with self._turn():
            self._fetches.fetch(request_id, remote_blocks, local_blocks, time.monotonic())

    def cancel(self, request_id: str) -> None:
        """Reader: see Connector."""
        with self._turn():
            self._fetches.cancel(request_id)

    def way(self, params: KvTransferParams) -> Way | None:
        """Reader: see Connector."""
        with self._lock:
            known = self._peers.get(_source(params))
            if known is None or not known.plane:
                return None
            better = takewhile(lambda kind: kind != known.plane, self._planes.wanted)
            return Way(known.plane, {kind: known.missed[kind] for kind in better if kind in known.missed})

    def events(self) -> list[Event]:
        """See Connector. Raises RuntimeError if a thread of this connector has ended."""
        if self._broken is not None:
            raise RuntimeError(f"a thread of the KV connector has ended: {self._broken}") from self._broken
        with self._lock:
            self._stepped_at = time.monotonic()
            news: list[Event] = [*self._leases.events, *self._fetches.events]
            self._leases.events.clear()
            self._fetches.events.clear()
        return news

    def stats(self) -> TransferStats:
        """See Connector."""
        with self._lock:
            leases, fetches = self._leases, self._fetches
            return TransferStats(
                leases_granted=leases.granted,
                leases_released=leases.released,
                leases_expired=leases.expired,
                leases_held=len(leases),
                fetches=fetches.fetched + fetches.failures.total(),
                failures=dict(fetches.failures),
                retries=fetches.retries,
                fetched_bytes=fetches.fetched_bytes,
                fetch_s=fetches.fetch_s,
            )

    def close(self) -> None:
        """See Connector. Leases that we watch are given back; a read that is in flight is left to its fate."""
        with self._lock:
            for peer in self._peers:
                for lease in self._fetches.leases(peer):
                    self._control.say(peer, End(lease, 0))
            self._words.close()
        self._control.close(JOIN_S)
        self._planes.close(JOIN_S)

    # Called from the control thread.

    def answer(self, sender: bytes, message: Message) -> Message | None:
        """Source: what a peer asks; `sender` names it to `ControlThread.tell`."""
        now = time.monotonic()
        if not self.serving():
            self._planes.nudge()
        self._heard_at = now
        if isinstance(message, Hello):
            return self._welcome(message)
        with self._turn():
            if isinstance(message, Renew):
                kept, lost = self._leases.renew(message.leases, now)
                if now - self._stepped_at > STALL_S:
                    kept, lost = [], message.leases
                return Renewed(message.sent_at, kept, lost)
            if isinstance(message, Follow):
                self._leases.want(message.lease)
                return self._growths.follow(message.lease, sender) or Renewed(now, [], [message.lease])
            if isinstance(message, End):
                # A reader whose place another one has taken ends nothing; but what it has read counts while it is held.
                replaced = self._growths.superseded(message.lease, sender)
                end = self._leases.holds if replaced else self._leases.end
                return Ended(message.token, end(message.lease, now))
        return Refused(f"a source does not expect {type(message).__name__}")

    def hear(self, peer: PeerKey, message: Message) -> None:
        """Reader: what a source says."""
        now = time.monotonic()
        with self._turn():
            known = self._peers.get(peer)
            if known is None or known.lost is not None:
                return
            if isinstance(message, Renewed):
                self._fetches.renewed(peer, message.kept, message.lost, message.sent_at, now)
            elif isinstance(message, Ended):
                self._fetches.confirmed(peer, message.token, held=message.held, now=now)
            elif isinstance(message, Grown):
                self._fetches.grown(peer, message.lease, message.ready, message.completion, now)
            elif isinstance(message, Refused):
                self._lose(peer, Incompatible(f"{peer.host}:{peer.port} refused: {message.reason}"))
            elif isinstance(message, Welcome) and not known.welcomed:
                self._be_welcomed(peer, known, message, now)

    def gone(self, peer: PeerKey) -> None:
        """Reader: the connection to a source has ended."""
        with self._turn():
            self._lose(peer, PeerLost(f"the connection to {peer.host}:{peer.port} has ended or was refused"))

    def beat(self, now: float) -> float:
        """Leases that end, fetches that are late, peers to hear from. Returns seconds until something is due."""
        with self._turn():
            self._leases.expire(now)
            self._fetches.tick(now)
            for peer, known in list(self._peers.items()):
                if known.lost is None and known.welcomed and now >= known.renew_at:
                    leases = self._fetches.leases(peer)
                    self._renew(peer, leases, now)
                    if not leases and self._fetches.reading(peer):
                        # Of a lease that is over, but the source must go on helping for as long as the read takes.
                        self._control.say(peer, Renew(now, []))
                    for lease in self._fetches.growing(peer):
                        self._control.say(peer, Follow(lease))  # what was told meanwhile may have been lost
                    known.renew_at = now + self._config.heartbeat_s
                elif known.lost is None and not known.welcomed and now >= known.answer_by:
                    waited_s = self._config.lease_s
                    self._lose(peer, PeerLost(f"no answer from {peer.host}:{peer.port} within {waited_s:g} s"))
            due = [self._leases.next_expiry(), self._fetches.next_deadline()]
            due += [p.renew_at if p.welcomed else p.answer_by for p in self._peers.values() if p.lost is None]
        soonest = min((at for at in due if at is not None), default=float("inf"))
        # Never longer than a heartbeat: leases granted meanwhile are longer than that.
        return min(soonest - now, self._config.heartbeat_s)

    # Called from the plane's thread.

    def joined(self, peer: PeerKey, error: KvrelayError | None) -> None:
        """The plane can read from a peer, or cannot."""
        with self._turn():
            if error is not None:
                self._try_next_plane(peer, error)
            elif peer in self._peers and self._peers[peer].lost is None:
                log.info("KV of %s:%d comes by %s", peer.host, peer.port, self._peers[peer].plane)
                self._fetches.peer_ready(peer, time.monotonic())

    def read_ended(self, peer: PeerKey, read_id: int) -> None:
        """All bytes of a read are in."""
        with self._turn():
            self._fetches.read_ended(read_id, time.monotonic())
            self._retire(peer)

    def read_failed(self, peer: PeerKey, read_id: int, error: KvrelayError, *, in_flight: bool) -> None:
        """A read broke."""
        with self._turn():
            self._fetches.read_failed(read_id, error, time.monotonic(), in_flight=in_flight)
            self._retire(peer)

    def serving(self) -> bool:
        """Whether peers may be reading from here: leases are out, or a reader has said something lately."""
        return len(self._leases) > 0 or time.monotonic() - self._heard_at < self._config.lease_s

    def broke(self, error: Exception) -> None:
        """A thread has ended; `events` says so."""
        self._broken = error
        self._wake()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One change of the tables: under the lock, its commands carried out in order, the step loop woken after it."""
        with self._lock:
            yield
            commands, self._fetches.commands = self._fetches.commands, []
            for command in commands:
                if isinstance(command, Prove):
                    self._renew(command.peer, [command.lease], time.monotonic())
                elif isinstance(command, Read):
                    self._planes[self._peers[command.peer].plane].read(command)
                elif command.token and self._sees_held(command.peer, command.lease):
                    # The answer is there already: a farewell, and nothing to wait for.
                    self._control.say(command.peer, End(command.lease, 0))
                    self._fetches.confirmed(command.peer, command.token, held=True, now=time.monotonic())
                else:
                    self._control.say(command.peer, End(command.lease, command.token))
            for ended in self._leases.events:
                self._words.end(ended.request_id)
                self._growths.forget(ended.request_id)
                self._offers.pop(ended.request_id, None)
            growth, self._growths.news = self._growths.news, []
            for follower, grown in growth:
                self._control.tell(follower, grown)
            news = any(chain(self._leases.events, self._fetches.events))
        if news:
            self._wake()

    def _sees_held(self, peer: PeerKey, lease: LeaseId) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.words is not None and known.words.held(lease)

    def _welcome(self, hello: Hello) -> Message:
        difference = hello.fingerprint.difference(self._fingerprint)
        if difference is not None:
            return Refused(f"{difference}; both nodes need the same model and KV settings")
        ranks, words = self._planes.ranks, self._words.place
        return Welcome(self._engine_id, self._generation, self._fingerprint, ranks, words)

    def _be_welcomed(self, peer: PeerKey, known: _Peer, welcome: Welcome, now: float) -> None:
        where = f"{peer.host}:{peer.port}"
        difference = self._fingerprint.difference(welcome.fingerprint)
        if difference is not None:
            self._lose(peer, Incompatible(f"{where}: {difference}; both nodes need the same model and KV settings"))
        elif welcome.generation != peer.generation:
            self._lose(
                peer, PeerLost(f"{where} has restarted: the KV is of {peer.generation}, it is {welcome.generation} now")
            )
        else:
            known.welcomed, known.renew_at = True, now + self._config.heartbeat_s
            if welcome.lease_words is not None:
                with contextlib.suppress(TransferError):  # another host, or another user: we ask
                    known.words = HeldWords(welcome.lease_words, peer.generation, welcome.engine_id)
            leases = self._fetches.leases(peer)
            self._renew(peer, leases, now)
            for lease in leases:
                self._control.say(peer, Follow(lease))  # also of complete KV: it may have had another reader
            self._meet(peer, known, welcome)

    def _meet(self, peer: PeerKey, known: _Peer, welcome: Welcome) -> None:
        """Join the peer through the best plane that both have."""
        try:
            known.choices = self._planes.shared(welcome)
        except Incompatible as error:
            self._lose(peer, Incompatible(f"{peer.host}:{peer.port}: {error.message}"))
            return
        known.missed = {kind: f"the node that reads: {why}" for kind, why in self._planes.missing.items()}
        shared = {kind for kind, _ in known.choices}
        absent = [kind for kind in self._planes if kind not in shared]
        known.missed |= dict.fromkeys(absent, "the node that is read does not have it; its log says why")
        theirs = ", ".join(welcome.ranks[0].planes) or "none"
        both = f"{', '.join(self._planes)} here and {theirs} there"
        self._try_next_plane(peer, Incompatible(f"{peer.host}:{peer.port}: there is no common KV connector, {both}"))

    def _try_next_plane(self, peer: PeerKey, error: KvrelayError) -> None:
        """`error` is why there is none so far."""
        known = self._peers.get(peer)
        if known is None or known.lost is not None or not known.choices:
            self._lose(peer, error)
            return
        if known.plane:
            known.missed[known.plane] = error.message
            log.info("no KV by %s from %s:%d: %s", known.plane, peer.host, peer.port, error.message)
        known.plane, sources = known.choices.pop(0)
        self._planes[known.plane].add_peer(peer, sources)

    def _renew(self, peer: PeerKey, leases: list[LeaseId], now: float) -> None:
        for first in range(0, len(leases), RENEW_BATCH):
            self._control.say(peer, Renew(now, leases[first : first + RENEW_BATCH]))

    def _lose(self, peer: PeerKey, error: KvrelayError) -> None:
        known = self._peers.get(peer)
        if known is None or known.lost is not None:
            return
        known.lost = error
        self._fetches.peer_lost(peer, error)
        self._control.hang_up(peer)
        if known.plane:
            self._planes[known.plane].peer_gone(peer)
        self._retire(peer)

    def _retire(self, peer: PeerKey) -> None:
        """Forget a lost peer, once nothing of it can land here any more."""
        known = self._peers.get(peer)
        if known is not None and known.lost is not None and not self._fetches.reading(peer):
            del self._peers[peer]
            if known.plane:
                self._planes[known.plane].drop_peer(peer)


def _source(ticket: KvTransferParams) -> PeerKey:
    return PeerKey(ticket.remote_host or "", ticket.remote_port or 0, ticket.generation or "")


def _blocks(ticket: KvTransferParams) -> int:
    return sum(map(len, ticket.remote_block_ids or []))
