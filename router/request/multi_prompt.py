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
from kvrelay.router.request.run import RequestRun, Run
from kvrelay.router.request.timeline import Timeline

__all__ = ["MultiPromptRun"]


class MultiPromptRun(Run):
    """A run for each prompt; the first that fails ends the others."""

    def __init__(
        self, job: Job, parts: Sequence[Job], arrived: float, run: Callable[..., RequestRun]
    ) -> None:
        """`run` makes the run of a part's job, timeline and reply."""
        self.job, self.reply = job, Reply()
        self.placed: PlacementLeases | None = None
        # Events are joined as they come, bodies when they are there.
        self._runs = [
            run(part, Timeline(arrived), self.reply if job.stream else Reply()) for part in parts
        ]

    @property
    def parts(self) -> Sequence[Run]:  # type: ignore[override]
        return self._runs

    def wanted(self) -> PlacementQuery:
        return self._runs[0].wanted()

    @property
    def timeline(self) -> Timeline:  # type: ignore[override]
        times = (run.timeline for run in self._runs)
        return max(times, key=lambda each: each.last_token or each.arrived)

    @property
    def prompt_tokens(self) -> int | None:  # type: ignore[override]
        counts = [run.prompt_tokens for run in self._runs]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def output_tokens(self) -> int:  # type: ignore[override]
        return sum(run.output_tokens for run in self._runs)

    @property
    def answers(self) -> int:
        return self.job.choices * len(self._runs)

    @property
    def placement(self) -> str:  # type: ignore[override]
        return "; ".join(run.placement for run in self._runs)

    @property
    def nodes(self) -> tuple[str, str]:  # type: ignore[override]
        prefill, decode = ({run.nodes[leg] for run in self._runs} for leg in (0, 1))
        return ",".join(sorted(prefill)), ",".join(sorted(decode))

    async def run(self) -> None:
        """Answer the request into `reply`, once. Raises KvrelayError.

        Until a node has sent a token, at most MAX_LOST prompts run, so that many prompts do not
        end more nodes.
        """
        first, runs = self._runs[0], self._runs
        first.placed = self.placed
        tasks = [asyncio.create_task(run.run()) for run in runs[:MAX_LOST]]
        told = asyncio.create_task(first.crashes.first_token.wait())
        try:
            await asyncio.wait([told, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() and task.exception() for task in tasks):
                tasks += [asyncio.create_task(run.run()) for run in runs[MAX_LOST:]]
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait([told, *tasks])
        self.reply.put(self._end())

    def _end(self) -> bytes:
        if self.job.stream:
            end = joined_end(
                [run.usage for run in self._runs],
                include_usage=self.job.include_usage,
                response_id=self.job.response_id,
                created=self.job.created,
                model=self.job.model,
            )
        else:
            end = joined_body([run.reply.kept() for run in self._runs])
        return self.timeline.with_stages(end, time.monotonic()) if self.job.wants_stages else end
