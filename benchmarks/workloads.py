"""Workloads with varying lengths and shared prefixes, drawn by a seed, for simulate.py. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvrelay.load.workloads import Asked
from kvrelay.planner.setting import Stream, at_load
from kvrelay.planner.speeds import H200, Speeds

__all__ = ["BLOCK_TOKENS", "WORKLOADS", "Workload", "streams_of"]

BLOCK_TOKENS = 128
"""Tokens of a named block."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload; `make(rng, count)` returns requests in the order of their arrival."""

    make: Callable[[random.Random, int], list[Asked]]
    load: float
    """Share of the prefill nodes' time, as if nothing was cached."""


def _lognormal(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return int(min(most, max(least, rng.lognormvariate(math.log(median), sigma))))


def _output(rng: random.Random, median: float) -> int:
    return _lognormal(rng, median, 0.8, 2, 2_000)


def _poisson(rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(1.0)
        yield now


def _names() -> Callable[[int], tuple[int, ...]]:
    numbers = itertools.count(1 << 40)
    return lambda tokens: tuple(itertools.islice(numbers, tokens // BLOCK_TOKENS))


def _requests(
    rng: random.Random,
    count: int,
    prompt: Callable[[], int],
    output: float,
    shared: Sequence[int] = (),
) -> list[Asked]:
    # `shared`: tokens of prefixes, which are the more popular the earlier they stand.
    name = _names()
    heads = [(name(tokens), tokens) for tokens in shared] or [((), 0)]
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(shared))))
    asks = []
    for at in itertools.islice(_poisson(rng), count):
        blocks, before = rng.choices(heads, cum_weights=weights)[0] if shared else heads[0]
        tokens = prompt()
        blocks += name(tokens + before % BLOCK_TOKENS)
        answer = _output(rng, output)
        asks.append(Asked(at, before + tokens, answer, blocks, session=f"user {rng.random()}"))
    return asks


def _chat(rng: random.Random, count: int) -> list[Asked]:
    shared = [rng.randrange(300, 3_000) for _ in range(30)]
    return _requests(rng, count, lambda: _lognormal(rng, 250, 0.9, 10, 8_000), 250, shared)


def _code(rng: random.Random, count: int) -> list[Asked]:
    shared = [rng.randrange(3_000, 16_000) for _ in range(150)]
    return _requests(rng, count, lambda: _lognormal(rng, 400, 0.7, 20, 6_000), 60, shared)


def _summarise(rng: random.Random, count: int) -> list[Asked]:
    return _requests(rng, count, lambda: _lognormal(rng, 6_000, 0.5, 1_000, 30_000), 200)


def _long_mix(rng: random.Random, count: int) -> list[Asked]:
    def prompt() -> int:
        if rng.random() < 0.03:
            return rng.randrange(32_000, 100_000)
        return _lognormal(rng, 600, 0.6, 50, 4_000)

    return _requests(rng, count, prompt, 200)


def _scale(rng: random.Random, count: int) -> list[Asked]:
    return [
        Asked(at, _lognormal(rng, 1_800, 1.0, 50, 30_000), _output(rng, 300))
        for at in itertools.islice(_poisson(rng), count)
    ]


def _sessions(rng: random.Random, count: int) -> list[Asked]:
    name = _names()
    asks: list[Asked] = []
    system = name(1_024)
    starts = _poisson(rng)
    turns_on_average = 6.0
    number = 0
    while len(asks) < count:
        at, number = next(starts) * turns_on_average, number + 1
        blocks, tokens = system, 1_024
        while True:
            asked = _lognormal(rng, 200, 1.0, 10, 6_000)
            blocks += name(tokens % BLOCK_TOKENS + asked)
            tokens += asked
            output = _output(rng, 250)
            asks.append(Asked(at, tokens, output, blocks, session=f"session {number}"))
            # The answer is computed where the client's next prompt does not look for it: on the
            # decode node.
            blocks += name(tokens % BLOCK_TOKENS + output)
            tokens += output
            # Thinking takes about as long as a hundredth of the run.
            at += count / 100 * rng.uniform(0.5, 1.5)
            if rng.random() < 1 / turns_on_average or tokens > 60_000:
                break
    asks.sort(key=lambda each: each.at)
    return asks[:count]


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        # 30 system prompts of 300 to 3,000 tokens, 250 of one's own
        "chat": Workload(_chat, 1.3),
        # 150 contexts of 3,000 to 16,000 tokens, 400 of one's own
        "code": Workload(_code, 3.0),
        # prompts of 6,000 tokens that share nothing
        "summarise": Workload(_summarise, 0.85),
        # 3 % prompts of 32,000 to 100,000 tokens among those of 600
        "long mix": Workload(_long_mix, 0.8),
        # conversations of six turns, each prompt all that was said
        "sessions": Workload(_sessions, 1.3),
        # prompts of 3,000 tokens on average that share nothing, answers of 400
        "scale": Workload(_scale, 0.85),
    }
)


def streams_of(
    name: str, count: int, prefill_nodes: int, seed: int, speeds: Speeds | None = None
) -> list[Stream]:
    """Return so many requests of a workload, at the rate that gives its load."""
    speeds, workload = speeds or Speeds(H200), WORKLOADS[name]
    asks = workload.make(random.Random(f"{name} {seed}"), count)
    return at_load(
        asks, sum(speeds.prompt_ms(each.prompt) for each in asks) / prefill_nodes / workload.load
    )
