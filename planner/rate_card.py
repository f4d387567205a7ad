"""A rate card: how fast a node of one kind is, by `kvrelay profile`.

Times are milliseconds, linear between two measured points, and beyond the last two. Chunks of
several prompts count as one of all their tokens, with the attention that each has to itself. Where
steps are launched ahead, the longer of the device's and the launch's time counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from kvrelay.wire.errors import ConfigError
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.step_costs import StepCosts, fitted_costs

__all__ = ["TIERS", "Point", "RateCard", "read_card", "write_card"]

TIERS = ("host", "store")
"""Where KV lies below a node's pool."""
_VERSION = 1
_LEAST_CHUNK = 256
_BYTES = 1 << 20
_ASK_MS, _FAR = 2.0, 65_536
_BY_LAUNCH = 1.25
"""A step that took so many times what its device needs was waiting for its launch."""

Piece = tuple[int, int]
"""A chunk of a step: its tokens, and those before them."""
Pieces = Sequence[Piece]


class Point(msgspec.Struct, frozen=True):
    """A step: `requests` that decode with `context` tokens each, `tokens` of a prompt, or both.

    Of a prompt alone `context` is before it; of a transfer there are `tokens`.
    """

    ms: float
    tokens: int = 0
    context: int = 0
    requests: int = 0


