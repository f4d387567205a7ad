"""kvrelay beside vLLM on the same GPUs, by vLLM's own client.

    python -m benchmarks.peer side --out FOLDER     # a node of each, side by side
    python -m benchmarks.peer goodput --out FOLDER  # two GPUs in four ways: requests in time
    python -m benchmarks.peer closed --out FOLDER   # 32 clients that never pause
    python -m benchmarks.peer table FOLDER          # what is there, again

What is in the folder is not measured again: run the same command until it ends with 0. README.md
says what is compared.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.peer.arms import ARMS, Arm, Setting
from benchmarks.peer.cells import (
    Batch,
    Cell,
    Row,
    batches,
    close_rows,
    needed_s,
    read_cells,
    write_cell,
)
from benchmarks.peer.client import Ask, ask
from benchmarks.peer.model import write_model
from benchmarks.peer.paced import SHAPE, Paced
from benchmarks.peer.servers import Servers
from benchmarks.peer.table import lines_of, tables
from benchmarks.peer.works import Load, closed, work_named
from kvrelay.wire.errors import ConfigError

_SHAPE = Path(__file__).parents[1] / "models" / "llama-3.1-8b.json"
_CLOSED_ROWS = {
    "side": ("1024:128:1", "1024:128:32", "1024:128:128", "4096:128:32", "128:512:256", "4096:1:8"),
    "closed": ("1024:128:32", "4096:128:32"),
}
_ARMS = {
    "side": "vllm,node",
    "goodput": "colocated,strict,cluster,told",
    "closed": "vllm-pair,colocated,strict,cluster",
}
_PROCESSES = {"side": 1, "goodput": 4, "closed": 2}
_BEFORE_S, _BEFORE_FACTOR = 15.0, 0.8


class _OutOfTime(Exception):
    """A row that would not end in time."""


class _Course:
    def __init__(
        self, asked: argparse.Namespace, servers: Servers, setting: Setting, scratch: Path
    ) -> None:
        self._asked, self._servers, self._setting, self._scratch = asked, servers, setting, scratch
        self._until = time.monotonic() + asked.for_s
        self._run = datetime.now(UTC).isoformat()
        self._scale: float = asked.scale if asked.paced else 1.0

    def run(self, rows: Sequence[Row]) -> None:
        """Measure all rows, then those again whose arms are close. Raises _OutOfTime, RuntimeError
        and ConfigError.
        """
        for row in rows:
            self._measure(row)
        for row in close_rows(rows, read_cells([self._asked.out]), self._asked.again_within):
            self._measure(row)

    def _measure(self, row: Row) -> None:
        loads = self._loads(row)
        done = read_cells([self._asked.out])
        arms = [
            arm
            for arm in self._asked.arms
            if (row, arm.name) not in done and can_ask(arm, loads[-1])
        ]
        order = batches(row, arms, self._servers.stage, at_once=self._asked.at_once)
        windows_s = self._scale * sum(load.window_s for load in loads)
        needed = needed_s(order, self._servers.stage, windows_s)
        if order and time.monotonic() + needed > self._until:
            raise _OutOfTime(
                f"{row.name} by {', '.join(arm.name for arm in arms)} takes about {needed:.0f} s "
                f"more"
            )
        for batch in order:
            self._batch(row, loads, batch)

    def _loads(self, row: Row) -> list[Load]:
        if not row.factor:
            return [closed(row.work)]
        asked = self._asked
        parts = [(row.after, _BEFORE_FACTOR, _BEFORE_S, 1)] if row.after else []
        return [
            work_named(name, asked.limit).load(
                factor, row.seed, seconds, least, asked.max_model_len, asked.trace
            )
            for name, factor, seconds, least in [
                *parts,
                (row.work, row.factor, asked.seconds, asked.requests),
            ]
        ]

    def _batch(self, row: Row, loads: Sequence[Load], batch: Batch) -> None:
        self._servers.have(batch.stage)
        left = iter(self._servers.urls)
        targets = loads[-1].targets
        told = targets.scaled(self._scale).flags if targets else []
        with ExitStack() as kept:
            urls = [
                kept.enter_context(
                    self._servers.behind_router(arm, [next(left) for _ in arm.servers], told)
                )
                for arm in batch.arms
            ]
            for load in loads:
                asks = [Ask(each, load) for each in urls]
                # Nodes that keep prefixes must not know the texts of the arm before.
                texts = zlib.crc32(f"{row.name} {batch.arms}".encode())
                if self._asked.paced:
                    found = self._asked.paced.ask(asks, texts)
                    continue
                found = ask(asks, self._asked.processes, texts, self._setting, self._scratch)
        self._servers.check()
        for arm, figures in zip(batch.arms, found, strict=True):
            write_cell(Cell(row, arm.name, self._run, figures), self._asked.out)
            print(f"{row.name} {arm.name}: {msgspec.json.encode(figures).decode()}", flush=True)


def can_ask(arm: Arm, load: Load) -> bool:
    """Tell whether the arm suits the load: a closed loop has no targets to tell."""
    return not arm.tells or load.targets is not None


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. Code 0: all is measured; 1: something failed; 2: wrong words; 3: run it
    again.
    """
    asked = _arguments(words)
    try:
        if asked.command == "table":
            print(tables(lines_of(read_cells(asked.folders).values())))
            return 0
        return _measured(asked)
    except (ConfigError, RuntimeError, TimeoutError) as why:
        print(f"error: {why or 'the client took too long'}", file=sys.stderr)
        return 1


