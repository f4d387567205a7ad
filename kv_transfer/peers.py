"""The peers that a node reads from: handshake, choice of a backend, renewals, and their loss.

Three things end apart. The *connection* to a peer: its fetches fail, and the next dials again. The
backend's *way* to it: it is joined anew when no READ is on the old way. And the *process*: it is
gone only if somebody else answers for it, or nobody listens there.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.backends import Backends
from kvrelay.kv_transfer.cached import Asks
from kvrelay.kv_transfer.checksums import in_our_order
from kvrelay.kv_transfer.connector import LeaseId, PeerKey, PoolRegion
from kvrelay.kv_transfer.control import ControlThread
from kvrelay.kv_transfer.fetch import NEVER
from kvrelay.kv_transfer.fetches import FetchTable
from kvrelay.kv_transfer.host_memory import HeldWords
from kvrelay.kv_transfer.messages import (
    ChunkProgress,
    End,
    Ended,
    Follow,
    HandshakeReply,
    HandshakeRequest,
    Leased,
    Message,
    Refused,
    Renew,
    Renewed,
)
from kvrelay.kv_transfer.shares import Heads
from kvrelay.kv_transfer.tickets import asking_refusal
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import Incompatible, KvrelayError, PeerLost, TransferError

__all__ = ["Peers"]

log = logging.getLogger(__name__)

# 1,000 of the longest request ids take half the message limit.
RENEW_BATCH = 1000
LEASES_CACHED = 2
"""Since this protocol version a peer leases cached blocks."""


@dataclass(slots=True)
class _Peer:
    key: PeerKey
    due: float = 0.0
    """When its answer, a heartbeat or another dialling is due."""
    welcome: HandshakeReply | None = None
    """The last one on this connection."""
    lost: KvrelayError | None = None
    vanished: bool = False
    words: HeldWords | None = None
    """Leases of a peer on this host."""
    kind: str = ""
    """The backend tried or used."""
    failed: dict[str, KvrelayError] = field(default_factory=dict)
    """Failed backends and why."""
    sources: list[tuple[int, Source]] = field(default_factory=list)
    """Ranks of ours and what each reads; none until open at both ends."""
    heads: list[int] = field(default_factory=list)
    """Where our KV heads' checksums lie among the peer's; empty if either has none."""
    joined: bool = False
    """The backend can read, as far as known."""

    @property
    def where(self) -> str:
        return f"{self.key.host}:{self.key.port}"


@dataclass(slots=True)
class Peers:
    _hello: HandshakeRequest
    _config: TransferConfig
    _fetches: FetchTable
    _asks: Asks
    _control: ControlThread
    _backends: Backends
    _peers: dict[PeerKey, _Peer] = field(default_factory=dict)

    # What the step loop wants.

    def want(self, request_id: str, key: PeerKey, lease: LeaseId, now: float) -> None:
        """Care for a request's lease at this peer, or doom its fetch."""
        peer = self._meet(key, now)
        if peer.lost is not None:
            self._fetches.doom(request_id, peer.lost)
        elif peer.welcome is not None:
            self._renew(key, [lease], now)
            self._control.send(key, Follow(lease))

    def ask(self, key: PeerKey, now: float) -> None:
        """Send this peer what it was not asked yet, or fail it."""
        peer = self._meet(key, now)
        if peer.lost is not None:
            self._asks.peer_lost(key, peer.lost)
        elif peer.welcome is not None:
            self._send_asks(peer)

    def meet(self, key: PeerKey, seal: str, now: float) -> bool:
        """Get ready to read from a peer that may be asked; return whether that is so."""
        if asking_refusal(key, seal, self._config.cluster_secret):
            return False
        return self._meet(key, now).joined

    def say(self, key: PeerKey, message: Message, now: float) -> None:
        """Send a fetch's message, unless its answer is near."""
        words = self._peers[key].words if key in self._peers else None
        if isinstance(message, End) and message.token and words and words.held(message.lease):
            self._fetches.confirmed(key, message.token, held=True, now=now)
            message = End(message.lease, 0)
        self._control.send(key, message)

    def take_leave(self) -> None:
        for key in self._peers:
            for lease in self._fetches.leases(key):
                self._control.send(key, End(lease, 0))

    # What the control thread tells.

    def on_message(self, key: PeerKey, message: Message, now: float) -> None:
        peer = self._peers.get(key)
        if peer is None or peer.lost is not None:
            return
        match message:
            case Renewed(sent_at, kept, lost):
                self._fetches.renewed(key, kept, lost, sent_at, now)
            case Ended(token, held):
                self._fetches.confirmed(key, token, held=held, now=now)
            case Leased():
                if (unwanted := self._asks.answered(key, message)) is not None:
                    self._control.send(key, End(unwanted, 0))
            case ChunkProgress(lease, ready, completion, checksums):
                if peer.heads and checksums:
                    ours = {
                        block: in_our_order(checksums[block], peer.heads) for block in checksums
                    }
                    self._fetches.vouched(key, lease, ours, now)
                self._fetches.grown(key, lease, ready, completion, now)
            case Refused(reason):
                self._lose(peer, Incompatible(f"{peer.where} refused: {reason}"), now)
            case HandshakeReply() if peer.welcome is None:
                self._be_welcomed(peer, message, now)
            case HandshakeReply() if not peer.sources and _pools(message) == _pools(peer.welcome):
                peer.welcome = message
                self._go_on(peer, now)

    def on_disconnect(self, key: PeerKey, how: str, now: float) -> None:
        if (peer := self._peers.get(key)) is not None:
            self._lose(peer, PeerLost(f"the connection to {peer.where} {how}"), now)
        if self._fetches.reading(key):
            self._control.probe(key)

    def on_process_gone(self, key: PeerKey, now: float) -> None:
        peer = self._peers.get(key)
        if peer is None or peer.vanished:
            return
        peer.vanished = True
        self._backends.peer_gone(key)
        self._lose(peer, PeerLost(f"the process at {peer.where} is gone"), now)
        peer.due = NEVER

    def tick(self, now: float) -> float:
        """Send what is due, and lose silent peers; return when to come again."""
        for peer in list(self._peers.values()):
            if now < peer.due:
                continue
            if peer.lost is not None:
                self._dial(peer, now)
            elif peer.welcome is not None:
                peer.due = now + self._config.heartbeat_s
                self._renew(peer.key, self._fetches.leases(peer.key), now)
                # News may have been lost.
                for lease in self._fetches.leases(peer.key, growing=True):
                    self._control.send(peer.key, Follow(lease))
                if not peer.sources:
                    self._go_on(peer, now, again=True)
            else:
                waited = f"within {self._config.lease_s:g} s"
                self._lose(peer, PeerLost(f"no answer from {peer.where} {waited}"), now)
        self._asks.tick(now)
        due = min((peer.due for peer in self._peers.values()), default=NEVER)
        return min(due, self._asks.next_deadline())

    # What the backends tell.

    def on_opened(self, now: float) -> None:
        for peer in list(self._peers.values()):
            if peer.lost is None and peer.welcome is not None and not peer.sources:
                self._go_on(peer, now)

    def on_joined(self, key: PeerKey, error: KvrelayError | None, now: float) -> None:
        peer = self._peers.get(key)
        if peer is None or peer.lost is not None or peer.welcome is None:
            return
        if error is not None:
            peer.failed[peer.kind], peer.sources = error, []
            self._go_on(peer, now)
            return
        ours, theirs = self._hello.fingerprint.protocols, peer.welcome.fingerprint.protocols
        log.info("KV of %s comes by %s, protocol %d", peer.where, peer.kind, ours.common(theirs))
        peer.joined = True
        self._ready(peer, now)

    def on_way_lost(self, key: PeerKey) -> None:
        """Start no READ on this lost way; the peer may still be there."""
        if key in self._peers:
            self._peers[key].joined = False
            self._fetches.peer_not_ready(key)

    def on_read_over(self, key: PeerKey) -> None:
        """When no READ is left, forget a lost peer or renew a lost way."""
        peer = self._peers.get(key)
        if peer is None or self._fetches.reading(key):
            return
        if peer.lost is not None:
            del self._peers[key]
            self._backends.drop_peer(key)
        elif peer.welcome is not None and not peer.joined and peer.sources:
            self._backends.drop_peer(key)
            self._backends.add_peer(key, peer.kind, peer.sources)

    # Meeting.

    def _meet(self, key: PeerKey, now: float) -> _Peer:
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = _Peer(key)
            self._dial(peer, now)
        elif peer.lost is not None and not peer.vanished:
            self._dial(peer, now)
        return peer

    def _dial(self, peer: _Peer, now: float) -> None:
        # A silent peer has let its lease run out, too.
        peer.lost, peer.welcome, peer.due = None, None, now + self._config.lease_s
        self._control.dial(peer.key, self._hello)

    def _be_welcomed(self, peer: _Peer, welcome: HandshakeReply, now: float) -> None:
        key = peer.key
        if welcome.generation != key.generation:
            was, now_is = key.generation, welcome.generation
            why = f"{peer.where} has restarted: the KV is of {was}, it is {now_is} now"
            self._lose(peer, PeerLost(why), now)
            self.on_process_gone(key, now)
            return
        try:
            difference = self._hello.fingerprint.difference(welcome.fingerprint)
            if difference is not None:
                raise Incompatible(f"{difference}; both nodes need the same model and KV settings")
            heads = self._backends.order_of_heads(welcome)
            if welcome.keeps_checksums and not self._backends.can_sum:
                raise Incompatible(
                    "its KV is checked when it is read; set kv_checksums above 0 here"
                )
        except Incompatible as error:
            self._lose(peer, Incompatible(f"{peer.where}: {error.message}"), now)
            return
        peer.welcome, peer.due = welcome, now + self._config.heartbeat_s
        if welcome.lease_words is not None and peer.words is None:
            with suppress(TransferError):  # another host or user: we ask
                peer.words = HeldWords(welcome.lease_words, key.generation, welcome.engine_id)
        self._send_asks(peer)
        leases = self._fetches.leases(key)
        self._renew(key, leases, now)
        for lease in leases:  # also complete KV, which may have had another reader
            self._control.send(key, Follow(lease))
        if not peer.sources:
            peer.failed, peer.kind = {}, ""
            peer.heads = heads if welcome.checksums and self._backends.can_sum else []
            self._go_on(peer, now)
        elif peer.joined:  # a READ is still on this old way
            self._ready(peer, now)
        else:
            self.on_read_over(key)

    def _go_on(self, peer: _Peer, now: float, *, again: bool = False) -> None:
        """Open the best backend left at both ends, then join the peer.

        The peer tells when it has opened it; `again`: ask it anew.
        """
        welcome, backends = peer.welcome, self._backends
        assert welcome is not None
        kinds = backends.shared(welcome)
        if peer.kind and peer.kind not in kinds and peer.kind not in peer.failed:
            why = f"{peer.where} could not open its KV connector {peer.kind}; its log says why"
            peer.failed[peer.kind] = TransferError(backends.missing.get(peer.kind, why))
        kinds = [kind for kind in kinds if kind not in peer.failed]
        if not kinds:
            theirs = ", ".join([*welcome.ranks[0].planes, *welcome.on_request]) or "none"
            both = f"{', '.join(backends)} here and {theirs} there"
            none = Incompatible(f"{peer.where}: there is no common KV connector, {both}")
            self._lose(peer, peer.failed.get(peer.kind, none), now)
            return
        if peer.kind in peer.failed:
            why = peer.failed[peer.kind].message
            log.info("no KV by %s from %s: %s", peer.kind, peer.where, why)
        again = again or peer.kind != kinds[0]
        peer.kind = kind = kinds[0]
        opening = backends.open(kind)
        if kind in welcome.on_request:
            if again:
                self._control.send(peer.key, replace(self._hello, opens=[kind]))
        elif not opening:
            peer.sources = backends.sources(welcome, kind)
            backends.add_peer(peer.key, kind, peer.sources)

    def _send_asks(self, peer: _Peer) -> None:
        assert peer.welcome is not None
        theirs = peer.welcome.fingerprint.protocols
        if LEASES_CACHED not in theirs:
            older = Incompatible(f"{peer.where} leases no cached KV: it speaks protocol {theirs}")
            self._asks.peer_lost(peer.key, older)
        for ask in self._asks.to_send(peer.key):
            self._control.send(peer.key, ask)

    def _renew(self, key: PeerKey, leases: list[LeaseId], now: float) -> None:
        for first in range(0, len(leases), RENEW_BATCH):
            self._control.send(key, Renew(now, leases[first : first + RENEW_BATCH]))

    def _ready(self, peer: _Peer, now: float) -> None:
        keeps = peer.welcome is not None and peer.welcome.keeps_checksums
        vouches = bool(peer.heads)
        self._fetches.peer_ready(peer.key, now, vouches=vouches, keeps_checksums=keeps)

    def _lose(self, peer: _Peer, error: KvrelayError, now: float) -> None:
        if peer.lost is None:
            peer.lost, peer.due = error, now + self._config.heartbeat_s
            self._fetches.peer_lost(peer.key, error)
            self._asks.peer_lost(peer.key, error)
            self._control.hang_up(peer.key)
            self.on_read_over(peer.key)


def _pools(welcome: HandshakeReply | None) -> list[tuple[Heads, PoolRegion]]:
    return [(card.heads, card.region) for card in welcome.ranks] if welcome is not None else []
