"""Who may operate the router: the admin routes and the console's data always want the admin key. Owns no route.

Where a request comes from says nothing: a proxy on this machine sends strangers' requests from loopback, and Host and
Origin are what the sender writes. The key alone decides. A page of another site does not know it and no browser adds
it: it is neither a cookie nor a password that HTTP asks for, but a header, which a page may send to another origin only
with that origin's leave (CORS), and this router gives none but to --allowed-origins. A page whose name was led to this
machine (DNS rebinding) has an origin of its own, and so not what the console has stored in the browser. A router that
has no key is closed.
"""

from __future__ import annotations

import hmac

from fastapi import Request

from wire.errors import Unauthorized

__all__ = ["OPERATED", "PEER_HEADER", "check_operator", "peer_of"]

OPERATED = (
    *("/admin", "/console/state"),
    *("/reset_prefix_cache", "/start_profile", "/stop_profile", "/server_info", "/load"),
)
"""Beginnings of the paths that want the admin key."""
PEER_HEADER = "x-kvrelay-peer"
"""From which address a request came that a worker hands on to its parent."""


def check_operator(key: str, given: str) -> None:
    """Raise Unauthorized unless the given key is the admin key; always, if there is none."""
    if not key:
        raise Unauthorized(
            "this router has no admin key, so its admin routes and its console are closed; start it with "
            "KVRELAY_ADMIN_KEY, or see in its log why it could not write a key of its own"
        )
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise Unauthorized(
            "the admin key is missing or wrong; send it as `Authorization: Bearer <key>` (a router that was given none "
            "draws one and logs the name of its file; `kvrelay top`, `drain` and `role` find it by themselves)"
        )


def peer_of(request: Request) -> str:
    """The address that the request came from."""
    # Only on a Unix socket nobody is known who asks: then a worker of this router does, and says for whom.
    return request.client.host if request.client is not None else request.headers.get(PEER_HEADER, "unknown")
