"""Decides by text alone if the host of a node's address is allowed: nothing is resolved, nothing is
asked. Pure.

What clients read in an address is never wider than what is read here: a host that is neither a
plain name nor an address in its usual form is allowed by nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from kvrelay.wire.config_checks import is_base_url, require

__all__ = ["check_node_allow", "is_node_allowed"]

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
    """Tell whether the host of `url` is in the entries, or is the host of one of the URLs of
    `nodes`.

    A name equals a name, whatever its case and with or without the dot at its end; an address is in
    a network, or equals an address, however it is written. A name is never looked up, so it is in
    no network.
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
