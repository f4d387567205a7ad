"""A router process's part in a group on one port; this is the case of one alone.

router/workers/worker.py overrides it in those that answer requests, router/workers/parent.py in
their parent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

from kvrelay.openai_api.dialects.response_store import IN_MEMORY, ResponseStore
from kvrelay.router.request.failures import Poison
from kvrelay.router.state import WorkerStatus

__all__ = ["Shared"]


class Shared:
    leads = True
    """This process changes the roles of nodes."""
    serves = True
    """This process answers requests, so it follows what nodes have in their caches."""
    forward: Callable[[Request, bytes, float], Awaitable[Response]] | None = None
    """Asks the leading process what operators and scrapers want to know or to change."""
    responses: ResponseStore
    """Set in processes that serve."""

    def __init__(self, responses: str = IN_MEMORY) -> None:
        self.poison = Poison()
        if self.serves:
            self.responses = ResponseStore(responses)

    def other_workers(self) -> Sequence[WorkerStatus]:
        """Return what the other processes see, as far as they answer requests."""
        return ()

    def exposition(self, own: CollectorRegistry) -> bytes:
        """Return the metrics of all processes in Prometheus's format."""
        return generate_latest(own)

    def workers(self) -> dict[str, int] | None:
        """Return the index of this process and the number of all; None: it is alone."""
        return None

    async def settled(self) -> None:
        """Wait until all processes have taken over what was changed here."""
