"""Workloads: sessions of one or several turns, when they begin, and their prompts.

Pure but for the ShareGPT and trace files.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from kvrelay.wire.errors import ConfigError

__all__ = [
    "FIRST_TOKEN",
    "LENGTHS",
    "TRACE_BLOCK_TOKENS",
    "Arrival",
    "ArrivalProcess",
    "Asked",
    "Lengths",
    "Prompts",
    "Session",
    "Spelling",
    "Turn",
    "Work",
    "arrival_times",
    "lengths_of",
    "read_trace",
    "sessions",
]

ArrivalProcess = Literal["poisson", "bursty", "constant", "trace"]
TRACE_BLOCK_TOKENS = 512
FIRST_TOKEN = 300
"""The smallest token id of a prompt: nearly all vocabularies have special tokens below."""
_CHARS_PER_TOKEN = 4
_MAX_TURNS = 1 << 10


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompt and answer, and the latency targets of such requests."""

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


def lengths_of(name: str) -> Lengths:
    """Return the lengths of a name, or those of IN:OUT. Raises ConfigError."""
    if name in LENGTHS:
        return LENGTHS[name]
    found = re.fullmatch(r"([1-9][0-9]{0,6}):([1-9][0-9]{0,6})", name)
    if found is None:
        known = ", ".join(LENGTHS)
        raise ConfigError(f"lengths {name!r} is not one of {known}, and not IN:OUT in tokens")
    return Lengths(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class Arrival:
    """How requests come; `rate` counts all turns, 0 is a closed loop or a trace at its own pace."""

    process: str = "poisson"
    rate: float = 0.0
    variation: float = 2.0


class Work(msgspec.Struct, frozen=True):
    """A workload; lengths are means in tokens, `spread` their standard deviation in means."""

    prompt: int = 512
    output: int = 256
    spread: float = 0.0
    turns: int = 1
    think_s: float = 1.0
    """Mean time between an answer and the next turn."""
    trace: str = ""
    sharegpt: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt: a text, or pieces of a name and a number of tokens."""

    output: int
    pieces: tuple[tuple[int, int], ...] = ()
    text: str = ""
    think_s: float = 0.0

    @property
    def prompt(self) -> int:
        return sum(tokens for _, tokens in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns asked one after the other, from second `at` of the run."""

    number: int
    at: float
    turns: list[Turn]


def arrival_times(arrival: Arrival, rng: random.Random) -> Iterator[float]:
    """Yield the seconds at which an open loop sends.

    The gaps of `bursty` are gamma distributed with a standard deviation of `variation` means.
    """
    rate, squared, now = arrival.rate, arrival.variation**2, 0.0
    while True:
        if arrival.process == "constant":
            now += 1 / rate
        elif arrival.process == "bursty":
            now += rng.gammavariate(1 / squared, squared / rate)
        else:
            now += rng.expovariate(rate)
        yield now


def sessions(work: Work, arrival: Arrival, seed: str) -> Iterator[Session]:
    """Yield the sessions of a run, the same ones for the same seed; only those of a trace end.

    Raises ConfigError for a file in another format.
    """
    rng, times = random.Random(f"{seed} work"), random.Random(f"{seed} arrivals")
    if work.trace:
        yield from _trace_sessions(work, arrival, times)
        return
    turns: float = work.turns
    if work.sharegpt:
        conversations = _read_sharegpt(Path(work.sharegpt))
        drawn = _sharegpt_turns(conversations, work, rng)
        turns = sum(min(len(each), work.turns) for each in conversations) / len(conversations)
    else:
        drawn = _synthetic_turns(work, rng)
    begins: Iterator[float] = itertools.repeat(0.0)
    if arrival.rate:
        begins = arrival_times(replace(arrival, rate=arrival.rate / turns), times)
    for number, (at, asked) in enumerate(zip(begins, drawn, strict=False)):
        yield Session(number, at, asked)


def _synthetic_turns(work: Work, rng: random.Random) -> Iterator[list[Turn]]:
    for number in itertools.count():
        yield [
            Turn(
                _draw_length(work.output, work.spread, rng),
                ((_unique_name(number, turn), _draw_length(work.prompt, work.spread, rng)),),
                think_s=_draw_think_s(work, turn, rng),
            )
            for turn in range(work.turns)
        ]


def _unique_name(session: int, turn: int) -> int:
    return -1 - session * _MAX_TURNS - turn  # a trace's names are not negative


def _draw_length(mean: int, spread: float, rng: random.Random) -> int:
    if not spread:
        return mean
    squared = math.log(1 + spread**2)
    return max(1, round(rng.lognormvariate(math.log(mean) - squared / 2, math.sqrt(squared))))


def _draw_think_s(work: Work, turn: int, rng: random.Random) -> float:
    return rng.expovariate(1 / work.think_s) if turn and work.think_s else 0.0


# --- traces in Mooncake's format


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of `prompt` tokens, whose full blocks `blocks` name, for `output` tokens.

    Equal names are equal beginnings; `tail` names the tokens after the full blocks. `at` is in
    milliseconds in a trace, in mean gaps where it is drawn.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    session: str = ""
    tail: int | None = None


def read_trace(path: Path, count: int | None = None) -> list[Asked]:
    """Read the first `count` requests of a trace: a JSON object a line, also gzipped.

    Its hash_ids name blocks of 512 tokens, of which the last is seldom full. Raises OSError,
    ValueError, KeyError, TypeError.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        asked = [_trace_request(json.loads(line)) for line in itertools.islice(lines, count)]
    if not asked:
        raise ValueError(f"{path} has no requests")
    first = min(each.at for each in asked)
    return [replace(each, at=each.at - first) for each in asked]


def _trace_request(row: dict[str, Any]) -> Asked:
    prompt, names = row["input_length"], row["hash_ids"]
    full = prompt // TRACE_BLOCK_TOKENS
    # The first token comes from the prefill node; a second one needs a decode node.
    output = max(2, row["output_length"])
    tail = names[full] if full < len(names) else None
    return Asked(float(row["timestamp"]), prompt, output, tuple(names[:full]), tail=tail)


def _trace_sessions(work: Work, arrival: Arrival, rng: random.Random) -> Iterator[Session]:
    try:
        asked = read_trace(Path(work.trace))
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(
            f"cannot read {work.trace} as a trace in Mooncake's format: {why!r}"
        ) from why
    first, length_s = asked[0].at, (asked[-1].at - asked[0].at) / 1e3
    if arrival.process != "trace" and arrival.rate:
        begins = arrival_times(arrival, rng)
    else:
        stretch = len(asked) / arrival.rate / length_s if arrival.rate and length_s else 1.0
        begins = ((each.at - first) / 1e3 * stretch for each in asked)
    for number, (at, each) in enumerate(zip(begins, asked, strict=False)):
        yield Session(number, at, [_trace_turn(each, number)])


def _trace_turn(asked: Asked, number: int) -> Turn:
    pieces = [(name, TRACE_BLOCK_TOKENS) for name in asked.blocks]
    if rest := asked.prompt - len(asked.blocks) * TRACE_BLOCK_TOKENS:
        pieces.append((_unique_name(number, 0) if asked.tail is None else asked.tail, rest))
    return Turn(asked.output, tuple(pieces))


# --- conversations in ShareGPT's format: pairs of a question and its answer

_Conversation = list[tuple[str, str]]


def _sharegpt_turns(
    conversations: list[_Conversation], work: Work, rng: random.Random
) -> Iterator[list[Turn]]:
    while True:
        for conversation in rng.sample(conversations, len(conversations)):
            yield [
                Turn(
                    max(1, len(answer) // _CHARS_PER_TOKEN),
                    text=question,
                    think_s=_draw_think_s(work, turn, rng),
                )
                for turn, (question, answer) in enumerate(conversation[: work.turns])
            ]


def _read_sharegpt(path: Path) -> list[_Conversation]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        found = [_exchanges(row["conversations"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as why:
        raise ConfigError(
            f"cannot read {path} as conversations in ShareGPT's format: {why!r}"
        ) from why
    if not any(found):
        raise ConfigError(f"{path} has no conversation in which a human asks and is answered")
    return [each for each in found if each]


def _exchanges(messages: list[dict[str, Any]]) -> _Conversation:
    human, model = ("human", "user"), ("gpt", "assistant")
    return [
        (str(a["value"]).encode(errors="replace").decode(), str(b["value"]))
        for a, b in itertools.pairwise(messages)
        if a["from"] in human and b["from"] in model and a["value"] and b["value"]
    ]


# --- prompts

# Short and usual: one token each, with the space before it, in most vocabularies.
_WORDS = """
    time year people way day man thing woman life child world school state family student group
    country problem hand part place case week company system program question work government
    number night point home water room mother area money story fact month lot right study book
    eye job word business issue side kind head house service friend father power hour game line
    end member law car city community name president team minute idea kid body back parent face
    others level office door health person art war history party result change morning reason
    research girl guy moment air teacher force education foot boy age policy process music
    market sense nation plan college interest death experience effect use class control care
    field development role effort rate heart drug show leader light voice wife police mind price
    report decision son view relationship town road arm difference value building action season
    society tax director position player record paper space ground form event official matter
    center couple site project activity star table need court oil situation cost industry figure
    street image phone data picture practice piece land product doctor wall patient worker news
    test movie north love support technology step baby computer type attention film tree source
    organization hair look century evidence window culture chance brother energy period course
    summer plant term opinion rest letter condition choice rule south floor campaign material
    population call east note west church bank fire truth board risk song hope store
""".split()  # noqa: SIM905 - the rule would have one line of 3,000 characters


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a server's tokenizer turns words into tokens; its template adds `overhead` tokens."""

    words_per_token: float = 1.0
    overhead: int = 0


class Prompts:
    """The prompts of a run: another seed gives other tokens to every name."""

    def __init__(self, seed: str, vocab_size: int, spelling: Spelling) -> None:
        self._seed, self._spelling = seed, spelling
        self._span = vocab_size - FIRST_TOKEN

    def ids(self, turn: Turn) -> list[int]:
        first, span = FIRST_TOKEN, self._span
        ids: list[int] = []
        for name, tokens in turn.pieces:
            drawn = array("I", self._random_bytes(name, 4 * tokens))
            ids += [first + each % span for each in drawn]
        return ids

    def text(self, turn: Turn) -> str:
        """Return words that make about as many tokens as the turn has, with the template's."""
        if turn.text:
            return turn.text
        words: list[str] = []
        for at, (name, tokens) in enumerate(turn.pieces):
            if at == len(turn.pieces) - 1:
                tokens = max(1, tokens - self._spelling.overhead)
            count = max(1, round(tokens * self._spelling.words_per_token))
            words += [_WORDS[each % len(_WORDS)] for each in self._random_bytes(name, count)]
        return " ".join(words)

    def _random_bytes(self, name: int, count: int) -> bytes:
        return random.Random(f"{self._seed} {name}").randbytes(count)
