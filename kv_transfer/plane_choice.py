"""The data planes that a node has opened, and which of them it can share with a peer."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from kv_transfer.messages import Welcome
from kv_transfer.planes import DataPlane, PlaneDesk, PlaneThread, Source
from wire.errors import ConfigError

__all__ = ["OpenPlanes"]

log = logging.getLogger(__name__)


class OpenPlanes:
    """Planes by name, the best first; each on its thread."""

    def __init__(self, planes: Mapping[str, DataPlane], desk: PlaneDesk) -> None:
        """Open them. Of several, those that this machine cannot have are left out.

        Raises ConfigError if the only one cannot be had, or none of several."""
        self.cards: dict[str, bytes] = {}
        """What peers need to use each."""
        self.missing: dict[str, str] = {}
        """Those left out, and why."""
        self.wanted = tuple(planes)
        """Those in it and those left out."""
        self._threads: dict[str, PlaneThread] = {}
        for kind, plane in planes.items():
            thread = PlaneThread(plane, desk)
            try:
                self.cards[kind] = thread.open()
            except ConfigError as error:
                if len(planes) == 1:
                    raise
                log.info("no KV by %s on this node: %s", kind, error.message)
                self.missing[kind] = error.message
            else:
                self._threads[kind] = thread
        if not self._threads:
            raise ConfigError(f"no KV can be handed over: {'; '.join(self.missing.values())}")

    def __getitem__(self, kind: str) -> PlaneThread:
        """The thread of a plane that is open."""
        return self._threads[kind]

    def shared(self, welcome: Welcome) -> list[tuple[str, Source]]:
        """The planes that this peer has, too, the best first."""
        engine_id, generation, region = welcome.engine_id, welcome.generation, welcome.region
        return [
            (kind, Source(engine_id, generation, region, welcome.planes[kind]))
            for kind in self._threads
            if kind in welcome.planes
        ]

    def nudge(self) -> None:
        """Somebody may be about to read from here."""
        for thread in self._threads.values():
            thread.nudge()

    def close(self, timeout_s: float) -> None:
        """End all threads; together they have so long."""
        until = time.monotonic() + timeout_s
        for thread in self._threads.values():
            thread.stop()
        for thread in self._threads.values():
            thread.close(max(0.0, until - time.monotonic()))
