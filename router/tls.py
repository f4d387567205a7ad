"""TLS of the router: its own certificate towards clients, and whom it trusts as nodes."""

from __future__ import annotations

import ssl

from wire.errors import ConfigError
from wire.router_config import RouterConfig

__all__ = ["check_certificate", "trusted"]


def check_certificate(config: RouterConfig) -> None:
    """Raise ConfigError, before anything listens, if the certificate cannot be served with its key."""
    if not config.tls_cert:
        return
    try:
        # Never asks at a terminal for a password.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.tls_cert, config.tls_key or None, password=lambda: ""
        )
    except (OSError, ValueError) as why:
        raise ConfigError(
            f"tls_cert {config.tls_cert!r} with tls_key {config.tls_key!r} cannot be served: {_words(why)}; both must "
            "be PEM files that belong together, the key without a password"
        ) from why


def trusted(config: RouterConfig) -> ssl.SSLContext | bool:
    """For connections to https:// nodes: those whom tls_ca names, or the system's. Raises ConfigError."""
    if not config.tls_ca:
        return True
    try:
        return ssl.create_default_context(cafile=config.tls_ca)
    except (OSError, ValueError) as why:
        raise ConfigError(
            f"tls_ca {config.tls_ca!r} cannot be read: {_words(why)}; it must be a PEM file of certificates"
        ) from why


def _words(why: Exception) -> str:
    return " ".join(str(why).split()) or type(why).__name__
