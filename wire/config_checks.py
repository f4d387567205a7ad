"""What values of a configuration must be, where several of its types ask for the same."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from wire.errors import ConfigError
from wire.log_lines import LOG_FORMATS

__all__ = [
    "MAX_URL_CHARS",
    "check_log_format",
    "gib",
    "is_address",
    "is_base_url",
    "is_loopback",
    "positive",
    "require",
]

MAX_URL_CHARS = 512


def require(ok: bool, message: str) -> None:
    """Raises ConfigError with this message unless ok."""
    if not ok:
        raise ConfigError(message)


def positive(owner: object, *names: str) -> None:
    """Raises ConfigError for a field that is zero or less."""
    for name in names:
        value = getattr(owner, name)
        require(value > 0, f"{name} must be positive, got {value}")


def check_log_format(log_format: str) -> None:
    """Raises ConfigError for one that there is not."""
    require(log_format in LOG_FORMATS, f"log_format {log_format!r} is not one of {', '.join(LOG_FORMATS)}")


def gib(size: int) -> str:
    """Write a number of bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def is_address(text: str) -> bool:
    """Whether it is host:port."""
    found = re.fullmatch(r"[^\s:]+:(\d+)", text)
    return found is not None and 0 < int(found[1]) < 65536


def is_loopback(host: str) -> bool:
    """Whether an address leads to its own machine, whatever a name server says: localhost, 127.0.0.0/8 or ::1."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_base_url(url: str) -> bool:
    """Whether a node may be asked there: http or https and a host, without query, user or password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is no number
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment) and parts.username is None and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain and len(url) <= MAX_URL_CHARS
