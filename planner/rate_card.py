"""A rate card: how fast a node of one kind is, by `kvrelay profile`. Pure.

Times are linear between two measured points, and beyond the last two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from kvrelay.wire.errors import ConfigError
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.step_costs import StepCosts, fitted_costs

__all__ = [
    "DecodePoint",
    "MixedPoint",
    "PrefillPoint",
    "RateCard",
    "TransferPoint",
    "read_card",
    "write_card",
]

_VERSION = 1
_LEAST_CHUNK = 256
_BYTES = 1 << 20


class PrefillPoint(msgspec.Struct, frozen=True):
    """A step that computes `tokens` of one prompt behind `context` tokens."""

    tokens: int
    context: int
    ms: float


class DecodePoint(msgspec.Struct, frozen=True):
    """A step of `requests` that decode, each with `context` tokens of KV."""

    requests: int
    context: int
    ms: float


class MixedPoint(msgspec.Struct, frozen=True):
    """A step of `requests` that decode with `context` tokens each, and of `tokens` of a prompt."""

    requests: int
    context: int
    tokens: int
    ms: float


class TransferPoint(msgspec.Struct, frozen=True):
    """A transfer of the KV of `tokens` from one node to another, alone on its way."""

    tokens: int
    ms: float


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
    prefill: list[PrefillPoint]
    decode: list[DecodePoint]
    transfer: dict[str, list[TransferPoint]] = {}
    """Transfer times by connector, between nodes on one host unless `hardware` says otherwise."""
    tensor_parallel_size: int = 1
    mixed: list[MixedPoint] = []
    max_gap_ms: float = 50.0
    ahead: bool = False
    """Steps are launched while the ones before them run, as on a GPU: a step takes as long as the
    device or its launch, whichever is longer.
    """
    version: int = _VERSION

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

    def chunk_ms(self, tokens: int, context: int = 0) -> float:
        """Return the time of a step of `tokens` of a prompt behind `context` others."""
        return _plane(self._prefill_lines, context, tokens)

    def prompt_ms(self, tokens: int, cached: int = 0) -> float:
        """Return the time of a prompt alone, of which some is cached."""
        total = 0.0
        while cached < tokens:
            count = min(self.step_tokens, tokens - cached)
            total += self.chunk_ms(count, cached)
            cached += count
        return total

    def step_ms(self, requests: float, context: float) -> float:
        """Return the time of a decode step of so many requests with so much KV together."""
        return _plane(self._decode_lines, requests, context / requests) if requests else 0.0

    def fetch_ms(self, tokens: int, connector: str = "") -> float:
        """Return the time of a transfer by a connector, or by the fastest; 0 if none was measured."""
        measured = [
            points for name, points in self.transfer.items() if points and connector in ("", name)
        ]
        lines = [points for points in measured if len(points) > 1]
        if lines:
            return min(
                _line([(point.tokens, point.ms) for point in points], tokens) for points in lines
            )
        # Of one size nobody knows what a longer transfer takes: no less than in proportion, as far
        # as anybody can tell.
        alone = [points[0] for points in measured]
        return min(
            (each.ms * max(1.0, tokens / max(1, each.tokens)) for each in alone), default=0.0
        )

    @cached_property
    def _prefill_lines(self) -> list[tuple[float, list[tuple[float, float]]]]:
        return _lines([(point.context, point.tokens, point.ms) for point in self.prefill])

    @cached_property
    def _decode_lines(self) -> list[tuple[float, list[tuple[float, float]]]]:
        return _lines([(point.requests, point.context, point.ms) for point in self.decode])


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


def _lines(
    points: Sequence[tuple[float, float, float]],
) -> list[tuple[float, list[tuple[float, float]]]]:
    lines: dict[float, dict[float, float]] = {}
    for line, place, ms in points:
        lines.setdefault(line, {})[place] = ms
    return [(line, sorted(of.items())) for line, of in sorted(lines.items())]


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    right = min(max(1, bisect_right(points, (at, float("inf")))), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(0.0, y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def _plane(
    lines: Sequence[tuple[float, Sequence[tuple[float, float]]]], line: float, at: float
) -> float:
    return _line([(place, _line(points, at)) for place, points in lines], line)
