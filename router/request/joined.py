"""Several prompts of one request: run beside each other, and told of as one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from kvrelay.openai_api.sse import joined_body, joined_end, summed_usage
from kvrelay.router.background import cancel_and_wait
from kvrelay.router.relay import Reply
from kvrelay.router.request.failures import MAX_LOST
from kvrelay.router.request.job import Job
from kvrelay.router.request.run import RequestRun
from kvrelay.router.timeline import Timeline

__all__ = ["last_timeline", "prompt_tokens_of", "run_together", "rungs_of"]


async def run_together(job: Job, runs: Sequence[RequestRun], reply: Reply) -> None:
    """Answer all prompts into `reply`; the first that fails ends the others. Raises KvrelayError.

    Events are joined as they come: then `reply` is also that of each run. Until a node has sent a
    token, at most MAX_LOST prompts run, to spare further nodes.
    """

    async def part(at: int, run: RequestRun) -> None:
        if at >= MAX_LOST:
            await run.crashes.first_token.wait()
        await run.run()
        run.crashes.first_token.set()

    tasks = [asyncio.create_task(part(*each)) for each in enumerate(runs)]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)
    usage = summed_usage(
        [
            (run.prompt_tokens or 0, run.output_tokens, run.cached_tokens, run.written_tokens)
            for run in runs
        ]
    )
    if job.stream:
        end = joined_end(
            usage,
            job.response_id,
            job.created,
            job.model,
            include_usage=job.include_usage,
        )
    else:
        end = joined_body([run.reply.kept() for run in runs], usage)
    if job.wants_stages:
        end = last_timeline(runs).with_stages(end, time.monotonic(), rungs_of(runs))
    reply.put(end, True)


def last_timeline(runs: Sequence[RequestRun]) -> Timeline:
    """Return the times of the prompt that was answered last."""
    return max((run.timeline for run in runs), key=lambda each: each.last_token or each.arrived)


def rungs_of(runs: Sequence[RequestRun]) -> Counter[str]:
    rungs = Counter[str]()
    for run in runs:
        rungs.update(run.rungs)
    return rungs


def prompt_tokens_of(runs: Sequence[RequestRun]) -> int | None:
    """Return the tokens of all prompts; None until nodes have told."""
    counts = [run.prompt_tokens for run in runs]
    return None if None in counts else sum(filter(None, counts))
