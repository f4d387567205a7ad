"""LoRA adapters in the engine process: loads, unloads, and whether remote KV fits them."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Collection

from kvrelay.paged_engine.adapters import Reading, slots_in_use
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
    """A loader of adapters: threads read files, and `poll` does the rest between two steps."""

    def __init__(
        self, engine: Engine, send: Callable[[FromEngine], None], wakeup: Callable[[], None]
    ) -> None:
        self._engine, self._send, self._wakeup = engine, send, wakeup
        self._pending: dict[str, tuple[LoadAdapter, Reading]] = {}
        self._read: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.mismatched_kv = 0

    def load(self, load: LoadAdapter) -> None:
        if self._engine.adapters is None:
            self._refuse(load, "this node has no slots for adapters; start it with --max-loras")
            return

        def done() -> None:
            self._read.put(load.load_id)
            self._wakeup()

        try:
            reading = self._engine.adapters.begin(
                load.name, load.path, in_place=load.in_place, done=done
            )
        except ValueError as why:
            self._refuse(load, str(why))
            return
        self._pending[load.load_id] = load, reading

    def unload(self, name: str) -> None:
        if self._engine.adapters is not None:
            self._engine.adapters.slots.retire(name)

    def poll(self, waiting: Collection[Request] = ()) -> None:
        """Put read adapters into slots, and free those of unloaded ones that no request uses."""
        adapters = self._engine.adapters
        if adapters is None:
            return
        while not self._read.empty():
            load, reading = self._pending.pop(self._read.get())
            try:
                self._send(AdapterLoaded(load.load_id, adapters.finish(reading)))
            except ConfigError as why:
                self._refuse(load, why.message)
        live = [*self._engine.scheduler.live, *waiting] if adapters.slots.ending else ()
        adapters.remove_unused(live)

    @property
    def loaded(self) -> list[AdapterFacts]:
        return [] if self._engine.adapters is None else self._engine.adapters.slots.loaded

    def in_use(self) -> tuple[list[str], list[str]]:
        if self._engine.adapters is None:
            return [], []
        found = [self._engine.adapters.slots.named(facts.name) for facts in self.loaded]
        running, waiting = (
            sorted(each.facts.name for each in found if each is not None and each.slot in slots)
            for slots in slots_in_use(self._engine.scheduler.live)
        )
        return running, waiting

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