class RateCard(msgspec.Struct, frozen=True, dict=True):
    """A node's speed: a model on so many GPUs; milliseconds, medians of several runs."""

    model: str
    hardware: str
    kvrelay: str
    measured_at: str
    """ISO 8601, UTC."""
    kv_tokens: int
    block_size: int
    max_num_seqs: int
    step_tokens: int
    """Prompt tokens that a step computes at most, beside decodes."""
    prefill: list[Point]
    decode: list[Point]
    transfer: dict[str, list[Point]] = {}
    """Transfer times by connector, and from `host` memory and the `store`; edit them for another
    network.
    """
    tensor_parallel_size: int = 1
    mixed: list[Point] = []
    max_gap_ms: float = 50.0
    ahead: bool = False
    """Steps are launched while the ones before them run, as on a GPU: a step takes as long as the
    device or its launch, whichever is longer.
    """
    version: int = _VERSION
    kv_token_bytes: int = 0
    """KV of a token; 0: not told."""
    shapes: tuple[int, ...] = ()
    """Ascending numbers of rows to which steps with prompts are padded."""

    @cached_property
    def costs(self) -> StepCosts:
        decodes = [
            (each.requests, each.requests * each.context, 0, 0, each.ms) for each in self.decode
        ]
        prompts = [
            (0, 0, each.tokens, each.context, each.ms)
            for each in self.prefill
            if not each.context or each.tokens >= _LEAST_CHUNK
        ]
        mixed = [
            (each.requests, each.requests * each.context, each.tokens, 0, each.ms)
            for each in self.mixed
        ]
        return fitted_costs([*decodes, *prompts, *mixed])

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size

    def chunk_ms(self, pieces: Pieces, launched_ms: float = 0.0) -> float:
        """Return the time of a step of chunks, launched `launched_ms` ago."""
        ms = self._chunk_ms(pieces) + self._padding_ms(0, pieces)
        return max(ms, self.launch_ms(0, pieces) - launched_ms) if self._launches else ms

    def _padding_ms(self, running: float, pieces: Pieces) -> float:
        rows = running + sum([count for count, _ in pieces])
        at = bisect_left(self.shapes, rows)
        return self.costs.prompt_token * (self.shapes[at] - rows) if at < len(self.shapes) else 0.0

    def _chunk_ms(self, pieces: Pieces) -> float:
        if len(pieces) == 1:
            return self._piece_ms(*pieces[0])
        tokens = squares = 0
        behind_ms = 0.0
        for count, behind in pieces:
            tokens += count
            squares += count * count
            if behind:
                behind_ms += self._piece_ms(count, behind) - self._piece_ms(count, 0)
        return (
            self._piece_ms(tokens, 0) - self._pair_ms * (tokens * tokens - squares) / 2 + behind_ms
        )

    def launch_ms(self, running: float, pieces: Pieces) -> float:
        """Return the time of a step's launch; 0 if it is never what is waited for."""
        launches = self._mixed[1] if running else self._launches
        return _between(launches, running, sum([count for count, _ in pieces])) if launches else 0.0

    def mixed_ms(
        self, running: float, context: float, pieces: Pieces, launched_ms: float = 0.0
    ) -> float:
        """Return the time of a step that decodes and computes, launched `launched_ms` ago."""
        ms = self._parts_ms(running, context, pieces)
        seams, launches = self._mixed
        if seams:
            ms = max(0.0, ms + _between(seams, running, sum([count for count, _ in pieces])))
        return max(ms, self.launch_ms(running, pieces) - launched_ms) if launches else ms

    def _parts_ms(self, running: float, context: float, pieces: Pieces) -> float:
        beside_ms = max(0.0, self._chunk_ms(pieces) - self._weights_ms)
        return self.step_ms(running, context) + beside_ms + self._padding_ms(running, pieces)

    def prompt_ms(self, tokens: int, cached: int = 0) -> float:
        """Return the time of a prompt alone, of which some is cached."""
        total = 0.0
        while cached < tokens:
            count = min(self.step_tokens, tokens - cached)
            total += self.chunk_ms([(count, cached)])
            cached += count
        return total

    def step_ms(self, requests: float, context: float) -> float:
        """Return the time of a decode step of so many requests with so much KV together."""
        return plane(self._decode_lines, requests, context / requests) if requests else 0.0

    def fetch_ms(self, tokens: int) -> float:
        """Return the time of a transfer by the fastest connector; 0 if the card has none."""
        return min((along(*line, tokens) for line in self._transfer_lines), default=0.0)

    @property
    def pull_ms(self) -> tuple[float, float]:
        """Return the time of a read from another node: once, with the ask, and per token."""
        once = self.fetch_ms(1)
        return _ASK_MS + once, (self.fetch_ms(_FAR) - once) / _FAR

    def tier_ms(self, name: str) -> tuple[float, float]:
        """Return the time of a read from a tier: once, and per token. Raises ConfigError."""
        points = self.transfer.get(name, ())
        if len(points) < 2:
            raise ConfigError(
                f"the rate card has no two points of transfer {name!r}; profile again, or add them"
            )
        first, last = points[0], points[-1]
        each = (last.ms - first.ms) / (last.tokens - first.tokens)
        return first.ms - each * first.tokens, each

    @cached_property
    def _transfer_lines(self) -> list[Line]:
        return [
            lines_of((0, each.tokens, each.ms) for each in points)[1][0]
            for name, points in self.transfer.items()
            if points and name not in TIERS
        ]

    @cached_property
    def _decode_lines(self) -> Lines:
        return lines_of((each.requests, each.context, each.ms) for each in self.decode)

    @cached_property
    def _prefill_lines(self) -> Lines:
        return lines_of((each.context, each.tokens, self._of_device(each)) for each in self.prefill)

    def _of_device(self, point: Point) -> float:
        if not self.ahead:
            return point.ms
        in_proportion = min(
            each.ms * point.tokens / each.tokens
            for each in self.prefill
            if each.context == point.context and each.tokens >= point.tokens
        )
        return min(point.ms, max(in_proportion, self.step_ms(1, point.context)))

    def _piece_ms(self, count: int, behind: int) -> float:
        return plane(self._prefill_lines, behind, count)

    @cached_property
    def _weights_ms(self) -> float:
        return min(self._piece_ms(1, 0), self.step_ms(1, min(each.context for each in self.decode)))

    @cached_property
    def _pair_ms(self) -> float:
        lines, of = self._prefill_lines
        if len(lines) < 2:
            return 0.0
        places, values = of[-1]
        more = values[-1] - along(*of[0], places[-1])
        return max(0.0, more / (places[-1] * (lines[-1] - lines[0])))

    @cached_property
    def _launches(self) -> Lines | None:
        # Of steps that wait for their launch, how long that takes; None: none of them does.
        return _lines_if(
            (0, each.tokens, each.ms)
            for each in self.prefill
            if not each.context and each.ms > _BY_LAUNCH * self._of_device(each)
        )

    @cached_property
    def _mixed(self) -> tuple[Lines | None, Lines | None]:
        # What mixed steps take beyond their parts, and the launches of those that wait for them.
        seams, launches = [], []
        for each in self.mixed:
            parts = self._parts_ms(each.requests, each.requests * each.context, [(each.tokens, 0)])
            if self.ahead and each.ms > _BY_LAUNCH * parts:
                launches.append((each.requests, each.tokens, each.ms))
            else:
                seams.append((each.requests, each.tokens, each.ms - parts))
        return _lines_if(seams), _lines_if(launches)


