"""Loads, equal for all arms: lengths, times of arrival, and targets.

Pure but for the trace that it reads.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from kvrelay.load.workloads import LENGTHS, Arrival, sessions
from kvrelay.load.workloads import Work as Lengths
from kvrelay.wire.errors import ConfigError

__all__ = [
    "BLOCK_TOKENS",
    "TRACE",
    "WORKS",
    "Load",
    "Request",
    "Targets",
    "Work",
    "closed",
    "work_named",
]

BLOCK_TOKENS = 512
"""Size of a prompt's named blocks, as in Mooncake's trace."""
TRACE = "trace"
_TRACE_RATE = 8.0
_CLOSED_S = 15.0
_LEAST, _LEAST_OF_LONG = 400, 150
_SIGMA, _SHAPE = 0.5, 0.3
_PROMPT_MS = 0.1
_MIXED = re.compile(r"(mix|burst)-([\d.]+)-([\d.]+)-([\d.]+)")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how many tokens follow it, asked `at_s` after the begin."""

    at_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Targets:
    """A pair of latencies that requests are held to."""

    ttft_ms: float
    tpot_ms: float
    ttft_ms_per_token: float = 0.0

    def met(self, prompt: int, ttft_ms: float, tpot_ms: float) -> bool:
        return ttft_ms <= self.ttft_ms + self.ttft_ms_per_token * prompt and tpot_ms <= self.tpot_ms

    def scaled(self, scale: float) -> Targets:
        return Targets(self.ttft_ms * scale, self.tpot_ms * scale, self.ttft_ms_per_token * scale)

    @property
    def flags(self) -> list[str]:
        """Name those that tell them to a router of ours."""
        return [
            f"--ttft-target-ms={self.ttft_ms:g}",
            f"--ttft-target-ms-per-token={self.ttft_ms_per_token:g}",
            f"--tpot-target-ms={self.tpot_ms:g}",
        ]


@dataclass(frozen=True, slots=True)
class Load:
    """A cell's requests. `clients`: so many ask again and again; 0 is an open loop."""

    requests: tuple[Request, ...]
    targets: Targets | None = None
    clients: int = 0

    @property
    def window_s(self) -> float:
        """Tell how long an open loop sends, or about what a closed one takes."""
        return _CLOSED_S if self.clients else self.requests[-1].at_s


