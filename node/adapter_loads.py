"""LoRA adapters in the engine process: loads, unloads, and whether remote KV fits them."""

from __future__ import annotations

import os

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.wire.engine_messages import AdapterAnswer, LoadAdapter
from kvrelay.wire.errors import ConfigError

__all__ = ["adapter_of", "load_adapter", "mismatch"]


def load_adapter(engine: Engine, load: LoadAdapter) -> AdapterAnswer:
    """Read an adapter into a slot, between two steps."""
    if engine.adapters is None:
        reason = "this node has no slots for adapters; start it with --max-loras"
    else:
        try:
            facts = engine.adapters.load(load.name, load.path, in_place=load.in_place)
            return AdapterAnswer(load.number, facts)
        except ConfigError as why:
            reason = why.message
    # Not Path.is_dir, which raises on names that are too long.
    return AdapterAnswer(load.number, reason=reason, missing=not os.path.isdir(load.path))


def mismatch(request: Request) -> str | None:
    """Return why KV from elsewhere is not of this request's adapter, or None."""
    fetch, (name, digest) = request.fetch, adapter_of(request)
    if fetch is None or (fetch.adapter, fetch.adapter_digest) == (name, digest):
        return None
    theirs, ours = _described(fetch.adapter, fetch.adapter_digest), _described(name, digest)
    return (
        f"the KV was made with {theirs} and is asked for with {ours}; load the same adapters on "
        f"all nodes"
    )


def adapter_of(request: Request) -> tuple[str, str]:
    if request.adapter is None:
        return "", ""
    return request.adapter.facts.name, request.adapter.facts.digest


def _described(name: str, digest: str) -> str:
    return f"adapter {name!r} of content {digest[:12]}" if name else "no adapter"
