"""A request with several prompts: each runs on its own nodes, for one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from kvrelay.openai_api.sse import joined_body, joined_end
from kvrelay.router.background import cancel_and_wait
from kvrelay.router.relay import Reply
from kvrelay.router.request.failures import MAX_LOST
from kvrelay.router.request.job import Job
from kvrelay.router.request.run import Run
from kvrelay.router.timeline import Timeline

__all__ = ["last_timeline", "prompt_tokens_of", "run_together"]


async def run_together(job: Job, runs: Sequence[Run], reply: Reply) -> None:
    """Answer all prompts into `reply`; the first that fails ends the others. Raises KvrelayError.

    Events are joined as they come: then `reply` is also that of each run. Until a node has sent a
    token, at most MAX_LOST prompts run, to spare further nodes.
    """
    tasks = [asyncio.create_task(run.run()) for run in runs[:MAX_LOST]]
    told = asyncio.create_task(runs[0].crashes.first_token.wait())
    try:
        await asyncio.wait([told, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if not any(task.done() and task.exception() for task in tasks):
            tasks += [asyncio.create_task(run.run()) for run in runs[MAX_LOST:]]
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait([told, *tasks])
    if job.stream:
        end = joined_end(
            [run.usage for run in runs],
            include_usage=job.include_usage,
            response_id=job.response_id,
            created=job.created,
            model=job.model,
        )
    else:
        end = joined_body([run.reply.kept() for run in runs])
    if job.wants_stages:
        end = last_timeline(runs).with_stages(end, time.monotonic())
    reply.put(end)


def last_timeline(runs: Sequence[Run]) -> Timeline:
    """Return the times of the prompt that was answered last."""
    times = (run.timeline for run in runs)
    return max(times, key=lambda each: each.last_token or each.arrived)


def prompt_tokens_of(runs: Sequence[Run]) -> int | None:
    """Return the tokens of all prompts; None until nodes have told."""
    counts = [run.prompt_tokens for run in runs]
    return None if None in counts else sum(count or 0 for count in counts)
