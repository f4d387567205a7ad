"""Signed tickets: a reader follows the ticket of a node that has the cluster's secret.

Pure: `now` is a Unix second. The signature is HMAC-SHA256 under a key made of the secret. Without a
secret nothing is signed, and nothing leads to another machine.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from kvrelay.kv_transfer.connector import PeerKey
from kvrelay.kv_transfer.messages import LeaseCached
from kvrelay.wire.config_checks import is_loopback
from kvrelay.wire.transfer import Ticket

__all__ = [
    "LIFE_S",
    "MAX_ID_CHARS",
    "ask_refusal",
    "asking_refusal",
    "refusal",
    "sealed_address",
    "signed",
    "signed_ask",
]

MAX_ID_CHARS = 256

# A request's longest life (600 s by default), and five minutes for clocks that differ. Its lease
# fences what is read.
LIFE_S = 900

_REMEDY = "set the same KVRELAY_CLUSTER_SECRET on all nodes"


def signed(ticket: Ticket, secret: str, now: float) -> Ticket:
    """Return the ticket signed for LIFE_S; unchanged without a secret."""
    if not secret:
        return ticket
    ticket = msgspec.structs.replace(ticket, expires_at=int(now) + LIFE_S)
    return msgspec.structs.replace(ticket, signature=_signature(ticket, secret))


def refusal(ticket: Ticket, secret: str, now: float) -> str | None:
    """Return why a reader must not follow this ticket, in one sentence, or None."""
    if not (secret or ticket.signature or is_loopback(ticket.remote_host)):
        return (
            f"without cluster_secret a ticket may lead to a loopback address only, not to "
            f"{ticket.remote_host!r}; " + _REMEDY
        )
    return _seal_refusal("ticket", ticket, secret, now)


def signed_ask(ask: LeaseCached, secret: str, now: float) -> LeaseCached:
    if not secret:
        return ask
    ask = msgspec.structs.replace(ask, expires_at=int(now) + LIFE_S)
    return msgspec.structs.replace(ask, signature=_signature(ask, secret))


def sealed_address(peer: PeerKey, secret: str) -> str:
    """Return the seal by which readers know the address of a node of their cluster."""
    return _hmac(b"kvrelay-source", list(peer), secret) if secret else ""


def asking_refusal(peer: PeerKey, seal: str, secret: str) -> str | None:
    """Return why this peer must not be asked, or None."""
    if not secret:
        if is_loopback(peer.host):
            return None
        where = f"only loopback addresses are asked for KV, not {peer.host!r}"
        return f"without cluster_secret {where}; {_REMEDY}"
    if hmac.compare_digest(seal.encode(), sealed_address(peer, secret).encode()):
        return None
    return f"no node with this cluster_secret has given the address {peer.host!r}; {_REMEDY}"


def ask_refusal(ask: LeaseCached, generation: str, secret: str, now: float) -> str | None:
    """Return why a source of this generation must not answer the ask, or None."""
    if ask.generation != generation:
        return f"the ask is for {ask.generation}, and this process is {generation}"
    return _seal_refusal("ask", ask, secret, now)


def _seal_refusal(what: str, sealed: Ticket | LeaseCached, secret: str, now: float) -> str | None:
    if not secret:
        if sealed.signature is None:
            return None
        return f"the {what} is signed and this node has no cluster_secret to check it; {_REMEDY}"
    if sealed.signature is None or sealed.expires_at is None:
        return f"the {what} is not signed, and this node has a cluster_secret; {_REMEDY}"
    if not hmac.compare_digest(sealed.signature.encode(), _signature(sealed, secret).encode()):
        return f"the {what} was altered, or signed with another cluster_secret; {_REMEDY}"
    if now > sealed.expires_at:
        return (
            f"the {what} expired {now - sealed.expires_at:.0f} s ago by this node's clock; it is "
            f"good for {LIFE_S} s, so compare the clocks of the nodes"
        )
    return None


def _signature(sealed: Ticket | LeaseCached, secret: str) -> str:
    # An ordered JSON list: no two tickets have the same bytes.
    claim: list[object]
    if isinstance(sealed, LeaseCached):
        person = b"kvrelay-ask"
        claim = [sealed.token, sealed.generation, sealed.first, sealed.hashes, sealed.expires_at]
    else:
        person = b"kvrelay-ticket"
        claim = [
            sealed.remote_engine_id,
            sealed.generation,
            sealed.remote_request_id,
            sealed.lease_epoch,
            sealed.remote_host,
            sealed.remote_port,
            sealed.tp_size,
            sealed.growing,
            sealed.remote_block_ids,
            sealed.num_tokens,
            sealed.adapter,
            sealed.adapter_digest,
            sealed.expires_at,
        ]
    return _hmac(person, claim, secret)


def _hmac(person: bytes, claim: list[object], secret: str) -> str:
    key = hashlib.blake2b(secret.encode(), digest_size=32, person=person).digest()
    return hmac.new(key, msgspec.json.encode(claim), hashlib.sha256).hexdigest()
