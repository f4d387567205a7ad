"""Each slot's sampling parameters on the device; a row's logits as they adjust them. Triton.

A *slot* is a running request's place in `SlotTables`; row i of a launch belongs to `slots[i]`, -1
is padding. Bias, forbidden tokens, penalties and masks are applied wherever a tile is read
(`logits_of`). A *share* is a probability in units of the likeliest token's; *masses* are shares
added as integers of 2**-40, so that no order of the hardware changes a bit.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

__all__ = [
    "CHOICE",
    "FLOOR",
    "IS_ADJUSTED",
    "IS_CUT",
    "IS_PENALIZED",
    "IS_SEARCHED",
    "MAX_BIASES",
    "SCALE",
    "SEED",
    "SUBTILE",
    "TILE",
    "TOKEN_INDEX",
    "TOP_K",
    "TOP_P",
    "UNIT",
    "Rows",
    "SlotTables",
    "Tiles",
    "TokenMask",
    "has_flag",
    "logits_of",
    "masses_of",
    "note_of",
    "peak_and_masses",
    "real_of",
    "record_of",
    "shares_of",
    "word_of",
]

MAX_BIASES = 1024
# Tokens of a tile and of its parts, whose maxima bound the k-th largest logit.
TILE = tl.constexpr(1024)
SUBTILE = tl.constexpr(128)

# See record_of().
FLAGS = tl.constexpr(0)
SCALE = tl.constexpr(1)
TOP_K = tl.constexpr(2)
TOP_P = tl.constexpr(3)
FLOOR = tl.constexpr(4)
REPETITION = tl.constexpr(5)
PRESENCE = tl.constexpr(6)
FREQUENCY = tl.constexpr(7)
SEED = tl.constexpr(8)
CHOICE = tl.constexpr(10)
TOKEN_INDEX = tl.constexpr(11)
MIN_TOKENS = tl.constexpr(12)
BIASES = tl.constexpr(13)
_RECORD = struct.Struct("<ififffffqIiii8x")

IS_CUT = tl.constexpr(1)
IS_SEARCHED = tl.constexpr(2)  # by top-k or top-p
IS_BIASED = tl.constexpr(4)
HAS_MINIMUM = tl.constexpr(8)  # of tokens
IS_PENALIZED = tl.constexpr(16)
IS_ADJUSTED = tl.constexpr(4 | 8 | 16)

# How often a token is in the output, and three bits.
_COUNT = tl.constexpr((1 << 28) - 1)
_IN_PROMPT = tl.constexpr(1 << 28)
_ENDS = tl.constexpr(1 << 29)
_HAS_BIAS = tl.constexpr(1 << 30)

UNIT = tl.constexpr(float(1 << 40))


@dataclass(frozen=True, slots=True)
class SlotTables:
    """A table of each of the slots' facts. 131 MB for 256 slots and 128,256 tokens.

    Spare slots come behind the others, without notes and biases.
    """

    parameters: torch.Tensor  # int32 [slots + spare, 16]
    notes: torch.Tensor  # int32 [slots, vocab]
    biases: torch.Tensor  # int32 [slots, MAX_BIASES, 2]: ascending ids, fp32 bits
    sampled: torch.Tensor  # int64 [slots + spare]: the newest token

    @classmethod
    def empty(cls, slots: int, vocab: int, device: torch.device, spare: int = 0) -> SlotTables:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(slots + spare, 16),
            zeros(slots, vocab),
            zeros(slots, MAX_BIASES, 2),
            zeros(slots + spare, dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class TokenMask:
    """A mask of the tokens that may come next in some rows."""

    words: torch.Tensor  # int32 [masks, ceil(vocab / 32)]; bit i of word w: token 32 * w + i
    of_row: torch.Tensor  # int32 [rows]: which mask is the row's; -1: none


def record_of(
    *,
    seed: int,
    choice: int,
    token_index: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    min_tokens: int = 0,
    biases: int = 0,
) -> bytes:
    """Return a slot's parameters as the kernels read them, 64 bytes."""
    random = temperature > 0
    searched = random and (top_k > 0 or top_p < 1)
    cut = searched or (random and min_p > 0)
    penalized = repetition != 1.0 or presence != 0 or frequency != 0
    flags = (
        cut * 1 | searched * 2 | (biases > 0) * 4 | (token_index < min_tokens) * 8 | penalized * 16
    )
    # Whose inverse is finite.
    scale = math.log2(math.e) / max(temperature, 1e-30) if random else 0.0
    floor = temperature * math.log(min_p) if min_p > 0 else -math.inf
    return _RECORD.pack(
        flags,
        scale,
        top_k,
        top_p,
        floor,
        repetition,
        presence,
        frequency,
        seed,
        choice & 0xFFFFFFFF,
        token_index,
        min(min_tokens, 1 << 30),
        biases,
    )


