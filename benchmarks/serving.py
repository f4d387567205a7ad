"""Speed of a served model with random weights, as clients see it: one node, or a cluster behind its router.

    python -m benchmarks.serving serve 1024:128:1:4 1024:128:32:64
    python -m benchmarks.serving up 4096:128:1:8 4096:128:32:96 1024:384:16:16+4096:2:2:40

The first word is kvrelay's command; `--flag=--decode=2` and the like go to it. A row is in:out:clients:requests; with
a plus, the load behind it runs beside the first one, whose figures alone are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.local_cluster import running
from benchmarks.token_load import Load, Report, measure

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b.json"


WIDTH = 2 + max(map(len, Report.__dataclass_fields__))


def main() -> int:
    """Command line. Exit code 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("serve", "up"))
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--model", default=str(MODEL), help="a config.json")
    parser.add_argument("--flag", action="append", default=[], help="of kvrelay")
    parser.add_argument("--row-s", type=float, default=60.0, help="after that a row is cut")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    rows = [[Load.parse(text) for text in row.split("+")] for row in args.rows]
    vocab_size = json.loads(Path(args.model).read_text(encoding="utf-8"))["vocab_size"]
    flags = [f"--model={Path(args.model).resolve()}", "--load-format=dummy", "--no-prefix-cache", *args.flag]
    reports: dict[str, dict[str, Any]] = {}
    print(f"{'':26}" + "".join(f"{name:>{WIDTH}}" for name in Report.__dataclass_fields__))
    with running(args.command, *flags) as url:
        with urlopen(f"{url}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        for number, loads in enumerate(rows):
            # Not measured: connections, and the buffers of a hand-over between this pair of nodes.
            measure(url, model, vocab_size, [Load(loads[0].prompt_tokens, 4, 2, 4)], 1000 + number, args.row_s)
            seen = measure(url, model, vocab_size, loads, number, args.row_s)
            report, name = Report.of(loads[0], seen[0]), " + ".join(map(str, loads))
            reports[name] = asdict(report)
            print(f"{name:26}" + "".join(f"{value:{WIDTH}.2f}" for value in reports[name].values()), flush=True)
            for request in [request for of_load in seen for request in of_load if request.error][:2]:
                print(f"  failed: {request.error}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(reports, indent=2), encoding="utf-8")
    return 1 if any(report["failed"] for report in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
