"""Workloads: sessions of one or several turns, when they begin, and their prompts.

Pure but for the file of a trace.
"""

from __future__ import annotations

import gzip
import itertools
import math
import random
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvrelay.wire.config_checks import Share, Some
from kvrelay.wire.errors import ConfigError

__all__ = [
    "AGENTS",
    "FIRST_TOKEN",
    "LENGTHS",
    "TRACED",
    "TRACE_BLOCK_TOKENS",
    "Agents",
    "Arrival",
    "ArrivalProcess",
    "Branch",
    "Lengths",
    "Prompts",
    "Session",
    "Spelling",
    "Turn",
    "Work",
    "agents_of",
    "arrival_times",
    "lengths_of",
    "sessions",
]

ArrivalProcess = Literal["poisson", "bursty", "constant", "trace"]
TRACE_BLOCK_TOKENS = 512
TRACED = (".jsonl", ".gz")
"""Ends of the names of traces."""
FIRST_TOKEN = 300
"""The smallest token id of a prompt: nearly all vocabularies have special tokens below."""
_SAMPLE = 500


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


_Bound = Annotated[float, Meta(gt=0, le=1e7)]
_Pair = tuple[_Bound, _Bound]


class Agents(Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet of agents. Pairs are bounds of log-normal values, two deviations from the median."""

    systems: Some = 4
    """System prompts, which sessions share."""
    system: _Pair = (4_000, 16_000)
    turns: _Pair = (4, 40)
    prompt: _Pair = (50, 2_000)
    """Tokens of a turn: a question, or what a tool says."""
    output: _Pair = (30, 500)
    gap_s: _Pair = (1, 120)
    """Seconds from an answer to the next turn, while a tool runs."""
    branch: Share = 0.1
    """Share of the turns before which sub-agents work."""
    branches: _Pair = (1, 3)
    branch_turns: _Pair = (2, 10)
    result: _Pair = (50, 500)
    """Tokens of a sub-agent's last answer, which its parent gets."""


AGENTS = MappingProxyType(
    {
        "fleet": Agents(),
        "llm-d": Agents(24, (10_000, 100_000), gap_s=(1, 20), branch=0.0),
    }
)


def agents_of(spec: str) -> Agents:
    """Return the agents of a name, changed as in NAME,turns=4:20,systems=2. Raises ConfigError."""
    name, *changes = spec.split(",")
    try:
        fields = msgspec.to_builtins(AGENTS[name])
        for change in changes:
            key, value = change.split("=")
            pair = isinstance(fields.get(key), (list, tuple))
            fields[key] = (value.split(":") * 2)[:2] if pair else value
        agents = msgspec.convert(fields, Agents, strict=False)
    except (KeyError, ValueError) as why:
        raise ConfigError(
            f"agents {spec!r} are not one of {', '.join(AGENTS)} with changes, as in "
            f"fleet,turns=4:20,systems=2: {why}"
        ) from why
    for key, value in msgspec.structs.asdict(agents).items():
        if isinstance(value, tuple) and value[0] > value[1]:
            raise ConfigError(f"agents {spec!r} have {key} from {value[0]:g} to {value[1]:g}")
    return agents


class Work(Struct, frozen=True):
    """A workload; lengths are means in tokens, `spread` their standard deviation in means."""

    prompt: int = 512
    output: int = 256
    spread: float = 0.0
    trace: str = ""
    agents: Agents | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, in pieces of a name and a number of tokens."""

    output: int
    pieces: tuple[tuple[int, int], ...] = ()
    think_s: float = 0.0
    branches: tuple[Branch, ...] = ()
    """Sub-agents that work after `think_s`; the prompt has their results."""

    @property
    def prompt(self) -> int:
        return sum(tokens for _, tokens in self.pieces)


@dataclass(frozen=True, slots=True)
class Branch:
    """A sub-agent: its turns follow the first `keeps` turns of its parent, with their answers."""

    keeps: int
    turns: list[Turn]


@dataclass(frozen=True, slots=True)
class Session:
    """Turns asked one after the other, from second `at` of the run."""

    number: int
    at: float
    turns: list[Turn]
    system: Turn | None = None
    """A system prompt, of which only the pieces count."""

    @property
    def all_turns(self) -> list[Turn]:
        """Return the turns of its sub-agents, too."""
        inner = [each.turns for turn in self.turns for each in turn.branches]
        return [*self.turns, *itertools.chain(*inner)]


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
    agents = work.agents
    drawn = _synthetic_sessions(work, rng) if agents is None else _agent_sessions(agents, rng)
    begins: Iterator[float] = itertools.repeat(0.0)
    if arrival.rate:
        sample = list(itertools.islice(drawn, _SAMPLE if agents else 1))
        turns = fmean(len(each.all_turns) for each in sample)
        begins = arrival_times(replace(arrival, rate=arrival.rate / turns), times)
        drawn = itertools.chain(sample, drawn)
    for at, each in zip(begins, drawn, strict=False):
        yield replace(each, at=at)


def _synthetic_sessions(work: Work, rng: random.Random) -> Iterator[Session]:
    for number in itertools.count():
        output = _draw_length(work.output, work.spread, rng)
        prompt = _draw_length(work.prompt, work.spread, rng)
        # Names of a trace are not negative.
        yield Session(number, 0.0, [Turn(output, ((-1 - number, prompt),))])


def _draw_length(mean: int, spread: float, rng: random.Random) -> int:
    if not spread:
        return mean
    squared = math.log(1 + spread**2)
    return max(1, round(rng.lognormvariate(math.log(mean) - squared / 2, math.sqrt(squared))))


# --- agents


def _agent_sessions(agents: Agents, rng: random.Random) -> Iterator[Session]:
    systems = [Turn(0, ((name, _count(agents.system, rng)),)) for name in range(agents.systems)]
    names = itertools.count(1)
    for number in itertools.count():
        turns = _agent_turns(agents, agents.turns, agents.branch, names, rng)
        yield Session(number, 0.0, turns, systems[number % len(systems)])


def _agent_turns(
    agents: Agents, pair: _Pair, branch: float, names: Iterator[int], rng: random.Random
) -> list[Turn]:
    turns: list[Turn] = []
    for at in range(_count(pair, rng)):
        prompt, gap_s = _count(agents.prompt, rng), _between(agents.gap_s, rng)
        branches = []
        if at and rng.random() < branch:
            prompt, gap_s = 0, 0.0
            for _ in range(_count(agents.branches, rng)):
                inner = _agent_turns(agents, agents.branch_turns, 0.0, names, rng)
                result = _count(agents.result, rng)
                inner[-1] = replace(inner[-1], output=result)
                branches.append(Branch(rng.randrange(at + 1), inner))
                prompt += result
        output, pieces = _count(agents.output, rng), ((-next(names), prompt),)
        turns.append(Turn(output, pieces, gap_s if at else 0.0, tuple(branches)))
    return turns


def _count(pair: _Pair, rng: random.Random) -> int:
    return max(1, round(_between(pair, rng)))


def _between(pair: _Pair, rng: random.Random) -> float:
    least, most = pair
    drawn = rng.lognormvariate(math.log(least * most) / 2, math.log(most / least) / 4)
    return min(most, max(least, drawn))


# --- traces in Mooncake's format

_Tokens = Annotated[int, Meta(ge=0, le=1 << 26)]


class _TraceRow(Struct):
    timestamp: float
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[int]


def _trace_sessions(work: Work, arrival: Arrival, rng: random.Random) -> Iterator[Session]:
    path = Path(work.trace)
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as lines:
            rows = [msgspec.json.decode(line, type=_TraceRow) for line in lines]
    except (OSError, ValueError, EOFError, zlib.error, msgspec.MsgspecError) as why:
        raise ConfigError(
            f"the trace {path} cannot be read: {why}; it has a JSON object a line, as Mooncake's"
        ) from why
    if not rows:
        raise ConfigError(f"the trace {path} has no requests; it has a JSON object a line")
    turns = [_trace_turn(row, number) for number, row in enumerate(rows)]
    times_s = [row.timestamp / 1e3 for row in rows]
    first_s, length_s = min(times_s), times_s[-1] - times_s[0]
    if arrival.process != "trace" and arrival.rate:
        begins = arrival_times(arrival, rng)
    else:
        stretch = len(rows) / arrival.rate / length_s if arrival.rate and length_s else 1.0
        begins = ((each - first_s) * stretch for each in times_s)
    for number, (at, turn) in enumerate(zip(begins, turns, strict=False)):
        yield Session(number, at, [turn])


def _trace_turn(row: _TraceRow, number: int) -> Turn:
    # Its names are of blocks of 512 tokens, of which the last is seldom full.
    prompt, names = max(1, row.input_length), row.hash_ids
    full = prompt // TRACE_BLOCK_TOKENS
    pieces = [(name, TRACE_BLOCK_TOKENS) for name in names[:full]]
    if rest := prompt - len(pieces) * TRACE_BLOCK_TOKENS:
        pieces.append((names[full] if full < len(names) else -1 - number, rest))
    # The first token comes from the prefill node; a second one needs a decode node.
    return Turn(max(2, row.output_length), tuple(pieces))


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
        words: list[str] = []
        for at, (name, tokens) in enumerate(turn.pieces):
            if at == len(turn.pieces) - 1:
                tokens = max(1, tokens - self._spelling.overhead)
            count = max(1, round(tokens * self._spelling.words_per_token))
            words += [_WORDS[each % len(_WORDS)] for each in self._random_bytes(name, count)]
        return " ".join(words)

    def _random_bytes(self, name: int, count: int) -> bytes:
        return random.Random(f"{self._seed} {name}").randbytes(count)
