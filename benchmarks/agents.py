"""The public case of llm-d, 24 conversations on 2P4D, and what its prompts find in caches.

    python -m benchmarks.agents                 simulated, H200s, without and with pulls
    python -m benchmarks.agents --real          on this machine: tiny nodes, a hundredth of the lengths

Conversations have a system prompt of 10,000 to 100,000 tokens each, 4 to 40 turns and gaps of 1 to
20 s. Possible is what an infinite cache would have had, by the hit ladder: the whole blocks of a
prompt that a node has had. `kvrelay replay` does the same for a trace.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.local_cluster import running
from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import inspect_server
from kvrelay.load.measures import percentile, ttft_ms
from kvrelay.load.sender import Load, send_load
from kvrelay.load.workloads import Arrival, Work, agents_of, sessions
from kvrelay.planner.rate_card import read_card
from kvrelay.planner.sessions import streams_of_sessions
from kvrelay.planner.setting import NETWORK_MS, Setting
from kvrelay.planner.world import simulate
from kvrelay.wire.ladder import RUNGS

__all__ = ["main"]

_CARD = Path(__file__).parent / "rate_cards" / "h200-llama-3.1-8b.json"
_CLIENTS, _NODES = 24, (2, 4)
_METRIC = "kvrelay_router_prompt_tokens"
_SMALL = "llm-d,system=100:1000,prompt=5:40,output=4:20,turns=4:12"


def simulated(spec: str, *, pulls: bool) -> str:
    drawn = islice(sessions(Work(agents=agents_of(spec)), Arrival(), "llm-d"), _CLIENTS)
    card = read_card(_CARD)
    size = card.block_size
    streams = streams_of_sessions([*drawn], _CLIENTS, size)
    result = simulate(streams, Setting("price", *_NODES, block_size=size, pulls=pulls, card=card))
    assert all(stream.answered for stream in streams)
    later = sorted(stream.ttft + NETWORK_MS for stream in streams if stream.gap)
    rungs = {rung: f"{tokens:,}" for rung, tokens in result.rungs.items() if tokens}
    return _row(f"simulated, pulls {'on' if pulls else 'off'}", result.found, later, f"{rungs}")


def _row(name: str, found: float, later: Sequence[float], more: str) -> str:
    times = " / ".join(f"{percentile(later, share):.1f}" for share in (0.5, 0.99))
    return f"| {name} | {len(later)} | {found:.2%} | {times} | {more} |"


async def measured(url: str, spec: str, name: str) -> str:
    config = BenchConfig(url, endpoint="chat", agents=spec, concurrency=_CLIENTS)
    server = await inspect_server(url, "", "", chat=True)
    load = Load(config.work, config.arrival(0.0), "llm-d", _CLIENTS, _CLIENTS)
    before = _rungs(url)
    records = (await send_load(config, server, load)).records
    assert not any(record.failure for record in records)
    rungs = _rungs(url) - before
    possible, found = rungs.total() - rungs["new"], sum(rungs[rung] for rung in RUNGS[:4])
    later = sorted(ttft_ms(record) for record in records if record.turn)
    return _row(name, found / possible, later, f"{found:,} of {possible:,}: {dict(rungs)}")


def _rungs(url: str) -> Counter[str]:
    with urlopen(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = next(each.samples for each in families if each.name == _METRIC)
    return Counter({each.labels["rung"]: int(each.value) for each in samples})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.agents", description=__doc__.partition("\n")[0])
    parser.add_argument("--real", action="store_true", help="a cluster of this machine's CPU")
    parser.add_argument("--agents", help="other sessions, as for kvrelay bench")
    arguments = parser.parse_args(argv)
    print(
        "| cluster | later turns | of possible | TTFT p50 / p99, ms | tokens |\n|---|---|---|---|---|"
    )
    for pulls in (False, True):
        if not arguments.real:
            print(simulated(arguments.agents or "llm-d", pulls=pulls), flush=True)
            continue
        prefill, decode = (f"{count}" for count in _NODES)
        words = f"--prefill {prefill} --decode {decode} --kv-pull "
        words += "auto" if pulls else "never"
        with running("up", *words.split()) as (url, _):
            name = f"real, pulls {'on' if pulls else 'off'}"
            print(asyncio.run(measured(url, arguments.agents or _SMALL, name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
