"""A vLLM node's health as a report of ours: its models and its load.

Its GET /health is an empty 200, so /version, /v1/models and /metrics are read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import msgspec

from kvrelay.router.nodes.node import HealthReport, Node, NodeKind
from kvrelay.wire.config import Role
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.outputs import Load

__all__ = ["Fetch", "report_of", "vllm_report"]

Fetch = Callable[[str], Awaitable[tuple[int, bytes]]]

# The lines of interest among thousands.
_READ = (b"vllm:num_requests_", b"process_start_")


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def vllm_report(node: Node, fetch: Fetch) -> HealthReport | str:
    """Return the report of a vLLM node, or why it takes no requests."""
    if node.kind is NodeKind.KVRELAY:  # not known yet
        status, body = await fetch("/version")
        if status != 200 or b'"version"' not in body:
            return (
                "its /health is empty and it has no /version: it is neither a node of ours nor "
                "of vLLM"
            )
    (status, models), (metrics_status, metrics) = await asyncio.gather(
        fetch("/v1/models"), fetch("/metrics")
    )
    if status != 200:
        return f"its /v1/models answers {status}" + (
            "; give the router its key" if status in (401, 403) else ""
        )
    return report_of(node.role, models, metrics if metrics_status == 200 else b"")


def report_of(role: Role, models: bytes, metrics: bytes) -> HealthReport | str:
    """Return the report that two answers amount to, or what is wrong with them. Pure.

    `role` is as listed: a vLLM node does not tell. Without metrics its load is unknown.
    """
    try:
        cards = msgspec.json.decode(models, type=_Cards).data
    except MALFORMED as why:
        return f"its /v1/models is malformed: {why}"
    base = next((card for card in cards if card.parent is None), None)
    if base is None:
        return "its /v1/models names no model"
    metrics = b"\n".join(line for line in metrics.splitlines() if line.startswith(_READ))
    return HealthReport(
        role=role,
        model=base.id,
        max_model_len=base.max_model_len or 0,
        # A restart changes this time.
        generation=next(map(str, _values(metrics, b"process_start_time_seconds")), ""),
        load=_load_of(role, metrics),
        adapters=[card.id for card in cards if card.id != base.id],
        kind=NodeKind.VLLM,
    )


def _load_of(role: Role, metrics: bytes) -> Load:
    running, waiting = (
        int(sum(_values(metrics, b"vllm:num_requests_" + each)))
        for each in (b"running", b"waiting")
    )
    # On a prefill node each is a prompt still to be computed.
    return Load(0, running + waiting) if role is Role.PREFILL else Load(running, waiting)


def _values(metrics: bytes, name: bytes) -> list[float]:
    line = rb"^" + name + rb"(?:\{[^\n]*\})? (\d+(?:\.\d+)?(?:e[-+]?\d\d?)?)$"
    return [float(number) for number in re.findall(line, metrics, re.MULTILINE)]
