"""Chooses the connector that the configuration names. The only place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.connector import Connector, PoolRegion
from wire.config import TransferConfig
from wire.errors import ConfigError
from wire.transfer import Fingerprint

__all__ = ["open_connector"]


def open_connector(
    engine_id: str, fingerprint: Fingerprint, region: PoolRegion, config: TransferConfig, wake: Callable[[], None]
) -> Connector:
    """Start the connector `config.kv_connector`. `wake` is called from any thread when `events` has something.

    Raises ConfigError if the connector is unknown or not installed, or its address cannot be had."""
    if config.kv_connector == "nixl":
        from kv_transfer.via_nixl import NixlConnector

        return NixlConnector(engine_id, fingerprint, region, config, wake)
    if config.kv_connector == "direct":
        from kv_transfer.via_direct import DirectConnector

        return DirectConnector(engine_id, fingerprint, region, config, wake)
    raise ConfigError(f"kv_connector {config.kv_connector!r} is not one of nixl, direct")
