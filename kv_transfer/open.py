"""Which data planes a node opens. The only place that knows all of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from kvrelay.kv_transfer.connector import Connector, PoolRegion
from kvrelay.kv_transfer.desk import Desk
from kvrelay.kv_transfer.led_planes import LedPlanes
from kvrelay.kv_transfer.planes import DataPlane
from kvrelay.kv_transfer.rank_link import RankLink
from kvrelay.kv_transfer.rank_messages import Meeting, PlaneTerms
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.transfer import Fingerprint

__all__ = ["PLANES", "join_connector", "open_connector", "terms_of"]

PLANES = ("direct", "nixl", "nccl")
"""The fastest first: so a pair of nodes chooses among those that both have."""


def open_connector(
    engine_id: str,
    fingerprint: Fingerprint,
    region: PoolRegion,
    config: TransferConfig,
    wake: Callable[[], None],
    link: RankLink | None = None,
) -> Connector:
    """Prepare the plane that `config.kv_connector` names, or with `auto` all that this machine has,
    and open the best.

    The others are opened when a peer needs them. `link` leads to the other ranks, if there are any,
    which call `join_connector`. `wake` is called from any thread when `events` has something.
    Raises ConfigError if no plane can be had, or the control channel's address.
    """
    return Desk(
        engine_id,
        fingerprint,
        region,
        config,
        wake,
        _planes(engine_id, region, terms_of(config)),
        link,
    )


def join_connector(
    rank: int, region: PoolRegion, meeting: Meeting, host: str, lost: Callable[[str], None]
) -> LedPlanes:
    """Prepare the planes of a rank other than 0, which opens them when rank 0 says so.

    `host` is an address of its machine that peers reach. `lost` is called, from another thread, if
    rank 0 is lost.
    """
    terms = PlaneTerms(meeting.terms.kinds, host, meeting.terms.meet_s, meeting.terms.patience_s)
    return LedPlanes(
        rank, region, _planes(f"{meeting.engine_id}-{rank}", region, terms), meeting, lost
    )


def terms_of(config: TransferConfig, rank_heads: int = 0) -> PlaneTerms:
    """What planes must know of the configuration; `rank_heads`: how many KV heads each of several
    ranks has.
    """
    kinds = PLANES if config.kv_connector == "auto" else (config.kv_connector,)
    # A pair that is not made by its fetch's deadline is of no use; and who is silent for a lease
    # has lost it.
    summed_heads = rank_heads if config.kv_checksums else 0
    return PlaneTerms(
        kinds, config.kv_host, config.transfer_deadline_s, config.lease_s, summed_heads
    )


def _planes(name: str, region: PoolRegion, terms: PlaneTerms) -> dict[str, DataPlane]:
    return {kind: _plane(kind, name, region, terms) for kind in terms.kinds}


def _plane(kind: str, name: str, region: PoolRegion, terms: PlaneTerms) -> DataPlane:
    """Each imports what only it needs, and takes nothing yet."""
    if kind == "direct":
        from kvrelay.kv_transfer.via_direct import DirectPlane

        return DirectPlane(region)
    if kind == "nixl":
        from kvrelay.kv_transfer.via_nixl import NixlPlane

        # NIXL knows its peers by name, so a restarted node must not come back under its old one.
        return NixlPlane(f"{name}-{uuid.uuid4().hex}", region, terms.host)
    from kvrelay.kv_transfer.via_nccl import NcclPlane

    return NcclPlane(region, terms.host, terms.meet_s, terms.patience_s)
