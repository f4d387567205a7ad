"""Cache process of a node (cache_node), which outlives its engine process."""

from __future__ import annotations

from typing import NoReturn

from kvrelay.cache_node.process import CacheProcess
from kvrelay.node.child import run_child
from kvrelay.wire.cache_messages import CacheSetup

__all__ = ["main"]


def main() -> NoReturn:
    run_child("cache", CacheSetup, lambda setup, socket: CacheProcess(setup, socket).serve())
