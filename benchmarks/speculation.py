"""What speculation gains on this device if a share of its proposals comes true, and what it costs if none does.

    python -m benchmarks.speculation [--model PATH] [--load-format dummy] [--tokens 4] [--batch-invariant]

Random weights repeat nothing, so the answers are generated once without proposals, and then again with proposals made
of them: each proposed token is the right one with a given probability. Tokens per second of all requests, and tokens
that a request gets per step; medians would say nothing, as each row is one long run. Outside of batch-invariant mode a
near-tie may lead a second run elsewhere; from there on that request has no proposals that come true.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paged_engine.draft_pace import DraftPace
from paged_engine.engine import Engine
from paged_engine.request import Request
from wire.config import EngineConfig, SpeculativeConfig
from wire.engine_messages import Submit
from wire.sampling import SamplingParams

PROMPT_TOKENS, MAX_TOKENS = 256, 200
BATCHES = (1, 8, 32)
AGREES = (1.0, 0.7, 0.0)


class Foresight:
    """In place of a request's n-gram index: proposes what another run of the request has said, or nothing."""

    def __init__(self, text: Sequence[int], agrees: float, rng: random.Random) -> None:
        self._text, self._agrees, self._rng = text, agrees, rng

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See NgramIndex."""
        ahead = self._text[len(tokens) : len(tokens) + count]
        return [token if self._rng.random() < self._agrees else token + 1 for token in ahead]


def answer(engine: Engine, batch: int, texts: Sequence[Sequence[int]] | None, agrees: float) -> list[Request]:
    """`batch` requests to their end; `texts` are what they say in all."""
    rng, requests = random.Random(batch), []
    for at in range(batch):
        prompt = [rng.randrange(3, engine.model.vocab_size - 1) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(MAX_TOKENS, seed=at, temperature=0.0, ignore_eos=True)
        request = Request.of(Submit(f"{time.monotonic_ns()}-{at}", prompt, params), time.monotonic())
        request.lookup = Foresight(() if texts is None else texts[at], agrees, random.Random(at))  # type: ignore[assignment]
        request.draft_pace = DraftPace(engine.scheduler.speculation.tokens)
        engine.scheduler.add(request)
        requests.append(request)
    while any(request.output_tokens < 3 for request in requests):
        engine.step()
    return requests


def row(
    engine: Engine, batch: int, texts: Sequence[Sequence[int]] | None, agrees: float
) -> tuple[str, list[list[int]]]:
    """One line, and what was said."""
    requests = answer(engine, batch, texts, agrees)
    tokens, steps, began = engine.counters.generated_tokens, engine.counters.steps, time.perf_counter()
    while engine.has_work:
        engine.step()
    took = time.perf_counter() - began
    tokens, steps = engine.counters.generated_tokens - tokens, engine.counters.steps - steps
    line = (
        f"{tokens / took:10.0f} tok/s {took / steps * 1e3:8.3f} ms a step {tokens / steps / batch:7.2f} tokens a step"
    )
    return line, [list(request.token_ids) for request in requests]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "models" / "llama-3.1-8b.json"))
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--batch-invariant", action="store_true", help="all proposals that are right come true")
    args = parser.parse_args()
    engine = Engine(
        EngineConfig(
            model=args.model,
            load_format=args.load_format,
            max_model_len=1024,
            enable_prefix_caching=False,
            speculative_config=SpeculativeConfig(args.tokens) if args.tokens else None,
            batch_invariant=args.batch_invariant,
        )
    )
    for batch in BATCHES:
        answer(engine, batch, None, 0.0)
        while engine.has_work:
            engine.step()
        line, texts = row(engine, batch, None, 0.0)
        print(f"{batch:3} requests, no proposals         {line}", flush=True)
        for agrees in AGREES:
            line, _ = row(engine, batch, texts, agrees)
            print(f"{batch:3} requests, {agrees:4.0%} of them come true {line}", flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
