"""LoRA adapters in the engine process: loads and unloads that the HTTP process asks for, and whose
KV may be taken.

The files are read beside the loop; `turn`, called between steps, does what a step must not run
into. Does not know what names clients may use: the HTTP process turns them away first.
"""

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
    UnloadAdapter,
)
from kvrelay.wire.errors import ConfigError

__all__ = ["AdapterLoads", "content"]


class AdapterLoads:
    """Belongs to the loop's thread, but for the news that something has been read."""

    def __init__(
        self, engine: Engine, send: Callable[[FromEngine], None], wake: Callable[[], None]
    ) -> None:
        self._engine, self._send, self._wake = engine, send, wake
        self._asked: dict[str, tuple[LoadAdapter, Reading]] = {}
        self.unlike_kv = 0
        """Hand-overs that were not taken because the other node has another adapter of that name."""
        self._read: queue.SimpleQueue[str] = queue.SimpleQueue()

    def hear(self, ask: LoadAdapter | UnloadAdapter) -> None:
        """Begin to read an adapter, or refuse it at once; or let no request begin with one any
        more.
        """
        if isinstance(ask, UnloadAdapter):
            if self._engine.adapters is not None:
                self._engine.adapters.slots.retire(ask.name)
            return
        if self._engine.adapters is None:
            self._refuse(ask, "this node has no slots for adapters; start it with --max-loras")
            return

        def done() -> None:
            self._read.put(ask.load_id)
            self._wake()

        try:
            reading = self._engine.adapters.begin(
                ask.name, ask.path, in_place=ask.in_place, done=done
            )
        except ValueError as why:
            self._refuse(ask, str(why))
            return
        self._asked[ask.load_id] = ask, reading

    def turn(self, waiting: Collection[Request] = ()) -> None:
        """Between two steps: put into slots what has been read, and free the slots of what has
        ended.

        `waiting`: live requests that the scheduler does not have yet.
        """
        adapters = self._engine.adapters
        if adapters is None:
            return
        while not self._read.empty():
            ask, reading = self._asked.pop(self._read.get())
            try:
                self._send(AdapterLoaded(ask.load_id, adapters.finish(reading)))
            except ConfigError as why:
                self._refuse(ask, why.message)
        adapters.remove_unused(
            [*self._engine.scheduler.live, *waiting] if adapters.slots.ending else ()
        )

    @property
    def loaded(self) -> list[AdapterFacts]:
        """The adapters that requests may name."""
        return [] if self._engine.adapters is None else self._engine.adapters.slots.loaded

    def in_use(self) -> tuple[list[str], list[str]]:
        """Names of the loaded adapters whose requests run, and of those whose requests wait."""
        if self._engine.adapters is None:
            return [], []
        found = [self._engine.adapters.named(facts.name) for facts in self.loaded]
        running, waiting = (
            sorted(each.facts.name for each in found if each is not None and each.slot in slots)
            for slots in slots_in_use(self._engine.scheduler.live)
        )
        return running, waiting

    def unlike(self, request: Request) -> str | None:
        """Why KV that was made elsewhere is not what this node would compute for the request; None
        if it is.
        """
        fetch, (name, digest) = request.fetch, content(request)
        if fetch is None or (fetch.adapter, fetch.adapter_digest) == (name, digest):
            return None
        self.unlike_kv += 1
        theirs, ours = _worded(fetch.adapter, fetch.adapter_digest), _worded(name, digest)
        return (
            f"the KV was made with {theirs} and is asked for with {ours}; load the same "
            f"adapters on all nodes"
        )

    def _refuse(self, ask: LoadAdapter, reason: str) -> None:
        # Not Path.is_dir, which raises on names that are too long.
        self._send(AdapterRefused(ask.load_id, reason, missing=not os.path.isdir(ask.path)))


def content(request: Request) -> tuple[str, str]:
    """Name and digest of the adapter that makes a request's KV; empty without one."""
    return (
        ("", "")
        if request.adapter is None
        else (request.adapter.facts.name, request.adapter.facts.digest)
    )


def _worded(name: str, digest: str) -> str:
    return f"adapter {name!r} of content {digest[:12]}" if name else "no adapter"
