"""Which data planes a node opens. The only place that knows all of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from kv_transfer.connector import Connector, PoolRegion
from kv_transfer.desk import Desk
from kv_transfer.planes import DataPlane
from wire.config import TransferConfig
from wire.transfer import Fingerprint

__all__ = ["PLANES", "open_connector"]

PLANES = ("direct", "nixl", "nccl")
"""The fastest first: so a pair of nodes chooses among those that both have."""


def open_connector(
    engine_id: str, fingerprint: Fingerprint, region: PoolRegion, config: TransferConfig, wake: Callable[[], None]
) -> Connector:
    """Start the plane that `config.kv_connector` names, or with `auto` all that this machine has.

    `wake` is called from any thread when `events` has something. Raises ConfigError if no plane can be had, or the
    control channel's address."""
    kinds = PLANES if config.kv_connector == "auto" else (config.kv_connector,)
    planes = {kind: _plane(kind, engine_id, region, config) for kind in kinds}
    return Desk(engine_id, fingerprint, region, config, wake, planes)


def _plane(kind: str, engine_id: str, region: PoolRegion, config: TransferConfig) -> DataPlane:
    """Each imports what only it needs, and takes nothing yet."""
    if kind == "direct":
        from kv_transfer.via_direct import DirectPlane

        return DirectPlane(region)
    if kind == "nixl":
        from kv_transfer.via_nixl import NixlPlane

        # NIXL knows its peers by name, so a restarted node must not come back under its old one.
        return NixlPlane(f"{engine_id}-{uuid.uuid4().hex}", region)
    from kv_transfer.via_nccl import NcclPlane

    # A pair that is not made by its fetch's deadline is of no use; and who is silent for a lease has lost it.
    return NcclPlane(region, config.kv_host, config.transfer_deadline_s, config.lease_s)
