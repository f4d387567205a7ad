"""Who may operate the router: the admin routes and the console. Owns no route.

Without a key that is who is on this machine, and what a browser there has from this router itself. A page of another
site could ask for anything, but cannot help saying where it is from; and if a name server leads its own name to this
machine, the request has that name.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from fastapi import Request

from openai_api.routes import given_key
from wire.config_checks import is_loopback
from wire.errors import Unauthorized

__all__ = ["check_operator", "peer_of"]

_THROUGH_OTHERS = ("forwarded", "x-forwarded-for", "via", "x-real-ip")
_OWN_PAGES = ("same-origin", "none")


def check_operator(key: str, request: Request) -> None:
    """Raise Unauthorized unless the caller is an operator; `key` is the admin key, if there is one."""
    if key:
        if not hmac.compare_digest(given_key(request.headers.get).encode(), key.encode()):
            raise Unauthorized("the admin key is missing or wrong; send it as `Authorization: Bearer <key>`")
    elif not is_loopback(peer_of(request)) or not _is_direct(request):
        raise Unauthorized(
            "without --admin-key the admin routes and the console answer this machine only, by its name localhost or "
            "its loopback address, and neither proxies nor pages of other sites; start the router with a key "
            "(KVRELAY_ADMIN_KEY) to open them to whoever has it"
        )


def peer_of(request: Request) -> str:
    """The address that the request came from."""
    return request.client.host if request.client is not None else "unknown"


def _is_direct(request: Request) -> bool:
    """Whether nobody has led the request here but its sender, or a page of this router."""
    headers = request.headers
    host = headers.get("host", "")
    try:
        named = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return (
        is_loopback(named)
        and headers.get("origin", f"{request.url.scheme}://{host}") == f"{request.url.scheme}://{host}"
        and headers.get("sec-fetch-site", "none") in _OWN_PAGES
        and not any(name in headers for name in _THROUGH_OTHERS)
    )
