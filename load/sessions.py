"""What is asked, in order: sessions of one or several turns, when they begin, and their prompts.

Pure but for the ShareGPT and trace files that it reads. Prompts are made of named pieces: equal names
give equal tokens. A request that stands alone is a session of one turn.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from kvrelay.load.workloads import TRACE_BLOCK_TOKENS, Asked, read_trace
from kvrelay.wire.errors import ConfigError

__all__ = [
    "Arrivals",
    "CHARS_PER_TOKEN",
    "FIRST_TOKEN",
    "LENGTHS",
    "Arrival",
    "Lengths",
    "Prompts",
    "Session",
    "Spelling",
    "Turn",
    "Work",
    "arrivals",
    "body",
    "sessions",
]

Arrivals = Literal["poisson", "bursty", "constant", "trace"]
"""How requests come; `trace`: at a trace's times, stretched to the rate."""


def arrivals(kind: str, rate: float, variation: float, rng: random.Random) -> Iterator[float]:
    """Yield the seconds at which an open loop sends, `rate` of them a second on average.

    The gaps of `bursty` are gamma distributed with a standard deviation of `variation` means: 1 is
    Poisson.
    """
    squared, now = variation**2, 0.0
    while True:
        if kind == "constant":
            now += 1 / rate
        elif kind == "bursty":
            now += rng.gammavariate(1 / squared, squared / rate)
        else:
            now += rng.expovariate(rate)
        yield now


CHARS_PER_TOKEN = 4
"""Characters of a token of English text, for the answers of a ShareGPT file."""
_MOST_TURNS = 1 << 10
_Conversation = list[tuple[str, str]]


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of prompt and answer, and the targets of such requests."""

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
    """How requests come; `rate` counts all turns, 0 is a closed loop or a trace as it is."""

    kind: str = "poisson"
    rate: float = 0.0
    variation: float = 2.0


class Work(msgspec.Struct, frozen=True):
    """What is asked; lengths are means in tokens, `spread` their standard deviation in means."""

    prompt: int = 512
    output: int = 256
    spread: float = 0.0
    turns: int = 1
    think_s: float = 1.0
    """Mean time between an answer and the next turn."""
    trace: str = ""
    """A file in Mooncake's format, instead of lengths."""
    sharegpt: str = ""
    """A file in ShareGPT's format, instead of lengths."""


class Turn(msgspec.Struct, frozen=True):
    """One prompt: a text, or pieces of a name and a number of tokens."""

    output: int
    pieces: list[tuple[int, int]] = []
    text: str = ""
    think_s: float = 0.0

    @property
    def prompt(self) -> int:
        return sum(tokens for _, tokens in self.pieces)


class Session(msgspec.Struct, frozen=True):
    """Turns that are asked one behind the other; `at`: seconds from the begin."""

    number: int
    at: float
    turns: list[Turn]


def sessions(work: Work, arrival: Arrival, seed: str) -> Iterator[Session]:
    """Yield the sessions of a run, the same for the same seed; only a trace's end.

    Raises ConfigError for a wrong file.
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


FIRST_TOKEN = 300
"""Special tokens, which might end a request, stand before it in nearly all vocabularies."""

# Short and usual: one token each, with the space before it, in most vocabularies.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea kid body back
    parent face others level office door health person art war history party result change morning reason research
    girl guy moment air teacher force education foot boy age policy process music market sense nation plan college
    interest death experience effect use class control care field development role effort rate heart drug show leader
    light voice wife police mind price report decision son view relationship town road arm difference value building
    action season society tax director position player record paper space ground form event official matter center
    couple site project activity star table need court oil situation cost industry figure street image phone data
    picture practice piece land product doctor wall patient worker news test movie north love support technology step
    baby computer type attention film tree source organization hair look century evidence window culture chance
    brother energy period course summer plant term opinion rest letter condition choice rule south floor
    campaign material population call east note west church bank fire truth board risk song hope store
""".split()  # noqa: SIM905 - the rule would have one line of 3,000 characters


class Spelling(msgspec.Struct, frozen=True):
    """How words become tokens: `overhead` more for each prompt, as of a chat template."""

    words_per_token: float = 1.0
    overhead: int = 0


class Prompts:
    """The prompts of a run: another seed gives other tokens to every name."""

    def __init__(self, seed: str, vocab_size: int, spelling: Spelling) -> None:
        self._seed, self._spelling = seed, spelling
        self._span = vocab_size - FIRST_TOKEN

    def ids(self, turn: Turn) -> list[int]:
        """Return the token ids of a turn."""
        first, span = FIRST_TOKEN, self._span
        found: list[int] = []
        for name, tokens in turn.pieces:
            drawn = array("I", random.Random(f"{self._seed} {name}").randbytes(4 * tokens))
            found += [first + each % span for each in drawn]
        return found

    def text(self, turn: Turn) -> str:
        """Return words that make about so many tokens, a template's overhead included."""
        if turn.text:
            return turn.text
        parts = []
        for at, (name, tokens) in enumerate(turn.pieces):
            if at == len(turn.pieces) - 1:
                tokens = max(1, tokens - self._spelling.overhead)
            count = max(1, round(tokens * self._spelling.words_per_token))
            drawn = random.Random(f"{self._seed} {name}").randbytes(count)
            parts += [_WORDS[each % len(_WORDS)] for each in drawn]
        return " ".join(parts)

    def words(self, count: int) -> str:
        """Return words that no prompt begins with."""
        rng = random.Random(f"{self._seed} words {count}")
        return " ".join(rng.choices(_WORDS, k=count))


def body(
    prompt: list[int] | str | list[dict[str, Any]], model: str, output: int, asks: dict[str, Any]
) -> bytes:
    """Return the JSON of a request; `asks` are further fields."""
    what = (
        "messages"
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
        else "prompt"
    )
    return msgspec.json.encode({"model": model, what: prompt, "max_tokens": output, **asks})
