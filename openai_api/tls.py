"""TLS contexts of servers and their clients."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.wire.config import NodeConfig
    from kvrelay.wire.router_config import RouterConfig

__all__ = ["checked", "load_chain", "server_context"]


def server_context(config: RouterConfig | NodeConfig) -> ssl.SSLContext | None:
    """Return the context for https, None for http. Raises ConfigError."""
    if not config.ssl_certfile:
        return None

    def make() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_chain(context, config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_cert_reqs:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        return context

    authorities = ["ssl_ca_certs"] if config.ssl_cert_reqs else []
    return checked(make, config, ["ssl_certfile", "ssl_keyfile", *authorities])


def checked(
    make: Callable[[], ssl.SSLContext], config: RouterConfig | NodeConfig, files: list[str]
) -> ssl.SSLContext:
    """Return a context made of these settings' files. Raises ConfigError."""
    try:
        return make()
    except (OSError, ValueError) as why:
        paths = {name: getattr(config, name) for name in files}
        named = " and ".join(f"{name} {path!r}" for name, path in paths.items() if path)
        raise ConfigError(
            f"{named} cannot be used: {why}; they must be PEM files, a certificate and its key must "
            "belong together, and the key have no password"
        ) from why


def load_chain(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    """Give a context its certificate and key. Raises OSError."""
    # Never asks at a terminal for a password.
    context.load_cert_chain(certfile, keyfile or None, password=lambda: "")
