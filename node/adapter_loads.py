"""LoRA adapters in the engine process: loads, unloads, and whether remote KV fits them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.wire.engine_messages import (
    AdapterFacts,
    AdapterLoaded,
    AdapterRefused,
    FromEngine,
    LoadAdapter,
)
from kvrelay.wire.errors import ConfigError

__all__ = ["AdapterLoads", "adapter_of"]


class AdapterLoads:
    """A loader of adapters between two steps."""

    def __init__(self, engine: Engine, send: Callable[[FromEngine], None]) -> None:
        self._engine, self._send = engine, send
        self.mismatched_kv = 0

    def load(self, load: LoadAdapter) -> None:
        adapters = self._engine.adapters
        if adapters is None:
            self._refuse(load, "this node has no slots for adapters; start it with --max-loras")
            return
        try:
            facts = adapters.load(load.name, load.path, in_place=load.in_place)
        except ConfigError as why:
            self._refuse(load, why.message)
            return
        self._send(AdapterLoaded(load.load_id, facts))

    def unload(self, name: str) -> None:
        if self._engine.adapters is not None:
            self._engine.adapters.retire(name)

    def poll(self, waiting: Collection[Request] = ()) -> None:
        """Free slots of unloaded adapters that no request uses."""
        if self._engine.adapters is not None:
            self._engine.adapters.free_unused(itertools.chain(self._engine.scheduler.live, waiting))

    @property
    def loaded(self) -> list[AdapterFacts]:
        return [] if self._engine.adapters is None else self._engine.adapters.loaded

    def mismatch(self, request: Request) -> str | None:
        fetch, (name, digest) = request.fetch, adapter_of(request)
        if fetch is None or (fetch.adapter, fetch.adapter_digest) == (name, digest):
            return None
        self.mismatched_kv += 1
        theirs, ours = _described(fetch.adapter, fetch.adapter_digest), _described(name, digest)
        return (
            f"the KV was made with {theirs} and is asked for with {ours}; load the same "
            f"adapters on all nodes"
        )

    def _refuse(self, load: LoadAdapter, reason: str) -> None:
        # Not Path.is_dir, which raises on names that are too long.
        self._send(AdapterRefused(load.load_id, reason, missing=not os.path.isdir(load.path)))


def adapter_of(request: Request) -> tuple[str, str]:
    if request.adapter is None:
        return "", ""
    return request.adapter.facts.name, request.adapter.facts.digest


def _described(name: str, digest: str) -> str:
    return f"adapter {name!r} of content {digest[:12]}" if name else "no adapter"
