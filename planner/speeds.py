"""How long steps and transfers take on a simulated node, in milliseconds, from a rate card.

Chunks of several prompts count as one of all their tokens, with the attention that each has to
itself. Where steps are launched ahead, the longer of the device's and the launch's time counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvrelay.planner.rate_card import Lines, Point, RateCard, along, lines_of, plane

__all__ = ["H200", "Speeds", "slowed"]

_ASK_MS, _FAR = 2.0, 65_536
_BY_LAUNCH = 1.25
"""A step that took so many times what its device needs was waiting for its launch."""


class Speeds:
    def __init__(self, card: RateCard) -> None:
        self.card = card
        self.ahead = card.ahead
        self.kv_tokens, self.step_tokens, self.max_num_seqs = (
            card.kv_tokens,
            card.step_tokens,
            card.max_num_seqs,
        )
        self._contexts: list[float] = sorted({each.context for each in card.decode})
        self._steps: dict[int, tuple[list[float], list[float]]] = {}
        needed = [self._of_device(each) for each in card.prefill]
        measured = list(zip(card.prefill, needed, strict=True))
        self._prefill = lines_of([(each.context, each.tokens, ms) for each, ms in measured])
        # Of steps that wait for their launch, how long that takes; None: none of them does.
        self._launches = _lines_if(
            [
                (0, each.tokens, each.ms)
                for each, ms in measured
                if not each.context and each.ms > _BY_LAUNCH * ms
            ]
        )
        self._weights = min(self._piece_ms(1, 0), self._line_of(1)[1][0])
        self._pair = self._attention()
        self._seams, self._mixed_launches = self._measured_mixed()

    def _of_device(self, point: Point) -> float:
        if not self.ahead:
            return point.ms
        longer = [
            each
            for each in self.card.prefill
            if each.context == point.context and each.tokens >= point.tokens
        ]
        in_proportion = min(each.ms * point.tokens / each.tokens for each in longer)
        return min(point.ms, max(in_proportion, self.card.step_ms(1, point.context)))

    def chunk_ms(self, pieces: Sequence[tuple[int, int]], launched_ms: float = 0.0) -> float:
        """Return the time of a step of (tokens, tokens before them), launched `launched_ms` ago."""
        ms = self._chunk_ms(pieces)
        return max(ms, self.launch_ms(0, pieces) - launched_ms) if self._launches else ms

    def _chunk_ms(self, pieces: Sequence[tuple[int, int]]) -> float:
        if len(pieces) == 1:
            return self._piece_ms(*pieces[0])
        tokens = squares = 0
        behind_ms = 0.0
        for count, behind in pieces:
            tokens += count
            squares += count * count
            if behind:
                behind_ms += self._piece_ms(count, behind) - self._piece_ms(count, 0)
        return self._piece_ms(tokens, 0) - self._pair * (tokens * tokens - squares) / 2 + behind_ms

    def launch_ms(self, running: float, pieces: Sequence[tuple[int, int]]) -> float:
        """Return the time of a step's launch; 0 if it is never what is waited for."""
        launches = self._mixed_launches if running else self._launches
        return _between(launches, running, sum([count for count, _ in pieces])) if launches else 0.0

    def beside_ms(self, pieces: Sequence[tuple[int, int]]) -> float:
        """Return by how much longer a decode step is that computes these, too."""
        return max(0.0, self._chunk_ms(pieces) - self._weights)

    def mixed_ms(
        self,
        running: float,
        context: float,
        pieces: Sequence[tuple[int, int]],
        launched_ms: float = 0.0,
    ) -> float:
        """Return the time of a step that decodes and computes, launched `launched_ms` ago."""
        ms = self.step_ms(running, context) + self.beside_ms(pieces)
        if self._seams:
            ms = max(0.0, ms + _between(self._seams, running, sum([count for count, _ in pieces])))
        return (
            max(ms, self.launch_ms(running, pieces) - launched_ms) if self._mixed_launches else ms
        )

    def prompt_ms(self, tokens: int, cached: int = 0) -> float:
        """Return the time of a prompt alone, of which some is cached."""
        total = 0.0
        while cached < tokens:
            count = min(self.step_tokens, tokens - cached)
            total += self.chunk_ms([(count, cached)])
            cached += count
        return total

    def step_ms(self, running: float, context: float) -> float:
        if running <= 0:
            return 0.0
        below = int(running)
        ms = along(*self._line_of(max(1, below)), context / running)
        part = running - below
        return (
            ms
            if not part or not below
            else ms + (along(*self._line_of(below + 1), context / running) - ms) * part
        )

    def fetch_ms(self, tokens: int) -> float:
        return self.card.fetch_ms(tokens)

    @property
    def pull_ms(self) -> tuple[float, float]:
        """Return the time of a read from another node: once, with the ask, and per token."""
        once = self.fetch_ms(1)
        return _ASK_MS + once, (self.fetch_ms(_FAR) - once) / _FAR

    def _piece_ms(self, count: int, behind: int) -> float:
        return plane(self._prefill, behind, count)

    def _line_of(self, running: int) -> tuple[list[float], list[float]]:
        found = self._steps.get(running)
        if found is None:
            found = self._steps[running] = (
                self._contexts,
                [self.card.step_ms(running, running * at) for at in self._contexts],
            )
        return found

    def _measured_mixed(self) -> tuple[Lines | None, Lines | None]:
        seams, launches = [], []
        for each in self.card.mixed:
            parts = self.step_ms(each.requests, each.requests * each.context) + self.beside_ms(
                [(each.tokens, 0)]
            )
            if self.ahead and each.ms > _BY_LAUNCH * parts:
                launches.append((each.requests, each.tokens, each.ms))
            else:
                seams.append((each.requests, each.tokens, each.ms - parts))
        return _lines_if(seams), _lines_if(launches)

    def _attention(self) -> float:
        lines, of = self._prefill
        if len(lines) < 2:
            return 0.0
        places, values = of[-1]
        more = values[-1] - along(*of[0], places[-1])
        return max(0.0, more / (places[-1] * (lines[-1] - lines[0])))


