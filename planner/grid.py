"""Which sizes of steps to measure for a rate card, coarse ones first, so that one may stop
anywhere.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Limits", "Unit", "mixed_sizes", "sizes_of_transfers", "units"]

_FEWEST_TOKENS = 16
_FEWEST_CONTEXT = 32
# Time grows linearly with what is there already, so few contexts say it all.
_CONTEXTS = [4**power for power in range(4, 12)]
_TILES = 64
"""From so many requests on a step takes longer by leaps, behind each power of two, as a row more is
a tile more: on an H200 64, 72 and 128 requests of 640 tokens take 5.5, 6.4 and 7.5 ms.
"""
_LEAP = 8
_MIXED_CONTEXT = 1_024
_MIXED_PARTS = (128, 16, 4)  # of a step's tokens; and all of them
_LONGEST_TRANSFER = 32_768
_TRANSFER_STEP = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's limits, in tokens."""

    max_model_len: int
    kv_tokens: int
    block_size: int
    max_num_seqs: int
    step_tokens: int
    prompts_at_once: int
    """Prompts in the pool while a prefill is measured."""
    decode_steps: int
    """Tokens by which contexts grow while a decode is measured."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A set of points measured together; every card has level 0, higher levels refine it."""

    level: int
    kind: Literal["prefill", "decode"]
    points: tuple[tuple[int, int], ...]
    """(tokens, context) of a prefill, (requests, context of each) of a decode."""


def units(limits: Limits) -> list[Unit]:
    prefill = [
        Unit(level, "prefill", tuple((tokens, context) for tokens in those))
        for level, context, those in _refined(_prefill_lines(limits))
    ]
    decode = [
        Unit(level, "decode", tuple((requests, context) for context in those))
        for level, requests, those in _refined(_decode_lines(limits))
    ]
    return sorted([*prefill, *decode], key=lambda unit: unit.level)


def sizes_of_transfers(block_size: int, longest: int, most_blocks: int) -> list[int]:
    most = max(1, min(-(-min(longest, _LONGEST_TRANSFER) // block_size), most_blocks))
    sizes = [1]
    while sizes[-1] * _TRANSFER_STEP < most:
        sizes.append(sizes[-1] * _TRANSFER_STEP)
    return sorted({*sizes, most})


def mixed_sizes(limits: Limits) -> list[tuple[int, int, int]]:
    """Return (requests, context of each, tokens of a prompt beside them) to measure."""
    found = []
    for requests in sorted({max(1, limits.max_num_seqs // 16), max(1, limits.max_num_seqs // 2)}):
        most = min(limits.step_tokens, limits.max_model_len - 1, limits.kv_tokens // 4)
        room = limits.kv_tokens - limits.prompts_at_once * (most + limits.block_size)
        each = room // (requests * limits.block_size) * limits.block_size - limits.decode_steps - 1
        context = min(_MIXED_CONTEXT, each, limits.max_model_len - limits.decode_steps - 2)
        if requests < limits.max_num_seqs and context >= _FEWEST_CONTEXT and most >= _FEWEST_TOKENS:
            tokens = {max(_FEWEST_TOKENS, limits.step_tokens // part) for part in _MIXED_PARTS}
            found += [
                (requests, _power(context), count)
                for count in sorted({min(most, each) for each in tokens} | {most})
            ]
    return found


def _prefill_lines(limits: Limits) -> dict[int, list[int]]:
    blocks = (limits.kv_tokens // limits.block_size) // limits.prompts_at_once
    room = max(1, min(limits.max_model_len - 1, blocks * limits.block_size - 1))
    top = room - min(limits.step_tokens, room // 2)
    top -= top % limits.block_size
    contexts = sorted({0, top, *(each for each in _CONTEXTS if each < top)})
    return {
        context: _doubling(_FEWEST_TOKENS, min(limits.step_tokens, room - context))
        for context in contexts
    }


def _decode_lines(limits: Limits) -> dict[int, list[int]]:
    lines: dict[int, list[int]] = {}
    blocks = limits.kv_tokens // limits.block_size
    sizes = _doubling(1, limits.max_num_seqs)
    behind_leaps = [
        size + _LEAP for size in sizes if size >= _TILES and size + _LEAP < limits.max_num_seqs
    ]
    for requests in sorted({*sizes, *behind_leaps}):
        longest = (
            min(blocks // requests * limits.block_size, limits.max_model_len)
            - limits.decode_steps
            - 1
        )
        contexts = [size for size in _doubling(_FEWEST_CONTEXT, longest) if size == _power(size)]
        if len(contexts) > 1 or not lines:
            lines[requests] = contexts or [max(1, longest)]
    return lines


def _doubling(first: int, most: int) -> list[int]:
    sizes = [min(first, max(1, most))]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sorted({*sizes, max(most, sizes[0])})


def _power(size: int) -> int:
    return int(1 << (size.bit_length() - 1))


def _refined(lines: dict[int, list[int]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    for line, line_level in _levels(sorted(lines)):
        sizes = lines[line]
        yield line_level, line, tuple(sorted({sizes[0], sizes[-1]}))
        for size, level in _levels(sizes):
            if level:
                yield line_level + level, line, (size,)


def _levels(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    spans = [(0, len(values) - 1)]
    for at in sorted({0, len(values) - 1}):
        yield values[at], 0
    level = 1
    while spans := [span for span in spans if span[1] - span[0] > 1]:
        halves = []
        for first, last in spans:
            middle = (first + last) // 2
            yield values[middle], level
            halves += [(first, middle), (middle, last)]
        spans, level = halves, level + 1
