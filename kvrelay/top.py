"""`kvrelay top`: the state that the console shows, in a terminal; once into a pipe."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvrelay.node_commands import CALL_TIMEOUT, CallFailed, call
from kvrelay.router.console.snapshot import Percentiles, Snapshot
from kvrelay.router.recent_requests import EndedRequest
from kvrelay.router.state import NodeStatus
from kvrelay.wire.errors import ConfigError

__all__ = ["drawn", "run"]

_MOST_REQUESTS = 10
_MOST_CHANGES = 3
_SPARKS = " ▁▂▃▄▅▆▇█"
_SPARK_CELLS = 40
_BAR_CELLS = 12
_PIPE_CELLS = 200
"""A pipe has no width: all columns are written."""
_SNAPSHOT = msgspec.json.Decoder(Snapshot)


def run(router: str, admin_key: str, interval_s: float, console: Console) -> int:
    """Show the cluster until Ctrl-C, or once if the output is no terminal.

    Raises ConfigError, and CallFailed at the first look.
    """
    if not 0.1 <= interval_s <= 3600:
        raise ConfigError(f"--interval must be between 0.1 and 3600 seconds, got {interval_s:g}")
    return asyncio.run(_top(router, admin_key, interval_s, console))


async def _top(router: str, admin_key: str, interval_s: float, console: Console) -> int:
    async with aiohttp.ClientSession(timeout=CALL_TIMEOUT) as session:
        snapshot = await _look(session, router, admin_key)
        if not console.is_terminal:
            console.print(drawn(snapshot), width=max(console.width, _PIPE_CELLS))
            return 0
        lost = ""
        with Live(drawn(snapshot), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                try:
                    snapshot, lost = await _look(session, router, admin_key), ""
                except CallFailed as why:
                    lost = f"{why.message}; what is shown is {time.time() - snapshot.now:.0f} s old"
                live.update(drawn(snapshot, lost), refresh=True)


async def _look(session: aiohttp.ClientSession, router: str, admin_key: str) -> Snapshot:
    said = await call(session, "GET", f"{router}/console/state", admin_key)
    try:
        return _SNAPSHOT.decode(said)
    except msgspec.DecodeError as why:
        raise CallFailed(f"{router} does not answer like a kvrelay router") from why


def drawn(snapshot: Snapshot, lost: str = "") -> RenderableType:
    """Return the snapshot for a terminal; `lost` says why there is no newer one."""
    parts: list[RenderableType] = [_head(snapshot)]
    if lost:
        parts.append(Text(lost, style="red"))
    parts += [Text(), _nodes(snapshot)]
    if snapshot.edges:
        parts += [Text(), _edges(snapshot)]
    parts += [
        Text(f"{_short(pair.prefill)} -> {_short(pair.decode)}: {pair.reason}", style="red")
        for pair in snapshot.failed_pairs
    ]
    for of_model in snapshot.roles:
        parts += [Text(), Text(f"roles of {of_model.model}: {of_model.why}")]
        parts += [
            Text(
                f"  {snapshot.now - each.at:.0f} s ago, {_short(each.node)} to {each.role}: "
                f"{each.outcome}"
            )
            for each in of_model.changes[:_MOST_CHANGES]
        ]
    parts += [Text(), _requests(snapshot.requests[:_MOST_REQUESTS])]
    return Group(*parts)


def _head(snapshot: Snapshot) -> RenderableType:
    style = {"ok": "bold green", "degraded": "bold yellow"}.get(snapshot.health, "bold red")
    first = Text.assemble("kvrelay ", (snapshot.health.value, style))
    first.append(
        f"  {snapshot.running} running, {snapshot.waiting} waiting, {snapshot.waiting_for_room} for "
        f"KV room"
    )
    if snapshot.wanted > 1:
        silent = snapshot.wanted - len(snapshot.workers)
        of_all = f"  {len(snapshot.workers)} of {snapshot.wanted} router processes"
        first.append(of_all, style="bold red" if silent else "")
    lines = [
        first,
        Text(f"{snapshot.requests_per_s:8.1f} requests/s  {_sparks(snapshot.series.ended[:-1])}"),
        Text(
            f"{snapshot.output_tokens_per_s:8.1f} tokens/s    "
            f"{_sparks(snapshot.series.output_tokens[:-1])}"
        ),
    ]
    table = _Fitting(("", ">p50", ">p90", ">p99"))
    for name, figures in (
        ("first token", snapshot.ttft),
        ("between", snapshot.inter_token),
        ("total", snapshot.total),
    ):
        table.add(name, *map(_time, _percentiles(figures)))
    return Group(*lines, table)


def _percentiles(figures: Percentiles) -> tuple[float | None, float | None, float | None]:
    return figures.p50_s, figures.p90_s, figures.p99_s


def _nodes(snapshot: Snapshot) -> RenderableType:
    broken = any(
        each.state != "closed" for node in snapshot.nodes for each in node.breakers.values()
    )
    table = _Fitting(
        (
            "node",
            "role",
            "state",
            ">run",
            ">wait",
            ">streams",
            ">depth",
            "KV in use",
            ">held",
            "breakers",
        ),
        ("held", "depth", "streams", "KV in use")
        if broken
        else ("held", "breakers", "depth", "streams", "KV in use"),
    )
    for node in sorted(snapshot.nodes, key=lambda node: (node.role != "prefill", node.url)):
        table.add(
            _short(node.url),
            node.role,
            _state(node, len(snapshot.workers)),
            str(node.running),
            str(node.waiting),
            str(node.legs),
            f"{node.queue_depth:.1f}",
            _kv(node),
            str(node.held_blocks),
            _breakers(node),
        )
    return table


def _state(node: NodeStatus, workers: int) -> Text:
    if node.up:
        return Text(
            "up" if node.up_in == workers else f"up in {node.up_in} of {workers}", style="green"
        )
    if node.flips_to:
        return Text(f"flips to {node.flips_to}", style="yellow")
    return (
        Text("draining", style="yellow")
        if node.draining
        else Text(node.reason, style="red", overflow="ellipsis")
    )


def _kv(node: NodeStatus) -> Text:
    if not node.total_blocks:
        return Text("-")
    share = 1 - node.free_blocks / node.total_blocks
    full = round(share * _BAR_CELLS)
    style = "yellow" if share >= 0.95 else "blue"
    return Text.assemble(
        ("█" * full, style), ("░" * (_BAR_CELLS - full), "dim"), f" {share * 100:3.0f} %"
    )


def _breakers(node: NodeStatus) -> Text:
    bad = [f"{leg} {each.state}" for leg, each in node.breakers.items() if each.state != "closed"]
    return Text(", ".join(bad), style="red") if bad else Text("closed", style="dim")


def _edges(snapshot: Snapshot) -> RenderableType:
    table = _Fitting(("from", "to", ">hand-overs/min", ">MB/s", ">fetch", ">exposed"))
    for edge in snapshot.edges[:_MOST_REQUESTS]:
        known = edge.bytes > 0
        table.add(
            _short(edge.prefill),
            _short(edge.decode),
            f"{edge.handovers * 60 / snapshot.edge_window_s:.1f}",
            f"{edge.bytes / snapshot.edge_window_s / 1e6:.2f}" if known else "-",
            _time(edge.transfer_s / edge.fetches if known else None),
            _time(edge.exposed_s / edge.fetches if known else None),
        )
    return table


def _requests(requests: Iterable[EndedRequest]) -> RenderableType:
    times = (">first token", ">between", ">queue", ">prefill", ">hand-over", ">decode", ">total")
    table = _Fitting(
        ("request", ">status", ">in", ">out", *times),
        ("queue", "decode", "hand-over", "prefill", "in", "between"),
    )
    for each in requests:
        stages = each.stages_s
        after = [stages[name] for name in ("announce", "exposed", "decode_queue") if name in stages]
        table.add(
            each.id[:24],
            Text(
                "left" if each.status == 499 else str(each.status),
                style="red" if each.status >= 500 else "",
            ),
            "-" if each.prompt_tokens is None else str(each.prompt_tokens),
            str(each.output_tokens),
            _time(each.ttft_s),
            _time(each.inter_token_s),
            _time(stages.get("queue")),
            _time(stages.get("prefill")),
            _time(sum(after) if after else None),
            _time(stages.get("decode")),
            _time(stages.get("total")),
        )
    return table


@dataclass(slots=True)
class _Fitting:
    names: Sequence[str]
    spare: Sequence[str] = ()
    _rows: list[tuple[str | Text, ...]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self.spare) + 1):
            table = self._without(self.spare[:count])
            if (
                Measurement.get(console, options.update(width=_PIPE_CELLS), table).maximum
                <= options.max_width
            ):
                break
        yield table

    def _without(self, left_out: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        kept = [at for at, name in enumerate(self.names) if name.lstrip(">") not in left_out]
        for name in (self.names[at] for at in kept):
            is_figure = name.startswith(">")
            table.add_column(
                name.lstrip(">"), justify="right" if is_figure else "left", no_wrap=True
            )
        for row in self._rows:
            table.add_row(
                *(Text(cell) if isinstance(cell := row[at], str) else cell for at in kept)
            )
        return table


def _sparks(values: list[int]) -> str:
    most = max(*values, 1)
    return "".join(
        _SPARKS[math.ceil(value * (len(_SPARKS) - 1) / most)] for value in values[-_SPARK_CELLS:]
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _short(url: str) -> str:
    return url.partition("://")[2]
