"""Strike a cluster that streams hundreds of answers with faults at random.

    python -m tests.soak.chaos --streams 200 --seconds 300 --seed 1
    python -m tests.soak.chaos --streams 200 --faults 1000   # until so many faults have happened
    python -m tests.soak.chaos --schedule FILE               # what a run has recorded, again

Starts prefill and decode nodes and a router on this machine, asks requests of many kinds, and then
asks them again (each answer must equal its undisturbed twin), as many at a time as --streams says,
while processes are killed, stopped and restarted, networks are cut, lose and delay, logs are not
read, clocks jump, and clients leave, read slowly, send nonsense or too much; a supervisor starts
what has ended. Exits with 1 if a promise is broken, and leaves the logs.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.soak.chaos.faults import KINDS, Fault, Schedule
from tests.soak.chaos.model import CONTEXT
from tests.soak.chaos.report import print_table
from tests.soak.chaos.run import run


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    schedule = None
    if options.schedule is not None:
        schedule = Schedule.read(options.schedule)
        for name, value in schedule.options.items():
            setattr(options, name, value)
    if options.longest > CONTEXT - 600:
        parser.error(f"--longest must leave room for the answer in a context of {CONTEXT}")
    folder, made = Path(tempfile.mkdtemp(prefix="chaos-")), list[Fault]()
    kept, broken = True, True
    try:
        result = asyncio.run(run(options, folder, schedule, made))
        broken = bool(result.verdict.broken)
        print_table(options, result)
        if options.json is not None:
            happened = {each.fault.kind for each in result.cluster.struck if not each.missed}
            told = {"preemptions": result.rude.preemptions, "happened": sorted(happened)}
            verdict = msgspec.to_builtins(result.verdict)
            options.json.write_bytes(msgspec.json.encode(verdict | told))
        kept = broken
    finally:
        print(f"again: python -m tests.soak.chaos --schedule {_recorded(options, made)}")
        if kept:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder)
    return int(broken)


def _recorded(options: argparse.Namespace, made: list[Fault]) -> Path:
    file: Path = (
        options.record
        or options.schedule
        or Path(tempfile.gettempdir()) / f"chaos-{options.seed}.schedule.json"
    )
    if file != options.schedule:
        told = {
            name: value
            for name, value in vars(options).items()
            if name not in ("json", "schedule", "record")
        }
        Schedule(options.seed, told, made).write(file)
    return file


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--streams", type=int, default=200, help="requests under way at any moment")
    parser.add_argument("--seconds", type=float, default=300.0, help="of faults")
    parser.add_argument("--faults", type=int, default=0, help="so many, however long it takes")
    parser.add_argument("--each-once", action="store_true", help="each kind of fault once")
    parser.add_argument(
        "--every-s", type=float, default=6.0, help="between two faults, in the mean"
    )
    parser.add_argument(
        "--kind", action="append", default=[], choices=list(KINDS), help="only these faults"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--schedule", type=Path, help="the faults and options of this file, which a run has written"
    )
    parser.add_argument(
        "--record", type=Path, help="write the schedule there; else to a file of the seed's name"
    )
    parser.add_argument(
        "--model", default="tiny", help="tiny, embedded, or what kvrelay's --model takes"
    )
    parser.add_argument(
        "--pool-mib",
        type=int,
        default=8,
        help="KV of each node: little, so that it is full at times",
    )
    parser.add_argument("--per-kind", type=int, default=6, help="different requests of each kind")
    parser.add_argument(
        "--longest", type=int, default=3000, help="tokens of a long prompt of the tiny model, about"
    )
    parser.add_argument("--json", type=Path, help="write the verdict there, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
