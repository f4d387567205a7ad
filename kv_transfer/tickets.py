"""Signed tickets: a reader follows the ticket of a node that has the cluster's secret.

Pure: `now` is a Unix second. The signature is HMAC-SHA256 under a key made of the secret. Without a
secret nothing is signed, and nothing leads to another machine.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec
from msgspec.structs import replace

from kvrelay.kv_transfer.connector import PeerKey
from kvrelay.wire.config_checks import is_loopback
from kvrelay.wire.transfer import Ticket

__all__ = [
    "LIFE_S",
    "MAX_ID_CHARS",
    "asking_refusal",
    "refusal",
    "sealed_address",
    "signed",
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
    ticket = replace(ticket, expires_at=int(now) + LIFE_S)
    return replace(ticket, signature=_signature(ticket, secret))


def refusal(ticket: Ticket, secret: str, now: float) -> str | None:
    """Return why a reader must not follow this ticket, in one sentence, or None."""
    if not (secret or ticket.signature or is_loopback(ticket.remote_host)):
        return (
            f"without cluster_secret a ticket may lead to a loopback address only, not to "
            f"{ticket.remote_host!r}; " + _REMEDY
        )
    if not secret:
        if ticket.signature is None:
            return None
        return f"the ticket is signed and this node has no cluster_secret to check it; {_REMEDY}"
    if ticket.signature is None or ticket.expires_at is None:
        return f"the ticket is not signed, and this node has a cluster_secret; {_REMEDY}"
    if not hmac.compare_digest(ticket.signature.encode(), _signature(ticket, secret).encode()):
        return f"the ticket was altered, or signed with another cluster_secret; {_REMEDY}"
    if now > ticket.expires_at:
        return (
            f"the ticket expired {now - ticket.expires_at:.0f} s ago by this node's clock; it is "
            f"good for {LIFE_S} s, so compare the clocks of the nodes"
        )
    return None


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


def _signature(ticket: Ticket, secret: str) -> str:
    # An ordered JSON list: no two tickets have the same bytes.
    claim = [
        ticket.remote_engine_id,
        ticket.generation,
        ticket.remote_request_id,
        ticket.lease_epoch,
        ticket.remote_host,
        ticket.remote_port,
        ticket.tp_size,
        ticket.growing,
        ticket.remote_block_ids,
        ticket.num_tokens,
        ticket.adapter,
        ticket.adapter_digest,
        ticket.expires_at,
    ]
    return _hmac(b"kvrelay-ticket", claim, secret)


def _hmac(person: bytes, claim: list[object], secret: str) -> str:
    key = hashlib.blake2b(secret.encode(), digest_size=32, person=person).digest()
    return hmac.new(key, msgspec.json.encode(claim), hashlib.sha256).hexdigest()
