"""`kvrelay replay` of a trace: what its prompts would have found with other tiers or policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.load.measures import percentile
from kvrelay.load.workloads import TRACE_BLOCK_TOKENS, read_trace
from kvrelay.planner.incident import Incident
from kvrelay.planner.rate_card import RateCard
from kvrelay.planner.setting import NETWORK_MS, Setting, Stream
from kvrelay.planner.world import simulate
from kvrelay.replay import check_policy, size_of
from kvrelay.wire.config import CacheConfig
from kvrelay.wire.config_checks import gib
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.ladder import RUNGS

__all__ = ["tokens_below", "what_if"]

_SHOWN = RUNGS[:-1]


def tokens_below(card: RateCard, cache: CacheConfig) -> dict[str, int]:
    """Return the tokens of each tier below the pool. Raises ConfigError."""
    sizes = {"host": cache.kv_host_memory, "store": cache.kv_store_size}
    if any(sizes.values()) and not card.kv_token_bytes:
        raise ConfigError(
            "the rate card does not tell the bytes of KV of a token (kv_token_bytes); profile again"
        )
    return {name: size // card.kv_token_bytes for name, size in sizes.items() if size}


def what_if(
    path: Path,
    card: RateCard,
    nodes: str,
    policy: str,
    tiers: Sequence[CacheConfig],
    console: Console,
    *,
    pull: str,
) -> int:
    """Print a row for each size of the tiers. Raises ConfigError."""
    check_policy(policy)
    if pull not in ("auto", "never"):
        raise ConfigError(f"--kv-pull {pull!r} is none of auto, never")
    prefill, decode = size_of(Incident(), nodes)
    try:
        asked = read_trace(path)
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(f"the trace {path} cannot be read: {why!r}") from why
    title = f"{prefill}P{decode}D, {policy}: % of the tokens that a cache could have had"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    columns: list[tuple[str, ...]] = [("found", *_SHOWN, "TTFT p50, ms", "TTFT p99, ms")]
    for each in tiers:
        streams = [Stream(one.at, one.prompt, one.output, one.blocks) for one in asked]
        result = simulate(
            streams,
            Setting(
                policy,
                prefill,
                decode,
                block_size=TRACE_BLOCK_TOKENS,
                pulls=pull == "auto",
                below=tokens_below(card, each),
                card=card,
            ),
        )
        rungs = result.rungs
        possible = max(1, rungs.total() - rungs["new"])
        ttft = sorted(stream.ttft + NETWORK_MS for stream in streams if stream.answered)
        columns.append((
            f"{result.found:.2%}",
            *(f"{rungs[rung] / possible:.2%}" for rung in _SHOWN),
            *(f"{percentile(ttft, share):,.0f}" for share in (0.5, 0.99)),
        ))  # fmt: skip
        sizes = each.kv_host_memory, each.kv_store_size
        table.add_column("{} host, {} store".format(*map(gib, sizes)), justify="right")
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    console.print(table)
    return 0