def _lines_if(points: Sequence[tuple[float, float, float]]) -> Lines | None:
    return lines_of(points) if points else None


def _between(lines: Lines, line: float, at: float) -> float:
    # Between two lines and two places, or at the nearest of them.
    numbers, of = lines
    each = [along(*those, min(at, those[0][-1]), -math.inf) for those in of]
    return along(numbers, each, min(line, numbers[-1]), -math.inf)


def slowed(card: RateCard, factor: float) -> RateCard:
    """Return the card of a node on which everything takes so many times as long."""

    def times(points: Sequence[Point]) -> list[Point]:
        return [msgspec.structs.replace(each, ms=each.ms * factor) for each in points]

    return msgspec.structs.replace(
        card,
        prefill=times(card.prefill),
        decode=times(card.decode),
        mixed=times(card.mixed),
        transfer={name: times(points) for name, points in card.transfer.items()},
        max_gap_ms=card.max_gap_ms * factor,
    )


# --- an H200 with a model of 8 billion parameters in bf16, fitted to benchmarks/RESULTS.md: a
# prompt of 4,096 tokens at 43,400 tokens/s; decode steps of 3.99, 5.29 and 9.30 ms at 1, 32 and 128
# requests of 1k context and of 8.3 ms at 32 of 4k (measured: 4.03, 5.18, 9.2 to 9.5, 8.1). 256
# requests of 384 would take 9.6 (measured 11.4).


def _h200_chunk_ms(tokens: int, context: int) -> float:
    return max(4.0, 1.5 + 0.0205 * tokens) + 1.05e-6 * tokens * (context + tokens / 2)


H200 = RateCard(
    model="8 billion parameters, bf16",
    hardware="H200, fitted",
    kvrelay="",
    measured_at="",
    kv_tokens=800_000,
    block_size=64,
    max_num_seqs=256,
    step_tokens=8_192,
    prefill=[
        Point(_h200_chunk_ms(tokens, context), tokens, context)
        for context in (0, 131_072)
        for tokens in (1, 122, 256, *range(512, 8_193, 512))
    ],
    decode=[
        Point(
            3.95 + 0.0105 * requests + 3.1e-5 * requests * context,
            context=context,
            requests=requests,
        )
        for requests in (1, 256)
        for context in (0, 131_072)
    ],
    # 512 MiB, 4,096 tokens, in 2 ms.
    transfer={
        "direct": [Point(0.5), Point(0.5 + 0.00037 * 65_536, 65_536)],
        # Not measured: 40 GB/s from host memory, 4 from files.
        "host": [Point(2.0), Point(2.0 + 0.0033 * 65_536, 65_536)],
        "store": [Point(5.0), Point(5.0 + 0.033 * 65_536, 65_536)],
    },
    kv_token_bytes=131_072,
)
