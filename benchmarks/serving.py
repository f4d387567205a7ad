"""Speed of a served model with random weights, as clients see it: one node, or a cluster behind its
router.

    python -m benchmarks.serving serve 1024:128:1:4 1024:128:32:64
    python -m benchmarks.serving up 4096:128:1:8 4096:128:32:96 1024:384:16:16+4096:2:2:40

The first word is kvrelay's command; `--flag=--decode=2` and the like go to it. A row is
in:out:clients:requests; with a plus, the load behind it runs beside the first one, whose figures
alone are printed. Any other server is measured by `kvrelay bench`, whose client this is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import uvloop

from benchmarks.local_cluster import running
from kvrelay.load.measures import Record, Slo, Window, client_health, measures_of, percentile
from kvrelay.load.sender import Endpoint, Load, Outcome, send_load
from kvrelay.load.workloads import Arrival, Spelling, Work

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b.json"
_LAST_TOKENS = 1000
"""At the end of a vocabulary, where special tokens are: no prompt has them."""


@dataclass(frozen=True, slots=True)
class Row:
    """`clients` of them keep asking until all `requests` have been asked."""

    prompt_tokens: int
    output_tokens: int
    clients: int
    requests: int

    @classmethod
    def parse(cls, text: str) -> Row:
        """Of `in:out:clients:requests`. Raises ValueError."""
        numbers = [int(part) for part in text.split(":")]
        if len(numbers) != len(fields(cls)) or min(numbers) < 1:
            raise ValueError(
                f"a load is in:out:clients:requests, all of them at least 1, got {text!r}"
            )
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.prompt_tokens}:{self.output_tokens}:{self.clients}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests of a load. Milliseconds, but for the rates."""

    done: int
    failed: int
    tokens_per_s: float
    requests_per_s: float
    ttft_p50: float
    ttft_p99: float
    second_token: float
    """Median from the first token to the second: in a cluster, what the hand-over has added to one
    step.
    """
    tpot_p50: float
    itl_p50: float
    itl_p99: float

    @classmethod
    def of(cls, records: list[Record]) -> Figures:
        """All times of those that were answered."""
        window = Window(0.0, max(max(record.sent_s, record.last_s) for record in records) + 1e-6)
        client = client_health(records, 0.0, [], open_loop=False)
        found = measures_of(records, window, Slo(float("inf"), float("inf")), 1, client)
        second = [
            record.gaps_s[0] * 1e3 for record in records if record.gaps_s and not record.failure
        ]
        return cls(
            found.answered,
            len(records) - found.answered,
            found.output_tokens_per_s,
            found.achieved_per_s,
            found.ttft_ms.p50,
            found.ttft_ms.p99,
            percentile(second, 0.5),
            found.tpot_ms.p50,
            found.itl_ms.p50,
            found.itl_ms.p99,
        )


def measure(
    url: str, model: str, vocab_size: int, rows: list[Row], seed: int, within_s: float
) -> list[Outcome]:
    """Run the loads at the same time; after `within_s` whatever still runs is cut."""
    endpoint = Endpoint([url], "", model, False, Spelling(), vocab_size - _LAST_TOKENS)

    async def all_of_them() -> list[Outcome]:
        loads = [
            Load(
                Work(row.prompt_tokens, row.output_tokens),
                Arrival(),
                f"{seed} {at}",
                row.clients,
                row.requests,
                sending_s=within_s,
                drain_s=0.0,
            )
            for at, row in enumerate(rows)
        ]
        return await asyncio.gather(*(send_load(endpoint, load) for load in loads))

    return uvloop.run(all_of_them())


WIDTH = 2 + max(map(len, Figures.__dataclass_fields__))


def main() -> int:
    """Command line. Exit code 1 if a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("serve", "up"))
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--model", default=str(MODEL), help="a config.json")
    parser.add_argument("--flag", action="append", default=[], help="of kvrelay")
    parser.add_argument("--row-s", type=float, default=60.0, help="after that a row is cut")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    rows = [[Row.parse(text) for text in row.split("+")] for row in args.rows]
    vocab_size = json.loads(Path(args.model).read_text(encoding="utf-8"))["vocab_size"]
    flags = [
        f"--model={Path(args.model).resolve()}",
        "--load-format=dummy",
        "--no-enable-prefix-caching",
        *args.flag,
    ]
    told: dict[str, dict[str, Any]] = {}
    failed: list[Record] = []
    print(f"{'':26}" + "".join(f"{name:>{WIDTH}}" for name in Figures.__dataclass_fields__))
    with running(args.command, *flags) as (url, _):
        with urlopen(f"{url}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        for number, loads in enumerate(rows):
            # Not measured: connections, and the buffers of a hand-over between this pair of nodes.
            measure(
                url,
                model,
                vocab_size,
                [Row(loads[0].prompt_tokens, 4, 2, 4)],
                1000 + number,
                args.row_s,
            )
            seen = measure(url, model, vocab_size, loads, number, args.row_s)
            name = " + ".join(map(str, loads))
            told[name] = asdict(Figures.of(seen[0].records))
            print(
                f"{name:26}" + "".join(f"{value:{WIDTH}.2f}" for value in told[name].values()),
                flush=True,
            )
            wrong = [record for one in seen for record in one.records if record.failure]
            failed += wrong
            for record in wrong[:2]:
                print(f"  failed: {record.failure}: {record.why}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=2), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