def read_card(path: Path) -> RateCard:
    """Read a card. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(_BYTES + 1)
        card = msgspec.json.decode(raw, type=RateCard)
    except OSError as why:
        raise ConfigError(
            f"the rate card {path} cannot be read: {why}; make one with kvrelay profile"
        ) from why
    except MALFORMED as why:
        raise ConfigError(f"{path} is no rate card: {why}; make one with kvrelay profile") from why
    if card.version != _VERSION:
        raise ConfigError(
            f"the rate card {path} has version {card.version}, and this release reads {_VERSION}; "
            f"profile again"
        )
    if not card.prefill or not card.decode:
        raise ConfigError(
            f"the rate card {path} has no points for prefill or for decode; profile again"
        )
    return card


def write_card(card: RateCard, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")


Line = tuple[list[float], list[float]]
"""Places, and the values there."""
Lines = tuple[list[float], list[Line]]
"""Numbers of lines, and the lines."""


def lines_of(points: Iterable[tuple[float, float, float]]) -> Lines:
    """Return (line, place, value) as lines."""
    lines: dict[float, dict[float, float]] = {}
    for line, place, ms in points:
        lines.setdefault(line, {})[place] = ms
    numbers = sorted(lines)
    places = [sorted(lines[line]) for line in numbers]
    return numbers, [
        (those, [lines[line][place] for place in those])
        for line, those in zip(numbers, places, strict=True)
    ]


def along(places: Sequence[float], values: Sequence[float], at: float, least: float = 0.0) -> float:
    """Return the value at a place: linear between two places, and beyond the last two."""
    if at <= places[0] or len(places) == 1:
        return values[0]
    right = min(max(1, bisect_right(places, at)), len(places) - 1)
    left, low = places[right - 1], values[right - 1]
    return max(least, low + (values[right] - low) * (at - left) / (places[right] - left))


def plane(lines: Lines, line: float, at: float) -> float:
    """Return the value at a place of a line, which may lie between two lines or beyond the last."""
    numbers, of = lines
    right = min(max(1, bisect_right(numbers, line)), len(numbers) - 1)
    if line <= numbers[0] or right < 1:
        return max(0.0, along(*of[0], at))
    near = slice(right - 1, right + 1)
    return along(numbers[near], [along(*each, at) for each in of[near]], line)


def _lines_if(points: Iterable[tuple[float, float, float]]) -> Lines | None:
    found = lines_of(points)
    return found if found[0] else None


def _between(lines: Lines, line: float, at: float) -> float:
    # Between two lines and two places, or at the nearest of them.
    numbers, of = lines
    each = [along(*those, min(at, those[0][-1]), -math.inf) for those in of]
    return along(numbers, each, min(line, numbers[-1]), -math.inf)
