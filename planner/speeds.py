"""How long steps and transfers take on a simulated node, in milliseconds, from a rate card.

Chunks of several prompts count as one of all their tokens, with the attention that each has to
itself. Where steps are launched ahead, the longer of the device's and the launch's time counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from kvrelay.planner.rate_card import DecodePoint, PrefillPoint, RateCard, TransferPoint

__all__ = ["H200", "Speeds", "slowed"]

_BY_LAUNCH = 1.25
"""A step that took so many times what its device needs was waiting for its launch."""


class Speeds:
    """A card's speeds, for all nodes that have it."""

    def __init__(self, card: RateCard) -> None:
        self.card = card
        self.ahead = card.ahead
        self.kv_tokens, self.step_tokens, self.max_num_seqs = (
            card.kv_tokens,
            card.step_tokens,
            card.max_num_seqs,
        )
        self._decode = _lines([(each.requests, each.context, each.ms) for each in card.decode])
        self._steps: dict[int, tuple[list[float], list[float]]] = {}
        needed = [self._of_device(each) for each in card.prefill]
        measured = list(zip(card.prefill, needed, strict=True))
        self._prefill = _lines([(each.context, each.tokens, ms) for each, ms in measured])
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

    def _of_device(self, point: PrefillPoint) -> float:
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
        """Return the time of a decode step of so many requests with so much KV together."""
        if running <= 0:
            return 0.0
        below = int(running)
        ms = _on(*self._line_of(max(1, below)), context / running)
        part = running - below
        return (
            ms
            if not part or not below
            else ms + (_on(*self._line_of(below + 1), context / running) - ms) * part
        )

    def fetch_ms(self, tokens: int) -> float:
        return self.card.fetch_ms(tokens)

    def _piece_ms(self, count: int, behind: int) -> float:
        lines, (places, values) = self._prefill
        if len(lines) == 1 or behind <= lines[0]:
            return max(0.0, _on(places[0], values[0], count))
        right = min(max(1, bisect_right(lines, behind)), len(lines) - 1)
        low, high = (
            _on(places[right - 1], values[right - 1], count),
            _on(places[right], values[right], count),
        )
        return max(
            0.0,
            low + (high - low) * (behind - lines[right - 1]) / (lines[right] - lines[right - 1]),
        )

    def _line_of(self, running: int) -> tuple[list[float], list[float]]:
        found = self._steps.get(running)
        if found is None:
            places = sorted({place for line in self._decode[1][0] for place in line})
            found = self._steps[running] = (
                places,
                [self.card.step_ms(running, running * at) for at in places],
            )
        return found

    def _measured_mixed(self) -> tuple[_Lines | None, _Lines | None]:
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
        lines, (places, values) = self._prefill
        if len(lines) < 2:
            return 0.0
        count = places[-1][-1]
        more = values[-1][-1] - _on(places[0], values[0], count)
        return max(0.0, more / (count * (lines[-1] - lines[0])))


_Lines = tuple[list[float], tuple[list[list[float]], list[list[float]]]]


def _lines(points: Sequence[tuple[float, float, float]]) -> _Lines:
    lines: dict[float, dict[float, float]] = {}
    for line, place, ms in points:
        lines.setdefault(line, {})[place] = ms
    ordered = [(line, sorted(of.items())) for line, of in sorted(lines.items())]
    return (
        [line for line, _ in ordered],
        (
            [[place for place, _ in of] for _, of in ordered],
            [[ms for _, ms in of] for _, of in ordered],
        ),
    )


def _lines_if(points: Sequence[tuple[float, float, float]]) -> _Lines | None:
    return _lines(points) if points else None


def _between(lines: _Lines, line: float, at: float) -> float:
    numbers, (places, values) = lines
    right = bisect_right(numbers, line)
    low, high = max(0, right - 1), min(right, len(numbers) - 1)
    first, last = (_within(at, places[each], values[each]) for each in (low, high))
    span = numbers[high] - numbers[low]
    return first + (last - first) * (line - numbers[low]) / span if span else first


def _on(places: Sequence[float], values: Sequence[float], at: float) -> float:
    if at <= places[0] or len(places) == 1:
        return values[0]
    right = min(max(1, bisect_right(places, at)), len(places) - 1)
    left, low = places[right - 1], values[right - 1]
    return max(0.0, low + (values[right] - low) * (at - left) / (places[right] - left))


def _within(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    clamped = min(at, places[-1])
    right = min(max(1, bisect_right(places, clamped)), len(places) - 1)
    if clamped <= places[0] or right == 0:
        return values[0]
    left, low = places[right - 1], values[right - 1]
    return low + (values[right] - low) * (clamped - left) / (places[right] - left)


def slowed(card: RateCard, factor: float) -> RateCard:
    """Return the card of a node on which everything takes so many times as long."""
    return msgspec.structs.replace(
        card,
        prefill=[msgspec.structs.replace(each, ms=each.ms * factor) for each in card.prefill],
        decode=[msgspec.structs.replace(each, ms=each.ms * factor) for each in card.decode],
        mixed=[msgspec.structs.replace(each, ms=each.ms * factor) for each in card.mixed],
        transfer={
            name: [msgspec.structs.replace(each, ms=each.ms * factor) for each in points]
            for name, points in card.transfer.items()
        },
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
        PrefillPoint(tokens, context, _h200_chunk_ms(tokens, context))
        for context in (0, 131_072)
        for tokens in (1, 122, 256, *range(512, 8_193, 512))
    ],
    decode=[
        DecodePoint(requests, context, 3.95 + 0.0105 * requests + 3.1e-5 * requests * context)
        for requests in (1, 256)
        for context in (0, 131_072)
    ],
    # 512 MiB, 4,096 tokens, in 2 ms.
    transfer={"direct": [TransferPoint(0, 0.5), TransferPoint(65_536, 0.5 + 0.00037 * 65_536)]},
)
