"""What each leg of a job asks of its node. Pure."""

from __future__ import annotations

from router.nodes.node import Node
from router.policies.policy import Ask
from router.prefix.index import Prefix
from router.walk.job import Job
from router.walk.progress import Progress
from wire.config import Role
from wire.transfer import KvTransferParams

__all__ = ["decode_ask", "prefill_ask", "prompt_tokens"]


def prefill_ask(job: Job, prefix: Prefix) -> Ask:
    """Of the leg that computes the prompt."""
    return Ask(
        Role.PREFILL,
        job.model,
        job.prompt_tokens,
        priority=job.priority,
        session=job.session,
        prefix=prefix,
        ttft_ms=(job.targets.ttft_s or 0.0) * 1e3,
        tpot_ms=(job.targets.tpot_s or 0.0) * 1e3,
    )


def decode_ask(job: Job, prefix: Prefix, progress: Progress, params: KvTransferParams, peer: Node | None) -> Ask:
    """Of the leg that begins with `params`; `peer` has its KV."""
    generated = progress.output_tokens
    most = job.max_tokens * max(job.choices, job.best_of)
    return Ask(
        Role.DECODE,
        job.model,
        progress.tokens_to_compute(params),
        kv_tokens=prompt_tokens(job, params) + generated,
        output_tokens=max(1, most - generated) if most else 0,
        priority=job.priority,
        session=job.session,
        prefix=prefix,
        peer=peer.url if peer else "",
    )


def prompt_tokens(job: Job, params: KvTransferParams) -> int:
    """Of the prompt; estimated until a node has told its ids."""
    told = params.prompt_tokens
    return job.prompt_tokens if told is None else told
