"""How long things take on a simulated node, read from a rate card, with what a card does not say: steps of several
prompts, and steps of prompts and decodes together. Times are milliseconds.

A step that decodes and computes chunks reads the weights once. Chunks of several prompts count as one of all their
tokens, with the attention that each has to itself. Where nobody has measured, H200 stands for a card.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from planning.rate_card import DecodePoint, PrefillPoint, RateCard, TransferPoint

__all__ = ["H200", "Speeds", "slowed"]


class Speeds:
    """Of all nodes with this card."""

    def __init__(self, card: RateCard) -> None:
        self.card = card
        self.kv_tokens, self.step_tokens, self.max_running = card.kv_tokens, card.step_tokens, card.max_running
        self._prefill = _lines([(each.context, each.tokens, each.ms) for each in card.prefill])
        self._decode = _lines([(each.requests, each.context, each.ms) for each in card.decode])
        self._steps: dict[int, tuple[list[float], list[float]]] = {}
        self._weights = min(self._piece_ms(1, 0), self._line_of(1)[1][0])
        self._pair = self._attention()
        self._seams = self._measured_seams()

    def chunk_ms(self, pieces: Sequence[tuple[int, int]]) -> float:
        """One step that computes, of each prompt, so many tokens behind so many."""
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

    def beside_ms(self, pieces: Sequence[tuple[int, int]]) -> float:
        """By how much longer a decode step is that computes these, too."""
        return max(0.0, self.chunk_ms(pieces) - self._weights)

    def mixed_ms(self, running: float, context: float, pieces: Sequence[tuple[int, int]]) -> float:
        """A decode step as in step_ms() that computes these, too; what was measured of such steps is in it."""
        ms = self.step_ms(running, context) + self.beside_ms(pieces)
        return max(0.0, ms + self._seam_ms(running, sum([count for count, _ in pieces]))) if self._seams else ms

    def prompt_ms(self, tokens: int, cached: int = 0) -> float:
        """A prompt alone, of which some is cached, in as many steps as it needs."""
        total = 0.0
        while cached < tokens:
            count = min(self.step_tokens, tokens - cached)
            total += self._piece_ms(count, cached)
            cached += count
        return total

    def step_ms(self, running: float, context: float) -> float:
        """A decode step of so many requests that have so many tokens of KV together."""
        if running <= 0:
            return 0.0
        below = int(running)
        ms = _on(*self._line_of(max(1, below)), context / running)
        part = running - below
        return ms if not part or not below else ms + (_on(*self._line_of(below + 1), context / running) - ms) * part

    def fetch_ms(self, tokens: int) -> float:
        """The KV of so many tokens, from node to node."""
        return self.card.fetch_ms(tokens)

    def _piece_ms(self, count: int, behind: int) -> float:
        """By straight lines between what was measured, along tokens, then along context."""
        lines, (places, values) = self._prefill
        if len(lines) == 1 or behind <= lines[0]:
            return max(0.0, _on(places[0], values[0], count))
        right = min(max(1, bisect_right(lines, behind)), len(lines) - 1)
        low, high = _on(places[right - 1], values[right - 1], count), _on(places[right], values[right], count)
        return max(0.0, low + (high - low) * (behind - lines[right - 1]) / (lines[right] - lines[right - 1]))

    def _line_of(self, running: int) -> tuple[list[float], list[float]]:
        """Times by context of each, of steps of so many requests."""
        found = self._steps.get(running)
        if found is None:
            places = sorted({place for line in self._decode[1][0] for place in line})
            found = self._steps[running] = places, [self.card.step_ms(running, running * at) for at in places]
        return found

    def _measured_seams(self) -> list[tuple[int, list[int], list[float]]]:
        """By requests, and then by tokens of the chunk: by how much longer a mixed step took than its two parts say."""
        seams: dict[int, dict[int, float]] = {}
        for each in self.card.mixed:
            parts = self.step_ms(each.requests, each.requests * each.context) + self.beside_ms([(each.tokens, 0)])
            seams.setdefault(each.requests, {})[each.tokens] = each.ms - parts
        return [(requests, sorted(of), [of[at] for at in sorted(of)]) for requests, of in sorted(seams.items())]

    def _seam_ms(self, running: float, tokens: int) -> float:
        """Straight between what was measured, and beyond it as there."""
        at = bisect_right([requests for requests, _, _ in self._seams], running)
        low, high = self._seams[max(0, at - 1)], self._seams[min(at, len(self._seams) - 1)]
        first, last = (_within(tokens, places, values) for _, places, values in (low, high))
        span = high[0] - low[0]
        return first + (last - first) * (running - low[0]) / span if span else first

    def _attention(self) -> float:
        """Milliseconds of a token and a token before it, where it was measured behind any context."""
        lines, (places, values) = self._prefill
        if len(lines) < 2:
            return 0.0
        count = places[-1][-1]
        more = values[-1][-1] - _on(places[0], values[0], count)
        return max(0.0, more / (count * (lines[-1] - lines[0])))


_Lines = tuple[list[float], tuple[list[list[float]], list[list[float]]]]


def _lines(points: Sequence[tuple[float, float, float]]) -> _Lines:
    """Points (line, place, ms) as lines in order, places and times of each."""
    lines: dict[float, dict[float, float]] = {}
    for line, place, ms in points:
        lines.setdefault(line, {})[place] = ms
    ordered = [(line, sorted(of.items())) for line, of in sorted(lines.items())]
    return (
        [line for line, _ in ordered],
        ([[place for place, _ in of] for _, of in ordered], [[ms for _, ms in of] for _, of in ordered]),
    )


def _on(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """As planning/rate_card.py reads a line: between points straight, beyond the last one as between the last two."""
    if at <= places[0] or len(places) == 1:
        return values[0]
    right = min(max(1, bisect_right(places, at)), len(places) - 1)
    left, low = places[right - 1], values[right - 1]
    return max(0.0, low + (values[right] - low) * (at - left) / (places[right] - left))


def _within(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """As _on(), but beyond the last place as at it."""
    clamped = min(at, places[-1])
    right = min(max(1, bisect_right(places, clamped)), len(places) - 1)
    if clamped <= places[0] or right == 0:
        return values[0]
    left, low = places[right - 1], values[right - 1]
    return low + (values[right] - low) * (clamped - left) / (places[right] - left)


def slowed(card: RateCard, factor: float) -> RateCard:
    """A node on which everything takes so many times as long."""
    return msgspec.structs.replace(
        card,
        prefill=[msgspec.structs.replace(each, ms=each.ms * factor) for each in card.prefill],
        decode=[msgspec.structs.replace(each, ms=each.ms * factor) for each in card.decode],
        mixed=[msgspec.structs.replace(each, ms=each.ms * factor) for each in card.mixed],
        transfer={
            name: [msgspec.structs.replace(each, ms=each.ms * factor) for each in points]
            for name, points in card.transfer.items()
        },
    )


# --- an H200 with a model of 8 billion parameters in bf16, fitted to benchmarks/RESULTS.md: a prompt of 4,096 tokens at
# 43,400 tokens/s; decode steps of 3.99, 5.29 and 9.30 ms at 1, 32 and 128 requests of 1k context and of 8.3 ms at 32 of
# 4k (measured: 4.03, 5.18, 9.2 to 9.5, 8.1). 256 requests of 384 would take 9.6 (measured 11.4).


def _h200_chunk_ms(tokens: int, context: int) -> float:
    """A step reads all weights, however short the prompt; each token attends to all before it."""
    return max(4.0, 1.5 + 0.0205 * tokens) + 1.05e-6 * tokens * (context + tokens / 2)


H200 = RateCard(
    model="8 billion parameters, bf16",
    hardware="H200, fitted",
    kvrelay="",
    measured_at="",
    kv_tokens=800_000,
    block_tokens=64,
    max_running=256,
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
