"""Workloads with varying lengths and shared prefixes, drawn by a seed. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvrelay.load.workloads import Asked

__all__ = ["SCALE", "WORKLOADS", "Workload"]

_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload; `make(rng, count)` returns requests in the order of their arrival."""

    name: str
    says: str
    make: Callable[[random.Random, int], list[Asked]]
    load: float
    block_size: int = _BLOCK_TOKENS


class _Names:
    def __init__(self) -> None:
        self._next = 1 << 40

    def of(self, tokens: int) -> tuple[int, ...]:
        begin, self._next = self._next, self._next + tokens // _BLOCK_TOKENS
        return tuple(range(begin, self._next))


def _lognormal(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return int(min(most, max(least, rng.lognormvariate(math.log(median), sigma))))


def _poisson(rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(1.0)
        yield now


def _output(rng: random.Random, median: float, most: int = 2_000) -> int:
    return _lognormal(rng, median, 0.8, 2, most)


def _zipf(rng: random.Random, many: int) -> Callable[[], int]:
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(many)))
    return lambda: rng.choices(range(many), cum_weights=weights)[0]


def _behind(
    rng: random.Random, count: int, shared: Sequence[int], own: Callable[[], int], output: float
) -> list[Asked]:
    names, which = _Names(), _zipf(rng, len(shared))
    begin = [names.of(tokens) for tokens in shared]
    asks = []
    for at in itertools.islice(_poisson(rng), count):
        app, tokens = which(), own()
        head = begin[app]
        rest = tokens + shared[app] % _BLOCK_TOKENS
        asks.append(
            Asked(
                at,
                shared[app] + tokens,
                _output(rng, output),
                head + names.of(rest),
                session=f"user {rng.random()}",
            )
        )
    return asks


def _chat(rng: random.Random, count: int) -> list[Asked]:
    shared = [rng.randrange(300, 3_000) for _ in range(30)]
    return _behind(rng, count, shared, lambda: _lognormal(rng, 250, 0.9, 10, 8_000), 250)


def _code(rng: random.Random, count: int) -> list[Asked]:
    shared = [rng.randrange(3_000, 16_000) for _ in range(150)]
    return _behind(rng, count, shared, lambda: _lognormal(rng, 400, 0.7, 20, 6_000), 60)


def _alone(
    rng: random.Random, count: int, prompt: Callable[[], int], output: Callable[[], int]
) -> list[Asked]:
    names = _Names()
    asks = []
    for at in itertools.islice(_poisson(rng), count):
        tokens = prompt()
        asks.append(Asked(at, tokens, output(), names.of(tokens), session=f"user {rng.random()}"))
    return asks


def _summarise(rng: random.Random, count: int) -> list[Asked]:
    return _alone(
        rng, count, lambda: _lognormal(rng, 6_000, 0.5, 1_000, 30_000), lambda: _output(rng, 200)
    )


def _long_mix(rng: random.Random, count: int) -> list[Asked]:
    def prompt() -> int:
        return (
            rng.randrange(32_000, 100_000)
            if rng.random() < 0.03
            else _lognormal(rng, 600, 0.6, 50, 4_000)
        )

    return _alone(rng, count, prompt, lambda: _output(rng, 200))


def _heavy_tail(rng: random.Random, count: int) -> list[Asked]:
    return _alone(
        rng,
        count,
        lambda: min(100_000, int(300 * rng.paretovariate(1.1))),
        lambda: min(8_000, int(60 * rng.paretovariate(1.2))),
    )


def _bursty(rng: random.Random, count: int) -> list[Asked]:
    asks = _alone(
        rng, count, lambda: _lognormal(rng, 1_200, 0.8, 50, 12_000), lambda: _output(rng, 200)
    )
    burst, period = 4 / 6, count / 12

    def moved(at: float) -> float:
        whole, part = divmod(at / period, 1)
        return (
            whole
            + (part / burst / 6 if part < burst else 1 / 6 + (part - burst) / (1 - burst) * 5 / 6)
        ) * period

    return [replace(each, at=moved(each.at)) for each in asks]


def _scale(rng: random.Random, count: int) -> list[Asked]:
    poisson = _poisson(rng)
    return [
        Asked(next(poisson), _lognormal(rng, 1_800, 1.0, 50, 30_000), _output(rng, 300))
        for _ in range(count)
    ]


def _sessions(rng: random.Random, count: int) -> list[Asked]:
    names = _Names()
    asks: list[Asked] = []
    system = names.of(1_024)
    starts = _poisson(rng)
    turns_on_average = 6.0
    number = 0
    while len(asks) < count:
        at, number = next(starts) * turns_on_average, number + 1
        blocks, tokens = system, 1_024
        while True:
            asked = _lognormal(rng, 200, 1.0, 10, 6_000)
            blocks += names.of(tokens % _BLOCK_TOKENS + asked)
            tokens += asked
            output = _output(rng, 250)
            asks.append(Asked(at, tokens, output, blocks, session=f"session {number}"))
            # The answer is computed where the client's next prompt does not look for it: on the
            # decode node.
            blocks += names.of(tokens % _BLOCK_TOKENS + output)
            tokens += output
            # Thinking takes about as long as a hundredth of the run.
            at += count / 100 * rng.uniform(0.5, 1.5)
            if rng.random() < 1 / turns_on_average or tokens > 60_000:
                break
    asks.sort(key=lambda each: each.at)
    return asks[:count]


def _named(*workloads: Workload) -> Mapping[str, Workload]:
    return MappingProxyType({each.name: each for each in workloads})


WORKLOADS = _named(
    Workload("chat", "30 system prompts of 300 to 3,000 tokens, 250 of one's own", _chat, 1.3),
    Workload("code", "150 contexts of 3,000 to 16,000 tokens, 400 of one's own", _code, 3.0),
    Workload("summarise", "prompts of 6,000 tokens that share nothing", _summarise, 0.85),
    Workload(
        "long mix", "3 % prompts of 32,000 to 100,000 tokens among those of 600", _long_mix, 0.8
    ),
    Workload(
        "sessions", "conversations of six turns, each prompt all that was said", _sessions, 1.3
    ),
    Workload(
        "bursty",
        "prompts of 1,200 tokens, a sixth of the time at four times the rate",
        _bursty,
        0.5,
    ),
    Workload("heavy tail", "lengths of prompts and answers by power laws", _heavy_tail, 0.8),
)

SCALE = Workload(
    "scale", "prompts of 3,000 tokens on average that share nothing, answers of 400", _scale, 0.85
)
