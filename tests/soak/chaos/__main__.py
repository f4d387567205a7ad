"""Strike a cluster that streams hundreds of answers with faults at random.

    python -m tests.soak.chaos --streams 200 --seconds 300 --seed 1

Starts prefill and decode nodes and a router on this machine, asks requests of many kinds, and then
asks them again (each answer must equal its undisturbed twin), as many at a time as --streams says,
while processes are killed, stopped and restarted, networks are cut, lose and delay, logs are not
read, clocks jump, and clients leave, read slowly or ask for too much; a supervisor starts what has
ended. Prints a report as JSON. Exits with 1 if a promise is broken, and leaves the logs. The same
options and seed draw the same faults again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from tests.soak.chaos.asks import CONTEXT
from tests.soak.chaos.faults import KINDS
from tests.soak.chaos.run import run
from tests.soak.report import reported


def main(argv: Sequence[str], about: str | None = __doc__) -> int:
    """`about`: the text of --help."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prefill", type=int, default=2)
    add("--decode", type=int, default=3)
    add("--streams", type=int, default=200, help="requests under way at any moment")
    add("--seconds", type=float, default=300.0, help="of faults")
    add("--each-once", action="store_true", help="each kind of fault once")
    add("--rolling", action="store_true", help="restart every node once, and nothing else")
    add("--from", dest="commit", default="", help="the code that nodes begin with")
    add("--every-s", type=float, default=6.0, help="between two faults, in the mean")
    add("--kind", action="append", default=[], choices=list(KINDS), help="only these faults")
    add("--seed", type=int, default=0)
    add("--pool-mib", type=int, default=8, help="KV of each node: so little is full at times")
    add("--per-kind", type=int, default=6, help="different requests of each kind")
    add("--longest", type=int, default=3000, help="tokens of the longest prompt, about")
    options = parser.parse_args(argv)
    if options.longest > CONTEXT - 600:
        parser.error(f"--longest must leave room for the answer in a context of {CONTEXT}")
    return reported("chaos", lambda folder: asyncio.run(run(options, folder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
