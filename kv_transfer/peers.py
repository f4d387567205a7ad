"""The peers that a node reads from: handshake, choice of a backend, renewals, and their loss.

Three things end apart. The *connection* to a peer: its fetches fail, and the next one dials again.
The backend's *way* to it: it is joined anew, when no READ is on the old way. And the *process*: it
is gone only if somebody else answers for it, or its host says that nobody listens there any more. A
peer whose READ hangs is dialled with every heartbeat: it may need our word to go on sending.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

import msgspec

from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.backends import Backends
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
    Message,
    Refused,
    Renew,
    Renewed,
)
from kvrelay.kv_transfer.shares import Heads
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import Incompatible, KvrelayError, PeerLost, TransferError

__all__ = ["Peers"]

log = logging.getLogger(__name__)

# 1,000 leases of the longest request id make a message of half the size limit.
RENEW_BATCH = 1000


@dataclass(slots=True)
class _Peer:
    due: float = 0.0
    """When its answer is late, a heartbeat is due, or it is dialled again."""
    welcomed: bool = False
    lost: KvrelayError | None = None
    vanished: bool = False  # the process is gone for certain
    words: HeldWords | None = None
    """The leases of a peer on this host."""
    welcome: HandshakeReply | None = None
    """The last one."""
    kind: str = ""
    """The backend that we try, or read through."""
    sources: list[tuple[int, Source]] = field(default_factory=list)
    """Which rank of ours reads what through it; none until it is open at both ends."""
    heads: list[int] = field(default_factory=list)
    """Where our KV heads' checksums lie among its own; empty if either has none."""
    joined: bool = False
    """The backend can read, as far as is known."""
    choices: list[str] = field(default_factory=list)
    """Backends that were not tried yet, the best first."""


