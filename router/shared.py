"""What a router process has in common with others that serve the same port; a router by itself is
alone.

Owns the case without any others. With several processes it is router/workers/worker.py's in those
that answer requests, and router/workers/parent.py's in the one that looks after them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import Request
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

from kvrelay.openai_api.dialects.response_store import IN_MEMORY, ResponseStore
from kvrelay.router.membership.warm_up import NO_PAIRS, WarmPairs
from kvrelay.router.request.poison import Poison
from kvrelay.router.state import WorkerStatus

__all__ = ["Shared"]


class Shared:
    """A router process that is alone."""

    leads = True
    """It looks after nodes: has them meet, and change their roles."""
    serves = True
    """It answers requests, so that it wants to know what nodes have in their caches."""
    warm_pairs: WarmPairs = NO_PAIRS
    """The pairs of nodes that are warm, if another process warms them up."""
    index = 0
    """Its number among those that serve."""
    forward: Callable[[Request, bytes, float], Awaitable[Response]] | None = None
    """Asks the process that leads what operators and scrapers want to know or to change."""

    def __init__(self, responses: str = IN_MEMORY) -> None:
        """`responses`: the path of their file."""
        self.poison = Poison()
        self.responses = ResponseStore(responses)

    def running_elsewhere(self) -> Mapping[str, int] | None:
        """Count the legs by the addresses of their nodes, if other processes have them."""
        return None

    def other_workers(self) -> Sequence[WorkerStatus]:
        """Return what the other processes see, as far as they answer requests."""
        return ()

    def exposition(self, own: CollectorRegistry) -> bytes:
        """Write the metrics of all processes in Prometheus's format."""
        return generate_latest(own)

    def workers(self) -> dict[str, int] | None:
        """Count the processes, and say which this is; None: it is alone."""
        return None

    async def settled(self) -> None:
        """Wait until all processes have taken over what was changed here."""
