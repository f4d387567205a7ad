"""What a vLLM node says of itself, as a health report: its models and its load. Its GET /health is an empty 200.

Reads three of its routes: /version (is it one at all), /v1/models, and /metrics in Prometheus' text form, in which a
line per engine tells what is running there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import msgspec

from router.nodes.node import HealthReport, Node, NodeKind
from wire.config import Role
from wire.frames import MALFORMED
from wire.outputs import Load

__all__ = ["Fetch", "report_of", "vllm_report"]

Fetch = Callable[[str], Awaitable[tuple[int, bytes]]]
"""Status and body of a GET of this path on the node."""

# The cache's usage has an older name, too.
_SAMPLE = re.compile(
    rb"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|vllm:gpu_cache_usage_perc"
    rb"|process_start_time_seconds)(?:\{[^\n]*\})? ([-+.0-9eE]+)\r?$",
    re.MULTILINE,
)
_RUNNING = re.compile(rb"^vllm:num_requests_running(?:\{[^\n]*\})? ", re.MULTILINE)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_BLOCKS, _BLOCK_TOKENS = re.compile(rb'\bnum_gpu_blocks="(\d+)"'), re.compile(rb'\bblock_size="(\d+)"')


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def vllm_report(node: Node, fetch: Fetch) -> HealthReport | str:
    """What a node is found to be whose /health is empty, or why it takes no work. Raises what `fetch` raises."""
    if node.kind is NodeKind.KVRELAY:  # not known yet
        status, body = await fetch("/version")
        if status != 200 or b'"version"' not in body:
            return "its /health is empty and it has no /version: it is neither a node of ours nor of vLLM"
    (status, models), (told, metrics) = await asyncio.gather(fetch("/v1/models"), fetch("/metrics"))
    if status != 200:
        return f"its /v1/models answers {status}" + ("; give the router its key" if status in (401, 403) else "")
    return report_of(node.role, node.p2p_address, models, metrics if told == 200 else b"")


def report_of(role: Role, p2p_address: str, models: bytes, metrics: bytes) -> HealthReport | str:
    """The report that these two answers amount to, or what is wrong with them. Pure.

    `role` is what the node is listed as: a vLLM node does not say. Without metrics its load is not known, and only the
    router's own requests count.
    """
    try:
        cards = msgspec.json.decode(models, type=_Cards).data
    except MALFORMED as why:
        return f"its /v1/models is malformed: {why}"
    base = next((card for card in cards if card.parent is None), None)
    if base is None:
        return "its /v1/models names no model"
    load, started = _load_of(role, metrics)
    return HealthReport(
        role=role,
        model=base.id,
        max_model_len=base.max_model_len or 0,
        generation=started,
        load=load,
        # Other names of the model, and its LoRA adapters.
        adapters=[card.id for card in cards if card.id != base.id],
        kind=NodeKind.VLLM_P2P_NCCL if p2p_address else NodeKind.VLLM,
        aliases=[card.id for card in cards if card.id != base.id and card.parent is None],
        engines=max(1, len(_RUNNING.findall(metrics))),
    )


def _load_of(role: Role, metrics: bytes) -> tuple[Load, str]:
    """Return the load of all engines of a node, and when its process began, as it writes that (it tells restarts)."""
    sums: dict[bytes, list[float]] = {}
    started = ""
    for name, value in _SAMPLE.findall(metrics):
        if name == b"process_start_time_seconds":
            started = value.decode()
            continue
        try:
            sums.setdefault(name.rpartition(b"_cache_")[2], []).append(float(value))
        except ValueError:
            continue
    caches = _CACHE.findall(metrics)
    total = sum(int(blocks) for cache in caches for blocks in _BLOCKS.findall(cache))
    block_size = max((int(tokens) for cache in caches for tokens in _BLOCK_TOKENS.findall(cache)), default=0)
    used = sums.get(b"usage_perc", [0.0])
    free = round(total * (1 - min(1.0, max(0.0, sum(used) / len(used)))))
    running, waiting = (
        max(0, int(sum(sums.get(name, ())))) for name in (b"vllm:num_requests_running", b"vllm:num_requests_waiting")
    )
    if role is Role.PREFILL:
        running, waiting = 0, running + waiting  # each is a prompt that is not computed yet
    if not total:
        block_size = 0  # room of no known size is not no room
    return Load(running, waiting, free_blocks=free, total_blocks=total, block_size=block_size), started
