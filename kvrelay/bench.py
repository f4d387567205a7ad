"""`kvrelay bench`: the progress, the table and the result of a load (kvrelay.load)."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import Experiment
from kvrelay.load.measures import server_failures
from kvrelay.load.results import (
    COLUMNS,
    Provenance,
    Result,
    sessions_line,
    table_row,
    warnings_of,
    write_result,
)
from kvrelay.load.sender import Progress
from kvrelay.settings import Values, build
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.versions import RELEASE

__all__ = ["result_of", "run"]


def run(values: Values, console: Console) -> int:
    """Run the command and return 1 if a request failed. Raises ConfigError, KvrelayError."""
    config = build(BenchConfig, values)
    path = Path(config.output)
    if path.suffix != ".json":
        raise ConfigError(f"output {config.output!r} must end with .json")
    if not config.seed:  # no server has seen these prompts
        config = replace(config, seed=time.time_ns() // 1_000_000)
    status, began = console.status("asking the server"), datetime.datetime.now(datetime.UTC)

    def update(name: str, progress: Progress) -> None:
        failed = f", [red]{progress.failed} failed[/]" if progress.failed else ""
        status.update(f"{name}: {progress.done} of {progress.sent} answered{failed}")

    experiment = Experiment(config, update)
    try:
        with status:
            uvloop.run(experiment.run())
    finally:  # what was measured is kept, whatever ended the rest
        if experiment.runs:
            result = result_of(config, experiment, began)
            write_result(result, path)
            _show(result, console)
            console.print(f"[dim]{path} is written[/]")
    return int(any(server_failures(each.measures) for each in experiment.runs))


def result_of(config: BenchConfig, experiment: Experiment, began: datetime.datetime) -> Result:
    server = experiment.server
    assert server is not None
    return Result(
        model=server.model,
        url=config.url,
        gpus=config.gpus,
        work=config.work,
        targets=config.targets,
        attainment=config.attainment,
        made=Provenance(
            _command(),
            began.isoformat(timespec="seconds"),
            f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            _versions(server.version),
            config.seed,
        ),
        runs=experiment.runs,
        found=experiment.found,
        endpoint=config.endpoint,
    )


def _command() -> str:
    words, hidden = ["kvrelay", *sys.argv[1:]], "--api-key"
    shown = ["***" if at and words[at - 1] == hidden else word for at, word in enumerate(words)]
    return shlex.join(
        [f"{hidden}=***" if word.startswith(f"{hidden}=") else word for word in shown]
    )


def _versions(server: str) -> dict[str, str]:
    return {
        "kvrelay": RELEASE,
        "python": platform.python_version(),
        "uvloop": importlib.metadata.version("uvloop"),
        "server": server,
    }


def _show(result: Result, console: Console) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for each in sorted(result.runs, key=lambda run: (run.concurrency, run.offered)):
        table.add_row(*table_row(result, each))
    console.print(table)
    failures = [example for run in result.runs for example in run.measures.examples]
    for run in result.runs:
        if run.measures.later_ttft_ms is not None:
            console.print(sessions_line(result, run))
    for line in (*warnings_of(result), *failures):
        console.print(Text(line, style="red"))
    if result.found is not None:
        console.print(_search_line(result))


def _search_line(result: Result) -> Text:
    found = result.found
    assert found is not None
    why = f" ({found.why})" if found.why else ""
    unit = "sessions" if result.work.agents else "requests/s"
    if not found.holds:
        return Text(f"{result.model}: none held{why}", style="red")
    broke = f"; {found.breaks:.3g} did not" if found.breaks is not None else ""
    return Text(
        f"{result.model}: {found.holds:.3g} {unit} held, {found.holds / result.gpus:.3g} per "
        f"GPU, at {result.attainment:.0%} attainment{broke}{why}"
    )
