"""Steps to measure for a rate card, coarse ones first, so that one may stop anywhere."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits", "Step", "plan"]

_FEWEST_TOKENS = 16
_FEWEST_CONTEXT = 32
# Time grows linearly with what is there already, so few contexts say it all.
_CONTEXTS = [4**power for power in range(4, 12)]
_TILES = 64
"""From so many requests on a step takes longer by leaps, behind each power of two, by a tile more:
on an H200 64, 72 and 128 requests of 640 tokens take 5.5, 6.4 and 7.5 ms.
"""
_LEAP = 8
_MIXED_CONTEXT = 1_024
_MIXED_PARTS = (128, 16, 4)  # of a step's tokens; and all of them

Step = tuple[int, int, int]
"""Requests that decode, tokens of KV of each (or before the chunk), tokens of a chunk."""


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


def plan(limits: Limits) -> list[tuple[int, list[Step]]]:
    """Return steps to measure together, by level: each card has level 0, higher ones refine it."""
    found = [(1, [step]) for step in _mixed(limits)]
    for lines in (_prefill(limits), _decode(limits)):
        for at, line in enumerate(lines):
            level = _level(at, lines)
            found.append((level, list(dict.fromkeys((line[0], line[-1])))))
            found += [(level + _level(of, line), [line[of]]) for of in range(1, len(line) - 1)]
    return sorted(found, key=lambda each: each[0])


def _level(at: int, values: list[list[Step]] | list[Step]) -> int:
    # Both ends, then the middle, then the middles of both halves ...
    last = len(values) - 1
    return 0 if at in (0, last) else max(1, last.bit_length() - (at & -at).bit_length())


def _mixed(limits: Limits) -> list[Step]:
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


def _prefill(limits: Limits) -> list[list[Step]]:
    blocks = (limits.kv_tokens // limits.block_size) // limits.prompts_at_once
    room = max(1, min(limits.max_model_len - 1, blocks * limits.block_size - 1))
    top = room - min(limits.step_tokens, room // 2)
    top -= top % limits.block_size
    return [
        [
            (0, context, tokens)
            for tokens in _doubling(_FEWEST_TOKENS, min(limits.step_tokens, room - context))
        ]
        for context in sorted({0, top, *(each for each in _CONTEXTS if each < top)})
    ]


def _decode(limits: Limits) -> list[list[Step]]:
    lines: list[list[Step]] = []
    blocks = limits.kv_tokens // limits.block_size
    sizes = _doubling(1, limits.max_num_seqs)
    leaps = {size + _LEAP for size in sizes if size >= _TILES}
    for requests in sorted({*sizes, *(each for each in leaps if each < limits.max_num_seqs)}):
        most = min(blocks // requests * limits.block_size, limits.max_model_len)
        longest = most - limits.decode_steps - 1
        contexts = [size for size in _doubling(_FEWEST_CONTEXT, longest) if size == _power(size)]
        if len(contexts) > 1 or not lines:
            lines.append([(requests, each, 0) for each in contexts or [max(1, longest)]])
    return lines


def _doubling(first: int, most: int) -> list[int]:
    sizes = [min(first, max(1, most))]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sorted({*sizes, max(most, sizes[0])})


def _power(size: int) -> int:
    return int(1 << (size.bit_length() - 1))
