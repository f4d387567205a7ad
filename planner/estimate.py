"""How many nodes of which role keep the promises for a workload, on so many GPUs: a guess by
queueing theory. Pure.

A prefill node is a queue: Erlang's C with Allen and Cunneen's correction says how long a prompt
waits. A decode node is a batch whose steps take the longer, the larger it is: Little's law says how
large it gets. A colocated server is both, and its steps wait for chunks of prompts. Guesses are
some ten percent off, more where prompts share beginnings; planner/goodput.py says what comes of
one. Rates are requests a second, of the whole cluster unless they are per GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.load.workloads import Asked
from kvrelay.planner.rate_card import RateCard
from kvrelay.wire.errors import ConfigError

__all__ = [
    "ATTAINMENT",
    "NETWORK_MS",
    "Demand",
    "Estimate",
    "Goal",
    "Split",
    "demand_of",
    "estimate",
    "plans",
    "splits",
    "token_ms",
]

ATTAINMENT = 0.9
"""Share of requests that should keep both targets."""
NETWORK_MS = 0.3
"""From the client through the router to a node, and back."""
_SAMPLE = 256
_HALVINGS = 30


class Goal(msgspec.Struct, frozen=True):
    """A pair of promised latencies. Raises ConfigError for impossible ones."""

    ttft_ms: float
    tpot_ms: float
    attainment: float = ATTAINMENT

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be above 0 milliseconds, got {getattr(self, name):g}"
                )
        if not 0 < self.attainment < 1:
            raise ConfigError(
                f"attainment must be a share between 0 and 1, got {self.attainment:g}"
            )


class Demand(msgspec.Struct, frozen=True):
    """A sample of requests that stand for all: (tokens of the prompt, of these cached, tokens of
    the answer).
    """

    lengths: list[tuple[int, int, int]]

    @property
    def output(self) -> float:
        """Mean tokens of an answer."""
        return sum(output for _, _, output in self.lengths) / len(self.lengths)

    @property
    def context(self) -> float:
        """Mean tokens of KV of a running request."""
        weights = sum(output for _, _, output in self.lengths)
        return sum(output * (prompt + output / 2) for prompt, _, output in self.lengths) / weights


def demand_of(asks: Sequence[Asked], block_size: int) -> Demand:
    """Return the demand of these requests, as if all earlier ones were cached."""
    seen: set[int] = set()
    lengths = []
    for each in asks:
        known = 0
        for block in each.blocks:
            if block not in seen:
                break
            known += 1
        seen.update(each.blocks)
        lengths.append((each.prompt, min(known * block_size, each.prompt - 1), each.output))
    # Caches fill first.
    later = lengths[len(lengths) // 4 :]
    return Demand(later[:: max(1, len(later) // _SAMPLE)])


@dataclass(frozen=True, slots=True)
class Split:
    """A split into prefill and decode nodes; without prefill nodes the others are colocated
    servers.
    """

    prefill: int
    decode: int
    prefill_card: RateCard
    decode_card: RateCard

    @property
    def gpus(self) -> int:
        return self.prefill * self.prefill_card.gpus + self.decode * self.decode_card.gpus

    @property
    def name(self) -> str:
        """Return the name, as 2P2D, with the GPUs of a node if it has several."""
        parts = ((self.prefill, "P", self.prefill_card), (self.decode, "D", self.decode_card))
        if not self.prefill:
            return f"{self.decode} colocated{_tp(self.decode_card)}"
        return "".join(f"{count}{letter}{_tp(card)}" for count, letter, card in parts)


def _tp(card: RateCard) -> str:
    return f"(TP {card.gpus})" if card.gpus > 1 else ""


def splits(gpus: int, cards: Sequence[RateCard]) -> list[Split]:
    """Return all splits that leave no usable GPU idle. Raises ConfigError if there is none."""
    if gpus < 1:
        raise ConfigError(f"--gpus must be at least 1, got {gpus}")
    if len({card.gpus for card in cards}) < len(cards):
        raise ConfigError("give one --card for each number of GPUs of a node; two are for the same")
    found = [Split(0, gpus // card.gpus, card, card) for card in cards if card.gpus <= gpus]
    least = min(card.gpus for card in cards)
    for prefill_card in cards:
        for decode_card in cards:
            for prefill in range(1, gpus // prefill_card.gpus + 1):
                decode = (gpus - prefill * prefill_card.gpus) // decode_card.gpus
                left = gpus - prefill * prefill_card.gpus - decode * decode_card.gpus
                if decode and left < least:
                    found.append(Split(prefill, decode, prefill_card, decode_card))
    if not found:
        raise ConfigError(
            f"a node takes {least} GPUs and there are {gpus}; give more, or a card of a smaller "
            f"node"
        )
    return found


@dataclass(frozen=True, slots=True)
class Estimate:
    """A split's result at one rate; shares are of 1."""

    split: Split
    rate: float
    ttft_kept: float
    tpot_kept: float
    prefill_use: float
    """Share of their time that nodes compute prompts."""
    running: float
    """Mean requests of a decode node."""
    short: str
    """What runs out first: prefill, decode or KV memory."""

    @property
    def attained(self) -> float:
        """Share of requests that keep both targets."""
        return self.ttft_kept * self.tpot_kept

    @property
    def per_gpu(self) -> float:
        return self.rate / self.split.gpus


def plans(gpus: int, cards: Sequence[RateCard], demand: Demand, goal: Goal) -> list[Estimate]:
    """Return every split at the highest rate at which it keeps the goal, the best first."""
    found = [_at_most(split, demand, goal) for split in splits(gpus, cards)]
    return sorted(found, key=lambda each: -each.rate)