def note_of(*, count: Any = 0, in_prompt: Any = 0, ends: Any = 0, has_bias: Any = 0) -> Any:
    """Return the word of a token or an array; flags are 0 or 1."""
    return count | in_prompt * _IN_PROMPT.value | ends * _ENDS.value | has_bias * _HAS_BIAS.value


class Rows(NamedTuple):
    logits: torch.Tensor
    stride: int
    vocab: int
    tiles: int
    slots: torch.Tensor
    parameters: torch.Tensor
    notes: torch.Tensor | None
    biases: torch.Tensor | None
    mask_words: torch.Tensor | None
    mask_of_row: torch.Tensor | None


class Tiles(NamedTuple):
    """A summary of each tile, [rows, tiles]; for top-k maxima [rows, tiles * 8] and minima."""

    peaks: torch.Tensor
    sums: torch.Tensor
    bests: torch.Tensor
    maxima: torch.Tensor | None
    minima: torch.Tensor | None


@triton.jit
def word_of(rows, slot, field: tl.constexpr):
    return tl.load(rows.parameters + slot * 16 + field)


@triton.jit
def real_of(rows, slot, field: tl.constexpr):
    return tl.load(rows.parameters + slot * 16 + field).to(tl.float32, bitcast=True)


@triton.jit
def has_flag(rows, slot, flag: tl.constexpr):
    return (word_of(rows, slot, FLAGS) & flag) != 0


@triton.jit
def logits_of(rows, slot, row, tokens):
    """Load logits of `tokens`, adjusted and masked, fp32; -inf beyond the vocabulary."""
    inside = tokens < rows.vocab
    x = tl.load(
        rows.logits + row.to(tl.int64) * rows.stride + tokens, mask=inside, other=-float("inf")
    )
    x = x.to(tl.float32)
    if rows.notes is not None:
        if has_flag(rows, slot, IS_ADJUSTED):
            x = _adjusted(x, rows, slot, tokens, inside)
    if rows.mask_words is not None:
        place = tl.load(rows.mask_of_row + row)
        if place >= 0:
            words = (rows.vocab + 31) // 32
            word = tl.load(
                rows.mask_words + place.to(tl.int64) * words + (tokens >> 5), mask=inside, other=0
            )
            x = tl.where(((word >> (tokens & 31)) & 1) != 0, x, -float("inf"))
    return x


@triton.jit
def _adjusted(x, rows, slot, tokens, inside):
    # in the order of paged_engine/sampler.py
    note = tl.load(rows.notes + slot.to(tl.int64) * rows.vocab + tokens, mask=inside, other=0)
    if has_flag(rows, slot, IS_BIASED):
        x = _biased(x, rows, slot, tokens, (note & _HAS_BIAS) != 0)
    if word_of(rows, slot, TOKEN_INDEX) < word_of(rows, slot, MIN_TOKENS):
        x = tl.where((note & _ENDS) != 0, -float("inf"), x)
    if has_flag(rows, slot, IS_PENALIZED):
        repetition = real_of(rows, slot, REPETITION)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((note & (_COUNT | _IN_PROMPT)) != 0, repeated, x)
        count = note & _COUNT
        penalty = real_of(rows, slot, PRESENCE) + real_of(rows, slot, FREQUENCY) * count.to(
            tl.float32
        )
        x = tl.where(count > 0, x - penalty, x)
    return x


@triton.jit
def _biased(x, rows, slot, tokens, has_bias):
    if tl.max(has_bias.to(tl.int32), axis=0) > 0:
        pairs = rows.biases + slot.to(tl.int64) * (2 * 1024)
        first = tl.zeros_like(tokens)
        end = first + word_of(rows, slot, BIASES)
        for _ in range(11):  # up to 2**10 entries
            middle = (first + end) // 2
            open_ = has_bias & (first < end)
            before = tl.load(pairs + 2 * middle, mask=open_, other=0) < tokens
            first = tl.where(open_ & before, middle + 1, first)
            end = tl.where(open_ & (before == 0), middle, end)
        x += tl.load(pairs + 2 * first + 1, mask=has_bias, other=0).to(tl.float32, bitcast=True)
    return x


@triton.jit
def shares_of(x, peak, scale):
    """Return exp((x - peak) / temperature), 0 for -inf, also where the peak is -inf."""
    return tl.exp2((x - tl.where(peak > -float("inf"), peak, 0.0)) * scale)


@triton.jit
def masses_of(shares):
    """Return shares as int64 in units of 2**-40; NaN is 0."""
    return (tl.where(shares > 0, shares, 0.0) * UNIT).to(tl.int64)


@triton.jit
def peak_and_masses(tiles, row, num_tiles, scale, ALL_TILES: tl.constexpr):
    index = tl.arange(0, ALL_TILES)
    inside = index < num_tiles
    peaks = tl.load(tiles.peaks + row * num_tiles + index, mask=inside, other=-float("inf"))
    sums = tl.load(tiles.sums + row * num_tiles + index, mask=inside, other=0.0)
    peak = tl.max(peaks, axis=0)
    return peak, masses_of(sums * shares_of(peaks, peak, scale))
