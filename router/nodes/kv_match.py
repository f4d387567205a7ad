"""Compares the KV of two nodes: can the decode node take the prefill node's? Pure.

A node that reports nothing of its KV (another project's) fits all: its own handshake will show.
"""

from __future__ import annotations

import functools
from ipaddress import ip_address

from kvrelay.wire.transfer import KvFacts

__all__ = ["kv_mismatch"]

_SAME_HOST_PLANE = "direct"


@functools.lru_cache(4096)
def kv_mismatch(prefill: KvFacts | None, decode: KvFacts | None) -> str | None:
    """Return why the decode node cannot take the prefill node's KV, naming both values, if so."""
    if prefill is None or decode is None:
        return None
    difference = prefill.fingerprint.difference(decode.fingerprint)
    if difference is not None:
        return difference.replace(" here and ", " on the prefill node and ").replace(
            " there", " on the decode node"
        )
    shared = [plane for plane in prefill.planes if plane in decode.planes]
    if not shared:
        mine, theirs = (", ".join(facts.planes) or "none" for facts in (prefill, decode))
        return f"data planes are {mine} on the prefill node and {theirs} on the decode node"
    if not prefill.host or not decode.host or prefill.host == decode.host:
        return None
    where = f"the prefill node is on host {prefill.host} and the decode node on {decode.host}"
    if shared == [_SAME_HOST_PLANE]:
        return (
            f"their only common data plane is {_SAME_HOST_PLANE}, which needs one host, and {where}"
        )
    if _is_loopback(prefill.address):
        return f"the prefill node's control channel is at {prefill.address}, and {where}"
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
