"""Checks of settings, and of hosts that may be nodes.

Hosts are judged by text alone, without look-ups: one that is neither a plain name nor a usual
address is allowed by nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvrelay.wire.errors import ConfigError, limit_of

__all__ = [
    "MAX_URL_CHARS",
    "LogFormat",
    "OrDefault",
    "Port",
    "Positive",
    "base_url",
    "check_fields",
    "check_node_allow",
    "gib",
    "is_address",
    "is_base_url",
    "is_loopback",
    "is_node_allowed",
    "require",
    "udp_address",
]

MAX_URL_CHARS = 512

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
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
    require(is_base_url(url), f"{typed!r} is no address of a server; give one like {like}")
    return url


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_AT = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", re.ASCII | re.IGNORECASE)
_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII
)


def check_node_allow(entries: Iterable[str]) -> None:
    """Raise ConfigError for an entry that is no host name, address or network."""
    for entry in entries:
        require(
            _host(entry) is not None or _network(entry) is not None,
            f"node_allow {entry!r} must be a host name, an address or a network such as "
            f"10.1.0.0/16, without scheme, "
            "port or wildcard",
        )


def is_node_allowed(url: str, entries: Sequence[str], nodes: Iterable[str]) -> bool:
    """Return whether the host of `url` is in the entries, or one of `nodes`.

    Names compare without case and final dot, addresses by value; a name is in no network.
    """
    host = _host_of(url)
    if host is None:
        return False
    if any(_host_of(node) == host for node in nodes):
        return True
    networks = (
        []
        if isinstance(host, str)
        else [found for entry in entries if (found := _network(entry)) is not None]
    )
    return any(_host(entry) == host for entry in entries) or any(
        host in network for network in networks
    )


def _host_of(url: str) -> str | _Address | None:
    found = _AT.fullmatch(urlsplit(url).netloc) if is_base_url(url) else None
    return None if found is None else _host(found[1])


def _host(text: str) -> str | _Address | None:
    if "%" in text:  # of an IPv6 zone, or of what another reader would decode
        return None
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        name = text.lower().removesuffix(".")
        # A last label of digits is an address to a resolver: 127.1, 2130706433, 0x7f.1.
        return (
            None
            if not _NAME.fullmatch(name) or re.fullmatch(r"(.*\.)?(\d+|0x[0-9a-f]*)", name)
            else name
        )
    return getattr(address, "ipv4_mapped", None) or address


def _network(text: str) -> _Network | None:
    try:
        return ipaddress.ip_network(text) if "/" in text and "%" not in text else None
    except ValueError:
        return None