class Peers:
    """A table of the peers that a node reads from."""

    def __init__(
        self,
        hello: HandshakeRequest,
        config: TransferConfig,
        fetches: FetchTable,
        control: ControlThread,
        backends: Backends,
    ) -> None:
        self._hello = hello
        self._config = config
        self._fetches = fetches
        self._control = control
        self._backends = backends
        self._peers: dict[PeerKey, _Peer] = {}

    # What the step loop wants.

    def want(self, request_id: str, peer: PeerKey, lease: LeaseId, now: float) -> None:
        """Care for a lease that a request watches at this peer, or doom its fetch."""
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer()
            self._dial(peer, known, now)
        elif known.lost is not None and known.vanished:
            self._fetches.doom(request_id, known.lost)
        elif known.lost is not None:
            self._dial(peer, known, now)
        elif known.welcomed:
            self._renew(peer, [lease], now)
            self._control.send(peer, Follow(lease))

    def say(self, peer: PeerKey, message: Message, now: float) -> None:
        """Send a fetch's message, unless the answer is in sight already."""
        words = self._peers[peer].words if peer in self._peers else None
        if isinstance(message, End) and message.token and words and words.held(message.lease):
            self._fetches.confirmed(peer, message.token, held=True, now=now)
            message = End(message.lease, 0)
        self._control.send(peer, message)

    def take_leave(self) -> None:
        for peer in self._peers:
            for lease in self._fetches.leases(peer):
                self._control.send(peer, End(lease, 0))

    # What the control thread tells.

    def on_message(self, peer: PeerKey, message: Message, now: float) -> None:
        known = self._peers.get(peer)
        if known is None or known.lost is not None:
            return
        if isinstance(message, Renewed):
            self._fetches.renewed(peer, message.kept, message.lost, message.sent_at, now)
        elif isinstance(message, Ended):
            self._fetches.confirmed(peer, message.token, held=message.held, now=now)
        elif isinstance(message, ChunkProgress):
            if known.heads and message.checksums:
                told = message.checksums.items()
                ours = {block: in_our_order(sums, known.heads) for block, sums in told}
                self._fetches.vouched(peer, message.lease, ours, now)
            self._fetches.grown(peer, message.lease, message.ready, message.completion, now)
        elif isinstance(message, Refused):
            why = f"{peer.host}:{peer.port} refused: {message.reason}"
            self._lose(peer, Incompatible(why), now)
        elif isinstance(message, HandshakeReply) and not known.welcomed:
            self._be_welcomed(peer, known, message, now)
        elif (
            isinstance(message, HandshakeReply)
            and known.kind
            and not known.sources
            and _pools(message) == _pools(known.welcome)
        ):
            known.welcome = message  # with the backend that we have asked for
            self._join(peer, known, now)

    def on_disconnect(self, peer: PeerKey, how: str, now: float) -> None:
        self._lose(peer, PeerLost(f"the connection to {peer.host}:{peer.port} {how}"), now)
        if self._fetches.reading(peer):
            self._control.probe(peer)

    def on_process_gone(self, peer: PeerKey, now: float) -> None:
        known = self._peers.get(peer)
        if known is None or known.vanished:
            return
        known.vanished = True
        if known.sources:
            self._backends.peer_gone(peer)
        self._lose(peer, PeerLost(f"the process at {peer.host}:{peer.port} is gone"), now)
        known.due = NEVER

    def tick(self, now: float) -> float:
        """Send what is due, and lose silent peers. Returns when something is due again."""
        for peer, known in list(self._peers.items()):
            if now < known.due:
                continue
            if known.lost is not None:
                self._dial(peer, known, now)
            elif known.welcomed:
                known.due = now + self._config.heartbeat_s
                self._renew_all(peer, now)
            else:
                where, waited_s = f"{peer.host}:{peer.port}", self._config.lease_s
                self._lose(peer, PeerLost(f"no answer from {where} within {waited_s:g} s"), now)
        return min((known.due for known in self._peers.values()), default=NEVER)

    # What the backends tell.

    def on_opened(self, kind: str, now: float) -> None:
        for peer, known in list(self._peers.items()):
            if known.lost is None and known.kind == kind and not known.sources:
                self._join(peer, known, now)

    def on_joined(self, peer: PeerKey, error: KvrelayError | None, now: float) -> None:
        known = self._peers.get(peer)
        if known is None or known.lost is not None:
            return
        if error is not None:
            self._try_next(peer, known, error, now)
            return
        assert known.welcome is not None
        ours, theirs = self._hello.fingerprint.protocols, known.welcome.fingerprint.protocols
        says = "KV of %s:%d comes by %s, protocol %d"
        log.info(says, peer.host, peer.port, known.kind, ours.common(theirs))
        known.joined = True
        self._fetches.peer_ready(peer, now, vouches=bool(known.heads))

    def on_way_lost(self, peer: PeerKey) -> None:
        """Start no READ on this way: the backend has lost it. The peer may still be there."""
        if peer in self._peers:
            self._peers[peer].joined = False
            self._fetches.peer_not_ready(peer)

    def on_read_over(self, peer: PeerKey) -> None:
        """Forget a lost peer, or look for a lost way anew, when no READ is left."""
        known = self._peers.get(peer)
        if known is None or self._fetches.reading(peer):
            return
        if known.lost is not None:
            del self._peers[peer]
            self._backends.drop_peer(peer)
        elif known.welcomed and not known.joined and known.sources:
            self._backends.drop_peer(peer)
            self._backends.add_peer(peer, known.kind, known.sources)

    # Meeting.

    def _dial(self, peer: PeerKey, known: _Peer, now: float) -> None:
        # Whoever does not answer for a lease has let it run out, too.
        known.lost, known.welcomed, known.due = None, False, now + self._config.lease_s
        self._control.dial(peer, self._hello)

    def _be_welcomed(
        self, peer: PeerKey, known: _Peer, welcome: HandshakeReply, now: float
    ) -> None:
        where = f"{peer.host}:{peer.port}"
        if welcome.generation != peer.generation:
            was, now_is = peer.generation, welcome.generation
            why = f"{where} has restarted: the KV is of {was}, it is {now_is} now"
            self._lose(peer, PeerLost(why), now)
            self.on_process_gone(peer, now)
            return
        difference = self._hello.fingerprint.difference(welcome.fingerprint)
        if difference is not None:
            differs = f"{where}: {difference}; both nodes need the same model and KV settings"
            self._lose(peer, Incompatible(differs), now)
            return
        known.welcomed, known.due = True, now + self._config.heartbeat_s
        known.welcome = welcome
        if welcome.lease_words is not None and known.words is None:
            with contextlib.suppress(TransferError):  # another host, or another user: we ask
                known.words = HeldWords(welcome.lease_words, peer.generation, welcome.engine_id)
        leases = self._fetches.leases(peer)
        self._renew(peer, leases, now)
        for lease in leases:  # also of complete KV: it may have had another reader
            self._control.send(peer, Follow(lease))
        if not known.sources:
            self._choose(peer, known, welcome, now)
        elif known.joined:  # we were here before, and a READ is still on this way
            self._fetches.peer_ready(peer, now, vouches=bool(known.heads))
        else:
            self.on_read_over(peer)

    def _choose(self, peer: PeerKey, known: _Peer, welcome: HandshakeReply, now: float) -> None:
        try:
            known.choices = self._backends.shared(welcome)
        except Incompatible as error:
            self._lose(peer, Incompatible(f"{peer.host}:{peer.port}: {error.message}"), now)
            return
        if welcome.checksums and self._backends.can_sum:
            known.heads = self._backends.order_of_heads(welcome)
        theirs = ", ".join([*welcome.ranks[0].planes, *welcome.on_request]) or "none"
        both = f"{', '.join(self._backends)} here and {theirs} there"
        none = Incompatible(f"{peer.host}:{peer.port}: there is no common KV connector, {both}")
        self._try_next(peer, known, none, now)

    def _try_next(self, peer: PeerKey, known: _Peer, error: KvrelayError, now: float) -> None:
        if not known.choices:
            self._lose(peer, error, now)
            return
        if known.kind:
            log.info("no KV by %s from %s:%d: %s", known.kind, peer.host, peer.port, error.message)
        known.kind, known.sources = known.choices.pop(0), []
        self._backends.open(known.kind)
        self._ask_to_open(peer, known)
        self._join(peer, known, now)

    def _ask_to_open(self, peer: PeerKey, known: _Peer) -> None:
        if known.kind and known.welcome is not None and known.kind in known.welcome.on_request:
            self._control.send(peer, msgspec.structs.replace(self._hello, opens=[known.kind]))

    def _join(self, peer: PeerKey, known: _Peer, now: float) -> None:
        kind, welcome = known.kind, known.welcome
        assert welcome is not None
        if kind in self._backends.missing:
            self._try_next(peer, known, TransferError(self._backends.missing[kind]), now)
        elif kind in welcome.on_request or not self._backends.is_open(kind):
            return
        elif any(kind not in card.planes for card in welcome.ranks):
            where = f"{peer.host}:{peer.port}"
            why = f"{where} could not open its KV connector {kind}; its log says why"
            self._try_next(peer, known, TransferError(why), now)
        else:
            known.sources = self._backends.sources(welcome, kind)
            self._backends.add_peer(peer, kind, known.sources)

    # Caring for leases.

    def _renew_all(self, peer: PeerKey, now: float) -> None:
        self._renew(peer, self._fetches.leases(peer), now)
        for lease in self._fetches.growing(peer):
            self._control.send(peer, Follow(lease))  # what was told meanwhile may have been lost
        known = self._peers[peer]
        if not known.sources:
            self._ask_to_open(peer, known)

    def _renew(self, peer: PeerKey, leases: list[LeaseId], now: float) -> None:
        for first in range(0, len(leases), RENEW_BATCH):
            self._control.send(peer, Renew(now, leases[first : first + RENEW_BATCH]))

    # Losing.

    def _lose(self, peer: PeerKey, error: KvrelayError, now: float) -> None:
        known = self._peers.get(peer)
        if known is None or known.lost is not None:
            return
        known.lost, known.due = error, now + self._config.heartbeat_s
        self._fetches.peer_lost(peer, error)
        self._control.hang_up(peer)
        self.on_read_over(peer)


def _pools(welcome: HandshakeReply | None) -> list[tuple[Heads, PoolRegion]]:
    return [(card.heads, card.region) for card in welcome.ranks] if welcome is not None else []
