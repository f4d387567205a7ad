"""What is asked, in order: sessions of one or several turns, of given lengths, out of a ShareGPT
file or a trace.

Owns how many tokens of which name each prompt has, and when its session begins; load/prompts.py
writes them. Pure but for the files that it reads. A request that stands alone is a session of one
turn.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from kvrelay.load.arrivals import arrivals
from kvrelay.load.workloads import TRACE_BLOCK_TOKENS, Asked, read_trace
from kvrelay.wire.errors import ConfigError

__all__ = [
    "CHARS_PER_TOKEN",
    "LENGTHS",
    "Arrival",
    "Lengths",
    "Session",
    "Turn",
    "Work",
    "sessions",
]

CHARS_PER_TOKEN = 4
"""Of English text; how long the answers of a ShareGPT file are is reckoned with it."""
_MOST_TURNS = 1 << 10
_Conversation = list[tuple[str, str]]


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of prompt and answer, and what such requests are held to."""

    prompt: int
    output: int
    ttft_ms: float = 1_000.0
    tpot_ms: float = 50.0


LENGTHS = MappingProxyType(
    {
        "chat": Lengths(512, 256, 200.0, 15.0),
        "code": Lengths(2_048, 64, 125.0, 20.0),
        "summarise": Lengths(8_192, 256, 1_000.0, 15.0),
        "long-context": Lengths(65_536, 256, 10_000.0, 20.0),
        "reasoning": Lengths(512, 4_096, 500.0, 20.0),
    }
)


class Arrival(msgspec.Struct, frozen=True):
    """How an open loop sends. `rate`: requests a second, all turns counted; 0: a closed loop, or a
    trace as it is.
    """

    kind: str = "poisson"
    rate: float = 0.0
    variation: float = 2.0


class Work(msgspec.Struct, frozen=True):
    """What is asked. Lengths are means in tokens; `spread` is the standard deviation in means, 0
    for all alike.
    """

    prompt: int = 512
    output: int = 256
    spread: float = 0.0
    turns: int = 1
    think_s: float = 1.0
    """Between an answer and the next turn, on average."""
    trace: str = ""
    """A file in Mooncake's format, instead of lengths."""
    sharegpt: str = ""
    """A file in ShareGPT's format, instead of lengths."""


class Turn(msgspec.Struct, frozen=True):
    """One prompt: either `pieces` of a name and a number of tokens, where equal names are equal
    tokens, or a text.
    """

    output: int
    pieces: list[tuple[int, int]] = []
    text: str = ""
    think_s: float = 0.0

    @property
    def prompt(self) -> int:
        """Its tokens, if it is made of pieces."""
        return sum(tokens for _, tokens in self.pieces)


class Session(msgspec.Struct, frozen=True):
    """Turns of which each is asked when the one before is answered; `at`: seconds from the begin."""

    number: int
    at: float
    turns: list[Turn]


def sessions(work: Work, arrival: Arrival, seed: str) -> Iterator[Session]:
    """The sessions of a run, the same ones for the same seed; without an end but for a trace's.

    Raises ConfigError if a file is not what it should be.
    """
    rng, times = random.Random(f"{seed} work"), random.Random(f"{seed} arrivals")
    if work.trace:
        yield from _of_trace(work, arrival, times)
        return
    turns: float = work.turns
    if work.sharegpt:
        found = _conversations(Path(work.sharegpt))
        asked = _of_sharegpt(found, work, rng)
        turns = sum(min(len(said), work.turns) for said in found) / len(found)
    else:
        asked = _made_up(work, rng)
    begins = (
        arrivals(arrival.kind, arrival.rate / turns, arrival.variation, times)
        if arrival.rate
        else itertools.repeat(0.0)
    )
    for number, (at, said) in enumerate(zip(begins, asked, strict=False)):
        yield Session(number, at, said)


def _made_up(work: Work, rng: random.Random) -> Iterator[list[Turn]]:
    for number in itertools.count():
        yield [
            Turn(
                _drawn(work.output, work.spread, rng),
                [(_own(number, turn), _drawn(work.prompt, work.spread, rng))],
                think_s=_thinking(work, turn, rng),
            )
            for turn in range(work.turns)
        ]


def _own(number: int, turn: int) -> int:
    return -1 - number * _MOST_TURNS - turn


def _drawn(mean: int, spread: float, rng: random.Random) -> int:
    if not spread:
        return mean
    squared = math.log(1 + spread**2)
    return max(1, round(rng.lognormvariate(math.log(mean) - squared / 2, math.sqrt(squared))))


def _thinking(work: Work, turn: int, rng: random.Random) -> float:
    return rng.expovariate(1 / work.think_s) if turn and work.think_s else 0.0


def _of_trace(work: Work, arrival: Arrival, rng: random.Random) -> Iterator[Session]:
    try:
        asks = read_trace(Path(work.trace))
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(
            f"cannot read {work.trace} as a trace in Mooncake's format: {why!r}"
        ) from why
    first, length_s = asks[0].at, (asks[-1].at - asks[0].at) / 1e3
    if arrival.kind != "trace" and arrival.rate:
        begins = arrivals(arrival.kind, arrival.rate, arrival.variation, rng)
    else:
        stretched = len(asks) / arrival.rate / length_s if arrival.rate and length_s else 1.0
        begins = ((asked.at - first) / 1e3 * stretched for asked in asks)
    for number, (at, asked) in enumerate(zip(begins, asks, strict=False)):
        yield Session(number, at, [_traced(asked, number)])


def _traced(asked: Asked, number: int) -> Turn:
    rest = asked.prompt - len(asked.blocks) * TRACE_BLOCK_TOKENS
    tail = asked.tail if asked.tail is not None else _own(number, 0)
    pieces = [(name, TRACE_BLOCK_TOKENS) for name in asked.blocks]
    return Turn(asked.output, [*pieces, (tail, rest)] if rest else pieces)


def _of_sharegpt(
    found: list[_Conversation], work: Work, rng: random.Random
) -> Iterator[list[Turn]]:
    while True:
        for said in rng.sample(found, len(found)):
            yield [
                Turn(
                    max(1, len(answer) // CHARS_PER_TOKEN),
                    text=question,
                    think_s=_thinking(work, turn, rng),
                )
                for turn, (question, answer) in enumerate(said[: work.turns])
            ]


def _conversations(path: Path) -> list[_Conversation]:
    try:
        found = [
            _exchanges(each["conversations"])
            for each in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as why:
        raise ConfigError(
            f"cannot read {path} as conversations in ShareGPT's format: {why!r}"
        ) from why
    if not any(found):
        raise ConfigError(f"{path} has no conversation in which a human asks and is answered")
    return [each for each in found if each]


def _exchanges(said: list[dict[str, Any]]) -> _Conversation:
    human, model = ("human", "user"), ("gpt", "assistant")
    pairs = itertools.pairwise(said)
    return [
        (_sendable(str(a["value"])), str(b["value"]))
        for a, b in pairs
        if a["from"] in human and b["from"] in model and a["value"] and b["value"]
    ]


def _sendable(text: str) -> str:
    return text.encode(errors="replace").decode()
