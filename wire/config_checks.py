"""Checks of settings, and of hosts that may be nodes.

Hosts are judged by text alone, without look-ups: one that is neither a plain name nor a usual
address is allowed by nothing.
"""

from __future__ import annotations

import ipaddress
import re
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvrelay.wire.errors import ConfigError, limit_of

__all__ = [
    "MAX_URL_CHARS",
    "Count",
    "LogFormat",
    "OrDefault",
    "Port",
    "Positive",
    "Priority",
    "Share",
    "Some",
    "SomeShare",
    "base_url",
    "check_fields",
    "gib",
    "is_address",
    "is_base_url",
    "is_loopback",
    "require",
    "udp_address",
]

MAX_URL_CHARS = 512

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
Some = Annotated[int, Meta(gt=0)]
SomeShare = Annotated[float, Meta(gt=0, le=1)]
_MAX_PRIORITY = 2**31 - 1
Priority = Annotated[int, Meta(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)]
OrDefault = Annotated[int, Meta(ge=0, description="0 takes the default")]
LogFormat = Literal["text", "json"]


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def check_fields(config: Any, of: str = "") -> None:
    """Raise ConfigError for a value that its field's Literal or Meta rules out."""
    for name, hint in _declared(type(config)):  # type: ignore[arg-type]
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            known = ", ".join(str(each) or "empty" for each in get_args(hint))
            require(value in get_args(hint), f"{name} {value!r}{of} is not one of {known}")
            continue
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as why:
            limits: Meta = hint.__metadata__[0]
            remedy = f"; {limits.description}" if limits.description else ""
            got = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(
                f"{name}{of} must {limit_of(str(why)) or why}, got {got}{remedy}"
            ) from why


@cache
def _declared(config: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(config, include_extras=True).items()
    return [(name, hint) for name, hint in hints if get_origin(hint) in (Literal, Annotated)]


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def is_address(text: str) -> bool:
    found = re.fullmatch(r"[^\s:]+:(\d+)", text)
    return found is not None and 0 < int(found[1]) < 65536


def udp_address(router: str) -> tuple[str, int]:
    """Read udp://host:port, an IPv6 address in brackets. Raises ConfigError."""
    found = re.fullmatch(r"udp://(?:\[([^\s\[\]]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})", router)
    if found is None or not 0 < int(found[3]) < 65536:
        raise ConfigError(f"router must be udp://HOST:PORT, got {router!r}")
    return found[1] or found[2], int(found[3])


def is_loopback(host: str) -> bool:
    """Return whether an address is its own machine's, without a look-up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_base_url(url: str) -> bool:
    """Return whether a node may be asked at this URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is no number
    except ValueError:
        return False
    plain = (
        not (parts.query or parts.fragment)
        and parts.username is None
        and url.isprintable()
        and " " not in url
    )
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and plain
        and len(url) <= MAX_URL_CHARS
    )


def base_url(typed: str) -> str:
    """Read a server's address as typed: host:port is http, /v1 is dropped. Raises ConfigError."""
    plain = typed.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    url = f"http://{plain}" if is_address(plain) else plain
    like = f"{plain}:8000" if re.fullmatch(r"[\w.-]+", plain) else "http://127.0.0.1:8000"
    require(is_base_url(url), f"{typed!r} is not a server's address; give one like {like}")
    return url