def _at_most(split: Split, demand: Demand, goal: Goal) -> Estimate:
    low, high = 0.0, 1.0
    while estimate(split, demand, goal, high).attained >= goal.attainment and high < 1e6:
        low, high = high, high * 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if estimate(split, demand, goal, middle).attained >= goal.attainment:
            low = middle
        else:
            high = middle
    kept, beyond = estimate(split, demand, goal, low), estimate(split, demand, goal, high * 1.02)
    lost = {
        "prefill": kept.ttft_kept - beyond.ttft_kept,
        "decode": kept.tpot_kept - beyond.tpot_kept,
    }
    short = beyond.short or max(lost, key=lambda role: lost[role])
    return Estimate(
        split, low, kept.ttft_kept, kept.tpot_kept, kept.prefill_use, kept.running, short
    )


def estimate(split: Split, demand: Demand, goal: Goal, rate: float) -> Estimate:
    """Return what a split does at so many requests a second."""
    if not split.prefill:
        return _colocated(split, demand, goal, rate)
    prompts = _prompts(split.prefill_card, demand)
    use, ttft_kept = _first_tokens(prompts, [0.0] * len(prompts), split.prefill, rate, goal)
    moved = max(1, round(sum(prompt for prompt, _, _ in demand.lengths) / len(demand.lengths)))
    step_tokens = split.prefill_card.step_tokens
    exposed = split.decode_card.fetch_ms(min(moved, step_tokens)) / max(1.0, demand.output - 1)
    running, tpot_kept, short = _batch(
        split.decode_card, demand, rate / split.decode, goal.tpot_ms - exposed, 0.0, 0.0
    )
    return Estimate(
        split, rate, ttft_kept, tpot_kept, use, running, "prefill" if use >= 1 else short
    )


def _colocated(split: Split, demand: Demand, goal: Goal, rate: float) -> Estimate:
    card, each = split.decode_card, rate / split.decode
    prompts = _prompts(card, demand)
    weights_ms = min(card.chunk_ms(1), card.step_ms(1, 1))
    added = [max(0.0, ms - weights_ms) for ms in prompts]
    use = each * sum(added) / len(added) / 1e3
    if use >= 1:
        return Estimate(split, rate, 0.0, 0.0, use, 0.0, "prefill")
    spread = each / 1e3 * sum(ms * ms for ms in added) / len(added)
    running, tpot_kept, short = _batch(card, demand, each, goal.tpot_ms, use, spread)
    step = card.step_ms(max(1.0, running), max(1.0, running) * demand.context)
    # Until the step that runs has ended, and with the decodes in each of its own.
    beside = [step / 2 + step - weights_ms for _ in prompts]
    used, ttft_kept = _first_tokens(prompts, beside, split.decode, rate, goal)
    return Estimate(split, rate, ttft_kept, tpot_kept, max(use, used), running, short)


def token_ms(card: RateCard, context: float, tpot_ms: float) -> float:
    """Return a token's share of a step of the largest batch whose steps keep a target."""
    most = min(card.max_num_seqs, int(card.kv_tokens / max(1.0, context)))
    low, high = 1, max(1, most)
    while low < high:  # steps never get shorter as batches get larger
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if card.step_ms(middle, middle * context) <= tpot_ms
            else (low, middle - 1)
        )
    return card.step_ms(low, low * context) / low


def _prompts(card: RateCard, demand: Demand) -> list[float]:
    return [card.prompt_ms(prompt, cached) for prompt, cached, _ in demand.lengths]


def _first_tokens(
    prompts: Sequence[float], beside: Sequence[float], nodes: int, rate: float, goal: Goal
) -> tuple[float, float]:
    mean = sum(prompts) / len(prompts)
    use = rate * mean / 1e3 / nodes
    if use >= 1:
        return use, 0.0
    waits = _erlang_c(nodes, use * nodes)
    variation = sum(ms * ms for ms in prompts) / len(prompts) / mean**2 - 1
    wait_ms = waits / (nodes * (1 - use)) * mean * (1 + variation) / 2
    kept = 0.0
    for ms, more in zip(prompts, beside, strict=True):
        left = goal.ttft_ms - NETWORK_MS - ms - more
        if left >= 0:
            kept += 1 - (waits * math.exp(-left * waits / wait_ms) if wait_ms else 0.0)
    return use, kept / len(prompts)


def _erlang_c(servers: int, offered: float) -> float:
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def _batch(
    card: RateCard, demand: Demand, rate: float, tpot_ms: float, use: float, spread: float
) -> tuple[float, float, str]:
    output, context = demand.output, demand.context
    room = min(float(card.max_num_seqs), card.kv_tokens / (context * 1.05))
    if card.step_ms(1, context) > tpot_ms:
        return 1.0, 0.0, "decode"

    def step_ms(running: float) -> float:
        return card.step_ms(max(1.0, running), max(1.0, running) * context) / (1 - use)

    def asked(running: float) -> float:
        return rate * output * step_ms(running) / 1e3

    if asked(room) > room:
        return (
            room,
            0.0,
            "KV memory" if room < card.max_num_seqs and step_ms(room) <= tpot_ms else "decode",
        )
    low, high = 0.0, room
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if asked(middle) > middle else (low, middle)
    # How many run is about Poisson, and what prompts take of an answer's time spreads, too.
    more = step_ms(high + 1) - step_ms(high)
    sigma = math.sqrt(high * more**2 + spread * step_ms(high) / max(1.0, output))
    over = tpot_ms - step_ms(high)
    kept = (over >= 0) * 1.0 if not sigma else 0.5 * (1 + math.erf(over / sigma / math.sqrt(2)))
    return high, kept, ""