@dataclass(frozen=True, slots=True)
class Work:
    """A mix of requests that arrive independently. `parts`: (requests a second on both GPUs,
    prompt, output).
    """

    name: str
    parts: tuple[tuple[float, int, int], ...]
    targets: Targets
    factors: tuple[float, ...] = (1.0,)
    least: int = _LEAST
    spread: float = 0.0
    """Standard deviation of lengths in their means; they are log-normal."""
    variation: float = 1.0
    """Standard deviation of the gaps between arrivals in their mean: 1 is Poisson, more comes in
    bursts.
    """

    @property
    def rate(self) -> float:
        return sum(rate for rate, *_ in self.parts)

    def load(
        self,
        factor: float,
        seed: int,
        seconds: float,
        least: int | None,
        longest: int,
        trace: Path | None = None,
    ) -> Load:
        """Draw at least `seconds` and `least` requests of it, the same ones for the same seed.

        Prompts leave room for the answer in `longest` tokens. Raises ConfigError if there is no
        trace to read.
        """
        seconds = max(seconds, (least or self.least) / (self.rate * factor))
        if self.name == TRACE:
            count = math.ceil(self.rate * factor * seconds)
            return Load(_of_trace(trace, count, self.rate * factor, seed, longest), self.targets)
        found: list[Request] = []
        for number, (rate, prompt, output) in enumerate(self.parts):
            arrival = Arrival(
                "bursty" if self.variation > 1 else "poisson", rate * factor, self.variation
            )
            drawn = sessions(
                Lengths(prompt, output, self.spread),
                arrival,
                f"{self.name} {number} {factor} {seed}",
            )
            if len(self.parts) == 1:
                drawn = itertools.islice(drawn, math.ceil(rate * factor * seconds))
            else:  # all of them until the end
                drawn = itertools.takewhile(lambda session: session.at < seconds, drawn)
            for session in drawn:
                (turn,) = session.turns
                answer = min(turn.output, longest // 2)
                found.append(Request(session.at, min(turn.prompt, longest - answer), answer))
        return Load(tuple(sorted(found, key=lambda each: each.at_s)), self.targets)


def _of_trace(
    path: Path | None, count: int, rate: float, seed: int, longest: int
) -> tuple[Request, ...]:
    if path is None:
        raise ConfigError(f"the work {TRACE} needs --trace FILE, in Mooncake's format")
    drawn = sessions(Lengths(trace=f"{path}"), Arrival("trace"), "")
    turns = ((each.at, each.turns[0]) for each in drawn)
    fit = [(at, turn) for at, turn in turns if turn.prompt + turn.output <= longest]
    if len(fit) < count:
        raise ConfigError(
            f"{path} has {len(fit)} requests of at most {longest} tokens, {count} are needed"
        )
    first = random.Random(seed).randrange(len(fit) - count + 1)
    fit = fit[first : first + count]
    begins = fit[0][0]
    pressed = count / rate / max(1e-3, fit[-1][0] - begins)
    return tuple(
        Request(
            (at - begins) * pressed,
            turn.prompt,
            turn.output,
            tuple(name for name, _ in turn.pieces if name >= 0),
        )
        for at, turn in fit
    )


def closed(text: str) -> Load:
    """Parse `in:out:clients`: four requests for each client, more where they are few. Raises
    ConfigError.
    """
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"a row is in:out:clients, all of them at least 1, got {text!r}")
    prompt, output, clients = map(int, parts)
    count = max(4 * clients, 96 if output == 1 else 12)  # without answers a request is short
    return Load((Request(0.0, prompt, output),) * count, None, clients)


def _single(name: str, limit: float, least: int = _LEAST) -> Work:
    of = LENGTHS[name]
    parts = ((limit, of.prompt, of.output),)
    return Work(name, parts, Targets(of.ttft_ms, of.tpot_ms), (0.5, 0.8, 1.0, 1.2), least)


WORKS: Mapping[str, Work] = MappingProxyType(
    {
        each.name: each
        for each in (
            # What two colocated nodes on H200s held (benchmarks/RESULTS.md).
            _single("chat", 71.0),
            _single("code", 23.2),
            _single("summarise", 4.6, _LEAST_OF_LONG),
            # A guess at what they hold of it. Lengths are the trace's own.
            Work(TRACE, ((_TRACE_RATE, 0, 0),), Targets(200.0, 15.0, _PROMPT_MS)),
        )
    }
)
"""Rates are those of two GPUs."""


def work_named(name: str, limits: Mapping[str, float] = MappingProxyType({})) -> Work:
    """Find one of WORKS, at the rate that `limits` has for it, or make a mixture. Raises
    ConfigError.

    `mix-A-B-C` and `burst-A-B-C` are so many requests of chat, summarise and code a second and GPU.
    """
    found = _MIXED.fullmatch(name)
    if found is None:
        if name not in WORKS:
            raise ConfigError(f"{name!r} is none of {', '.join(WORKS)}, mix-A-B-C and burst-A-B-C")
        ((rate, prompt, output),) = WORKS[name].parts
        return replace(WORKS[name], parts=((limits.get(name, rate), prompt, output),))
    rates = zip(("chat", "summarise", "code"), map(float, found.groups()[1:]), strict=True)
    parts = tuple(
        (2 * rate, LENGTHS[kind].prompt, LENGTHS[kind].output) for kind, rate in rates if rate
    )
    if not parts:
        raise ConfigError(f"{name!r} asks for nothing")
    return Work(
        name,
        parts,
        Targets(200.0, 15.0, _PROMPT_MS),
        spread=math.sqrt(math.exp(_SIGMA**2) - 1),
        variation=1 / math.sqrt(_SHAPE) if found[1] == "burst" else 1.0,
    )
