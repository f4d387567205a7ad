"""A request with several prompts: a run for each, with nodes of its own, and one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvrelay.openai_api.sse import joined_body, joined_end
from kvrelay.router.background import cancel_and_wait
from kvrelay.router.client_connection import Reply
from kvrelay.router.request.job import Job
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery
from kvrelay.router.request.poison import MAX_LOST
from kvrelay.router.request.run import RequestRun
from kvrelay.router.request.timeline import Timeline

__all__ = ["MultiPromptRun"]


class MultiPromptRun:
    """A run for each prompt; the first that fails ends the others."""

    def __init__(
        self,
        job: Job,
        parts: Sequence[Job],
        arrived: float,
        walk: Callable[[Job, Timeline, Reply], RequestRun],
        first_token: asyncio.Event,
    ) -> None:
        """`walk` makes the run of one part; `first_token` is set when a node has sent a token."""
        self.job, self._first_token = job, first_token
        self.reply = Reply()
        # Events are joined as they come, bodies when they are there.
        self.parts = [
            walk(part, Timeline(arrived), self.reply if job.stream else Reply()) for part in parts
        ]
        """The walks of the prompts."""
        self.placed: PlacementLeases | None = None
        """Where the first was placed, if its turn has come with a place."""

    def wanted(self) -> PlacementQuery:
        """Return what the first part wants; the others are placed when they begin."""
        return self.parts[0].wanted()

    @property
    def timeline(self) -> Timeline:
        """Return the timeline of the run that ended last, or still runs."""
        return max(
            (walk.timeline for walk in self.parts), key=lambda each: each.last_token or each.arrived
        )

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all prompts; None until all are known."""
        counts = [walk.prompt_tokens for walk in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(walk.output_tokens for walk in self.parts)

    @property
    def answers(self) -> int:
        """Number of choices that are generated at the same time."""
        return sum(walk.answers for walk in self.parts)

    @property
    def placement(self) -> str:
        """Placements of all prompts."""
        return "; ".join(walk.placement for walk in self.parts)

    @property
    def nodes(self) -> tuple[str, str]:
        """URLs of all prefill nodes, and of all decode nodes."""
        prefill, decode = ({walk.nodes[leg] for walk in self.parts} for leg in (0, 1))
        return ",".join(sorted(prefill)), ",".join(sorted(decode))

    async def run(self) -> None:
        """Answer the request into `reply`, once. Raises KvrelayError.

        Until a node has sent a token, at most MAX_LOST prompts run, so that many prompts do not
        end more nodes.
        """
        self.parts[0].placed = self.placed
        tasks = [asyncio.create_task(walk.run()) for walk in self.parts[:MAX_LOST]]
        told = asyncio.create_task(self._first_token.wait())
        try:
            await asyncio.wait([told, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() and task.exception() for task in tasks):
                tasks += [asyncio.create_task(walk.run()) for walk in self.parts[MAX_LOST:]]
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait([told, *tasks])
        self.reply.put(self._end())

    def _end(self) -> bytes:
        if self.job.stream:
            end = joined_end(
                [walk.usage for walk in self.parts],
                include_usage=self.job.include_usage,
                response_id=self.job.response_id,
                created=self.job.created,
                model=self.job.model,
            )
        else:
            end = joined_body([walk.reply.kept() for walk in self.parts])
        return self.timeline.with_stages(end, time.monotonic()) if self.job.wants_stages else end
