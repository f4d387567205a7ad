"""TLS of the router towards https:// nodes: whom it trusts, and who it says that it is."""

from __future__ import annotations

import ssl

from kvrelay.openai_api.tls import load_chain, renewed
from kvrelay.wire.router_config import RouterConfig

__all__ = ["trusted"]


def trusted(config: RouterConfig) -> ssl.SSLContext | bool:
    """Make the context for connections to nodes; True for the system's authorities alone. Raises
    ConfigError.
    """
    if not (config.ssl_ca_certs or config.node_ssl_certfile):
        return True

    def make() -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=config.ssl_ca_certs or None)
        if config.node_ssl_certfile:
            load_chain(context, config.node_ssl_certfile, config.node_ssl_keyfile)
        return context

    return renewed(
        make,
        {
            "ssl_ca_certs": config.ssl_ca_certs,
            "node_ssl_certfile": config.node_ssl_certfile,
            "node_ssl_keyfile": config.node_ssl_keyfile,
        },
    )