def _measured(asked: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended
    asked.out.mkdir(parents=True, exist_ok=True)
    code = 0
    with tempfile.TemporaryDirectory(prefix="peer-") as name:
        scratch = Path(name)
        model, env, nodes_flags = asked.model, {}, asked.kvrelay_flag
        if asked.paced:
            model, asked.gpus = scratch / "shape.json", []
            model.write_bytes(msgspec.json.encode(SHAPE))
            env, nodes_flags = asked.paced.env, [*asked.paced.flags, *nodes_flags]
        write_model(model, scratch / "model")
        flags = tuple(asked.vllm_flag), tuple(nodes_flags)
        setting = Setting(scratch / "model", asked.vllm, asked.max_model_len, *flags, env)
        try:
            with Servers(setting, asked.gpus, asked.out / "logs") as servers:
                _Course(asked, servers, setting, scratch).run(asked.rows)
        except _OutOfTime as left:
            print(f"out of time: {left}; run it again", file=sys.stderr)
            code = 3
        finally:
            lines = lines_of(read_cells([asked.out]).values())
            (asked.out / "table.json").write_bytes(msgspec.json.format(msgspec.json.encode(lines)))
            print(tables(lines))
    return code


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("side", "goodput", "closed"):
        _add_common(commands.add_parser(name), name)
    table = commands.add_parser("table")
    table.add_argument("folders", nargs="+", type=Path)
    asked = parser.parse_args(words)
    if asked.command == "table":
        return asked
    try:
        asked.arms = [ARMS[name] for name in asked.arms.split(",")]
        asked.gpus = [gpu for gpu in asked.gpus.split(",") if gpu]
        asked.at_once = asked.command == "side" and len(asked.gpus) != 1
        asked.rows = _rows(asked)
        if asked.scale <= 0:
            raise ConfigError(f"--scale must be above 0, got {asked.scale:g}")
        if asked.paced:
            asked.paced = Paced(asked.paced, asked.scale)
            if vllm := [
                arm.name for arm in asked.arms if any("vllm" in kind for kind in arm.servers)
            ]:
                raise ConfigError(f"--paced is for arms of kvrelay; leave out {', '.join(vllm)}")
        counts = [len(arm.servers) for arm in asked.arms]
        most = sum(counts) if asked.at_once else max(counts)
        if asked.gpus and len(asked.gpus) < most:
            raise ConfigError(f"--gpus={','.join(asked.gpus)} are too few for {most} servers")
        if any(asked.processes % len(arm.servers) for arm in asked.arms if arm.router is None):
            raise ConfigError(
                "--processes must be a multiple of the servers that are asked in turn"
            )
    except KeyError as name:
        parser.error(f"there is no arm {name}; there are {', '.join(ARMS)}")
    except (ConfigError, ValueError) as why:
        parser.error(str(why))
    return asked


def _add_common(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--arms", default=_ARMS[name], help=f"some of {', '.join(ARMS)}")
    parser.add_argument(
        "--gpus", default="0,1", help="one for each server, in order; empty: as they come"
    )
    parser.add_argument(
        "--paced", type=Path, help="without GPUs: a rate card, whose times steps take; our client"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of all times, with --paced")
    parser.add_argument("--vllm", default="vllm", help="the command of vLLM's own environment")
    parser.add_argument("--vllm-flag", action="append", default=[], help="of each server of vLLM")
    parser.add_argument(
        "--kvrelay-flag", action="append", default=[], help="of each node of kvrelay"
    )
    parser.add_argument("--model", type=Path, default=_SHAPE, help="a config.json")
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument(
        "--processes", type=int, default=_PROCESSES[name], help="of the client, for each arm"
    )
    parser.add_argument(
        "--for-s", type=float, default=570.0, help="no row begins that would not end within it"
    )
    parser.set_defaults(again_within=-1.0)
    if name != "goodput":
        parser.add_argument(
            "--row", action="append", help=f"in:out:clients; {' '.join(_CLOSED_ROWS[name])}"
        )
        return
    parser.add_argument(
        "--work", action="append", help="chat, code, summarise, mix-A-B-C, burst-A-B-C or trace"
    )
    parser.add_argument("--factors", help="multiples of the work's rate, with commas")
    parser.add_argument(
        "--limit", action="append", default=[], help="WORK=RATE: requests a second at a factor of 1"
    )
    parser.add_argument(
        "--after", default="", help="a work that each new router sees before, for 15 s"
    )
    parser.add_argument(
        "--again-within", type=float, default=4.0, help="points; such rows are measured three times"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of each cell, at least")
    parser.add_argument(
        "--requests", type=int, help="of each cell, at least; 400, of summarise 150"
    )
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format")


def _rows(asked: argparse.Namespace) -> list[Row]:
    """List the rows that are asked for. Raises ConfigError and ValueError."""
    if asked.command != "goodput":
        texts = asked.row or _CLOSED_ROWS[asked.command]
        for text in texts:
            closed(text)
        return [Row(text) for text in texts]
    limits = (text.partition("=") for text in asked.limit)
    asked.limit = {work_named(name).name: float(rate) for name, _, rate in limits}
    works = [work_named(name) for name in asked.work or ("chat", "code", "summarise")]
    if asked.after:
        work_named(asked.after)
    factors = [float(factor) for factor in asked.factors.split(",")] if asked.factors else None
    return [
        Row(work.name, factor, after=asked.after)
        for work in works
        for factor in factors or work.factors
    ]


if __name__ == "__main__":
    sys.exit(main())
