"""From logits [rows, vocab] to one token per row on the GPU: adjust, cut, draw; nothing waits for the host. Triton.

A *slot* is a running request's place in `SlotTables`; row i of a launch belongs to `slots[i]`, -1 is padding. Logits
are read as they are (bf16, fp16, fp32) and never changed: bias, forbidden tokens, penalties and a grammar's mask are
applied wherever a tile is read, so that no copy exists. A token depends on its own row only, bit for bit.

The launches, over tiles of 1024 tokens:
  _summarize   grid (tiles / tiles per program, rows)   each tile's largest logit and sum of exp
  _bracket     grid (rows)            } only where a row of the launch is cut; rows that are not exit at once:
  _narrow * 3  grid (tiles / 4, rows) } two values enclose the lowest logit that stays: count or weigh what is above
  _gather      grid (tiles / 4, rows) } 8 pivots between them, three times; list the few hundred logits that are left;
  _cut         grid (rows)            } bisect these on the bits of their values;
  _weigh_kept  grid of _summarize     } and sum the tiles again without what falls below
  _choose      grid (rows)              the tile in which the cumulative distribution passes the draw, the token in it

Top-k needs no pivots: k logits or more are as large as the k-th largest of the maxima of 128 tokens each.
Masses (probabilities in units of the likeliest token's) are added in pairs, or as integers in units of 2**-40: no
layout that the compiler chooses, and no order of the hardware's, changes a bit of them.
Torch twins: `kernels/sampling.py`, `kernels/philox.py`, which name the sources of the formulas.
"""

# Triton's constexprs are upper case; its `and` evaluates both sides, so nested ifs are no clumsy `and`.
# ruff: noqa: N803, SIM102
from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.fused_norm import pdl_works

__all__ = ["MAX_BIASES", "SlotTables", "TokenMask", "note_of", "record_of", "sample"]

MAX_BIASES = 1024
_TILE = 1024
_SUBTILE = 128
_TILES_PER_SPLIT = 4
_PIVOTS = 8
_PASSES = 3
# Logits that `_cut` can bisect in registers. Where more are left it reads the row once per bit, which is slow but rare:
# top-p of a top-k of thousands, or thousands of different logits within 1/500 of the first bracket.
_ROOM = 4096

# The 16 words of a slot's parameters, see record_of().
_FLAGS = tl.constexpr(0)
_SCALE = tl.constexpr(1)
_TOP_K = tl.constexpr(2)
_TOP_P = tl.constexpr(3)
_FLOOR = tl.constexpr(4)
_REPETITION = tl.constexpr(5)
_PRESENCE = tl.constexpr(6)
_FREQUENCY = tl.constexpr(7)
_SEED = tl.constexpr(8)
_CHOICE = tl.constexpr(10)
_TOKEN_INDEX = tl.constexpr(11)
_MIN_TOKENS = tl.constexpr(12)
_BIASES = tl.constexpr(13)
_RECORD = struct.Struct("<ififffffqIiii8x")

# Flags of a slot.
_IS_CUT = tl.constexpr(1)
_IS_SEARCHED = tl.constexpr(2)  # cut by top-k or top-p; min-p alone needs no search
_IS_BIASED = tl.constexpr(4)
_HAS_MINIMUM = tl.constexpr(8)  # of tokens
_IS_PENALIZED = tl.constexpr(16)
_IS_ADJUSTED = tl.constexpr(4 | 8 | 16)

# A note on one token of one slot: how often it is in the output, and three bits.
_COUNT = tl.constexpr((1 << 28) - 1)
_IN_PROMPT = tl.constexpr(1 << 28)
_ENDS = tl.constexpr(1 << 29)
_HAS_BIAS = tl.constexpr(1 << 30)

# The int64 words of a row's bracket: the lowest logit that stays is in (low, high]. What is above a logit is counted
# for top-k and weighed for top-p; the logit stays if that is less than the limit.
_LOW = tl.constexpr(0)
_HIGH = tl.constexpr(1)
_PEAK = tl.constexpr(2)
_LIMIT = tl.constexpr(3)
_ABOVE_LOW = tl.constexpr(4)  # 0 before anybody has counted, if there are sure to be few
_ABOVE_HIGH = tl.constexpr(5)

_UNIT = tl.constexpr(float(1 << 40))
_NO_LIMIT = tl.constexpr(1 << 62)


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What the device knows of each slot. 131 MB for 256 slots and 128,256 tokens."""

    parameters: torch.Tensor  # int32 [slots, 16]
    notes: torch.Tensor  # int32 [slots, vocab]; read only of slots with bias, min_tokens or penalties
    biases: torch.Tensor  # int32 [slots, MAX_BIASES, 2]: token ids, ascending, and the bits of their fp32 bias
    sampled: torch.Tensor  # int64 [slots]: the newest token

    @classmethod
    def empty(cls, slots: int, vocab: int, device: torch.device) -> SlotTables:
        """Tables without requests."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(zeros(slots, 16), zeros(slots, vocab), zeros(slots, MAX_BIASES, 2), zeros(slots, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that grammars allow in each row of a launch."""

    allowed: torch.Tensor  # int32 [rows, ceil(vocab / 32)]; bit i of word w is token 32 * w + i
    constrained: torch.Tensor  # int32 [rows]: 0 where the row's words do not count


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
    """A slot's parameters as the kernels read them, 64 bytes.

    token_index: that of the next token. top_k: 0 if it cuts nothing. biases: how many tokens have one.
    """
    random = temperature > 0
    searched = random and (top_k > 0 or top_p < 1)
    cut = searched or (random and min_p > 0)
    penalized = repetition != 1.0 or presence != 0 or frequency != 0
    flags = cut * 1 | searched * 2 | (biases > 0) * 4 | (token_index < min_tokens) * 8 | penalized * 16
    # Lower temperatures are as good as this one, whose inverse is finite.
    scale = math.log2(math.e) / max(temperature, 1e-30) if random else 0.0
    floor = temperature * math.log(min_p) if min_p > 0 else -math.inf
    return _RECORD.pack(
        flags, scale, top_k, top_p, floor, repetition, presence, frequency, seed, choice & 0xFFFFFFFF, token_index,
        min(min_tokens, 1 << 30), biases,
    )  # fmt: skip


def note_of(*, count: Any = 0, in_prompt: Any = 0, ends: Any = 0, has_bias: Any = 0) -> Any:
    """The word in `SlotTables.notes` of one token, or of an array of them; the last three are 0 or 1."""
    return count | in_prompt * _IN_PROMPT.value | ends * _ENDS.value | has_bias * _HAS_BIAS.value


class _Rows(NamedTuple):
    """What a launch reads. Absent notes or masks are compiled away."""

    logits: torch.Tensor
    stride: int
    vocab: int
    tiles: int
    slots: torch.Tensor
    parameters: torch.Tensor
    notes: torch.Tensor | None
    biases: torch.Tensor | None
    allowed: torch.Tensor | None
    constrained: torch.Tensor | None


class _Tiles(NamedTuple):
    """What is known of each tile, [rows, tiles]. The maxima [rows, tiles * 8] and minima are for top-k."""

    peaks: torch.Tensor
    sums: torch.Tensor
    bests: torch.Tensor
    maxima: torch.Tensor | None
    minima: torch.Tensor | None


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: SlotTables,
    *,
    cut: bool = True,
    adjusted: bool = True,
    mask: TokenMask | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    tiles_per_program: int | None = None,
    num_warps: int | None = None,
) -> torch.Tensor:
    """The next token of every row, int64 [rows], 0 for padding; its slot then has one token more.

    logits [rows or more, vocab], rows may be strided; slots int32 [rows], each slot at most once.
    cut, adjusted: whether any row has top-k, top-p or min-p; bias, min_tokens or penalties. False saves time.
    tiles_per_program, num_warps: for the benchmark's sweep; they change no token.
    """
    count, vocab = slots.shape[0], tables.notes.shape[1]
    if logits.shape[0] < count or logits.shape[1] != vocab or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit {count} rows of a vocabulary of {vocab}")
    num_tiles = triton.cdiv(vocab, _TILE)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tokens = scratch(count, dtype=torch.int64) if out is None else out
    rows = _Rows(
        logits, logits.stride(0), vocab, num_tiles, slots, tables.parameters,
        tables.notes if adjusted else None, tables.biases if adjusted else None,
        mask.allowed if mask else None, mask.constrained if mask else None,
    )  # fmt: skip
    tiles = _Tiles(
        peaks=scratch(count, num_tiles),
        sums=scratch(count, num_tiles),
        bests=scratch(count, num_tiles, dtype=torch.int32),
        maxima=scratch(count, num_tiles * (_TILE // _SUBTILE)) if cut else None,
        minima=scratch(count, num_tiles) if cut else None,
    )
    floors = scratch(count) if cut else None
    pdl = pdl and pdl_works(logits.device)
    # Products and sums of the adjustments are rounded one by one, as torch rounds them.
    options: dict[str, Any] = {"TILE": _TILE, "PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": False}
    each = tiles_per_program or (1 if count <= 16 else 4)
    num_warps = num_warps or (1 if rows.notes is None and rows.allowed is None else 4)
    grid = (triton.cdiv(num_tiles, each), count)
    all_tiles = triton.next_power_of_2(num_tiles)

    _summarize[grid](rows, tiles, each, SUBTILE=_SUBTILE, num_warps=num_warps, **options)
    if floors is not None:
        _find_floors(rows, tiles, floors, options)
        _weigh_kept[grid](rows, tiles, floors, each, num_warps=num_warps, **options)
    _choose[(count,)](
        rows, tiles, floors, tokens, tables.sampled, tables.notes, ALL_TILES=all_tiles, num_warps=4, **options
    )
    return tokens


def _find_floors(rows: _Rows, tiles: _Tiles, floors: torch.Tensor, options: dict[str, Any]) -> None:
    """floors [rows]: the lowest logit that top-k, top-p and min-p leave, in rows that have any of these."""
    count, num_tiles = tiles.peaks.shape
    splits = triton.cdiv(num_tiles, _TILES_PER_SPLIT)
    subtiles = num_tiles * (_TILE // _SUBTILE)
    device = floors.device
    brackets = torch.empty(_PASSES + 1, count, 8, dtype=torch.int64, device=device)
    amounts = torch.empty(_PASSES, count, splits, _PIVOTS, dtype=torch.int64, device=device)
    candidates = torch.empty(count, _ROOM, device=device)
    held = torch.empty(count, dtype=torch.int32, device=device)
    by_split = options | {"TILES": _TILES_PER_SPLIT, "SPLITS": splits, "ALL_SPLITS": triton.next_power_of_2(splits)}
    by_split |= {"PIVOTS": _PIVOTS, "ROOM": _ROOM, "num_warps": 4}

    _bracket[(count,)](
        rows, tiles, brackets[0], held, floors, SUBTILES=subtiles, ALL_SUBTILES=triton.next_power_of_2(subtiles),
        ALL_TILES=triton.next_power_of_2(num_tiles), num_warps=4, **options,
    )  # fmt: skip
    for turn in range(_PASSES):
        last = max(turn - 1, 0)
        _narrow[(splits, count)](
            rows, tiles.peaks, brackets[last], amounts[last], brackets[turn], amounts[turn],
            FIRST=turn == 0, **by_split,
        )  # fmt: skip
    _gather[(splits, count)](rows, tiles.peaks, brackets[-2], amounts[-1], brackets[-1], candidates, held, **by_split)
    _cut[(count,)](rows, brackets[-1], candidates, held, floors, ROOM=_ROOM, num_warps=8, **options)


# --- one row: its parameters, its logits ----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        # The next kernel reads and writes nothing before its own wait, so it may come as soon as there is room.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def _word(rows, slot, field: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(rows.parameters + slot * 16 + field)


@triton.jit  # type: ignore[untyped-decorator]
def _real(rows, slot, field: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(rows.parameters + slot * 16 + field).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _has(rows, slot, flag: tl.constexpr):  # type: ignore[no-untyped-def]
    return (_word(rows, slot, _FLAGS) & flag) != 0


@triton.jit
def _logits(rows, slot, row, tokens):  # type: ignore[no-untyped-def]
    """Logits of `tokens` in one row, adjusted and masked, fp32; -inf beyond the vocabulary."""
    inside = tokens < rows.vocab
    x = tl.load(rows.logits + row.to(tl.int64) * rows.stride + tokens, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    if rows.notes is not None:
        if _has(rows, slot, _IS_ADJUSTED):
            x = _adjusted(x, rows, slot, tokens, inside)
    if rows.allowed is not None:
        if tl.load(rows.constrained + row) != 0:
            words = (rows.vocab + 31) // 32
            word = tl.load(rows.allowed + row.to(tl.int64) * words + (tokens >> 5), mask=inside, other=0)
            x = tl.where(((word >> (tokens & 31)) & 1) != 0, x, -float("inf"))
    return x


@triton.jit
def _adjusted(x, rows, slot, tokens, inside):  # type: ignore[no-untyped-def]
    """Bias, tokens that may not end the text yet, penalties; in the order of paged_engine/sampler.py."""
    note = tl.load(rows.notes + slot.to(tl.int64) * rows.vocab + tokens, mask=inside, other=0)
    if _has(rows, slot, _IS_BIASED):
        x = _biased(x, rows, slot, tokens, (note & _HAS_BIAS) != 0)
    if _word(rows, slot, _TOKEN_INDEX) < _word(rows, slot, _MIN_TOKENS):
        x = tl.where((note & _ENDS) != 0, -float("inf"), x)
    if _has(rows, slot, _IS_PENALIZED):
        repetition = _real(rows, slot, _REPETITION)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((note & (_COUNT | _IN_PROMPT)) != 0, repeated, x)
        count = note & _COUNT
        penalty = _real(rows, slot, _PRESENCE) + _real(rows, slot, _FREQUENCY) * count.to(tl.float32)
        x = tl.where(count > 0, x - penalty, x)
    return x


@triton.jit
def _biased(x, rows, slot, tokens, has_bias):  # type: ignore[no-untyped-def]
    """Add the bias of tokens that have one: each is searched in the slot's ascending list."""
    if tl.max(has_bias.to(tl.int32), axis=0) > 0:
        pairs = rows.biases + slot.to(tl.int64) * (2 * 1024)
        first = tl.zeros_like(tokens)
        end = first + _word(rows, slot, _BIASES)
        for _ in range(11):  # up to 2**10 entries
            middle = (first + end) // 2
            open_ = has_bias & (first < end)
            before = tl.load(pairs + 2 * middle, mask=open_, other=0) < tokens
            first = tl.where(open_ & before, middle + 1, first)
            end = tl.where(open_ & (before == 0), middle, end)
        x += tl.load(pairs + 2 * first + 1, mask=has_bias, other=0).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _shares(x, peak, scale):  # type: ignore[no-untyped-def]
    """exp((x - peak) / temperature), 0 for -inf, also where the peak itself is -inf."""
    return tl.exp2((x - tl.where(peak > -float("inf"), peak, 0.0)) * scale)


@triton.jit
def _units(shares):  # type: ignore[no-untyped-def]
    """Shares as int64 in units of 2**-40; NaN is 0."""
    return (tl.where(shares > 0, shares, 0.0) * _UNIT).to(tl.int64)


@triton.jit
def _sum(x):  # type: ignore[no-untyped-def]
    """The sum of x [1024], in pairs whose order is given here and not by the compiler.

    It costs nothing: first neighbours, 8 of which are in one thread; then what the same thread has of other places.
    """
    tl.static_assert(x.shape[0] == 1024)
    for _ in tl.static_range(3):
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), axis=1)
    for _ in tl.static_range(7):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), axis=0)
    return tl.sum(x, axis=0)


# --- tiles ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["each"])  # type: ignore[untyped-decorator]
def _summarize(  # type: ignore[no-untyped-def]
    rows, tiles, each, SUBTILE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    """Of each tile its largest logit; its sum of exp in units of that, or in a greedy row the first largest token."""
    _wait(PDL)
    row = tl.program_id(1)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    scale = _real(rows, slot, _SCALE)
    first = tl.program_id(0) * each
    for tile in range(first, tl.minimum(first + each, rows.tiles)):
        place = row * rows.tiles + tile
        tokens = tile * TILE + tl.arange(0, TILE)
        x = _logits(rows, slot, row, tokens)
        peak = tl.max(x, axis=0)
        tl.store(tiles.peaks + place, peak)
        if scale > 0:
            tl.store(tiles.sums + place, _sum(_shares(x, peak, scale)))
        else:
            tl.store(tiles.bests + place, tl.min(tl.where(x == peak, tokens, rows.vocab), axis=0))
        if tiles.maxima is not None:
            if _has(rows, slot, _IS_SEARCHED):
                parts: tl.constexpr = TILE // SUBTILE
                maxima = tl.max(tl.reshape(x, [parts, SUBTILE]), axis=1)
                tl.store(tiles.maxima + place * parts + tl.arange(0, parts), maxima)
                tl.store(tiles.minima + place, tl.min(tl.where(x > -float("inf"), x, float("inf")), axis=0))


@triton.jit(do_not_specialize=["each"])  # type: ignore[untyped-decorator]
def _weigh_kept(rows, tiles, floors, each, TILE: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tiles' sums of exp again, without what is below the row's floor. Tiles wholly below it are not read."""
    _wait(PDL)
    row = tl.program_id(1)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not _has(rows, slot, _IS_CUT):
        return
    scale, floor = _real(rows, slot, _SCALE), tl.load(floors + row)
    first = tl.program_id(0) * each
    for tile in range(first, tl.minimum(first + each, rows.tiles)):
        place = row * rows.tiles + tile
        peak = tl.load(tiles.peaks + place)
        if peak >= floor:
            x = _logits(rows, slot, row, tile * TILE + tl.arange(0, TILE))
            tl.store(tiles.sums + place, _sum(tl.where(x >= floor, _shares(x, peak, scale), 0.0)))
        else:
            tl.store(tiles.sums + place, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _peak_and_masses(tiles, row, num_tiles, scale, ALL_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's largest logit, and the mass of each of its tiles."""
    index = tl.arange(0, ALL_TILES)
    inside = index < num_tiles
    peaks = tl.load(tiles.peaks + row * num_tiles + index, mask=inside, other=-float("inf"))
    sums = tl.load(tiles.sums + row * num_tiles + index, mask=inside, other=0.0)
    peak = tl.max(peaks, axis=0)
    return peak, _units(sums * _shares(peaks, peak, scale))


# --- the lowest logit that stays ------------------------------------------------------------------------------------


@triton.jit
def _bits_of(x):  # type: ignore[no-untyped-def]
    """An int64 for each fp32, in the order of the fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _of_bits(ordered):  # type: ignore[no-untyped-def]
    """The inverse of _bits_of()."""
    bits = ordered.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _grain(rows, slot):  # type: ignore[no-untyped-def]
    """The bits of different logits differ by this at least: an fp32 made of 16 bits ends in zeros, or ones below 0."""
    grain = tl.full([], 2, tl.int64)
    if rows.logits.dtype.element_ty == tl.bfloat16:
        grain = tl.full([], 1 << 16, tl.int64)
    if rows.logits.dtype.element_ty == tl.float16:
        grain = tl.full([], 1 << 13, tl.int64)
    if rows.notes is not None:
        if _has(rows, slot, _IS_ADJUSTED):
            grain = tl.full([], 2, tl.int64)
    return grain


@triton.jit
def _just_below(x):  # type: ignore[no-untyped-def]
    """A value below `x`, also where denormals count as 0."""
    return x - (tl.abs(x) * 1e-6 + 1e-30)


@triton.jit
def _cuts_twice(rows, slot):  # type: ignore[no-untyped-def]
    """Whether top-p follows top-k: then all that top-k leaves is needed, not only what lies about its edge."""
    return (_word(rows, slot, _TOP_K) > 0) & (_real(rows, slot, _TOP_P) < 1)


@triton.jit  # type: ignore[untyped-decorator]
def _bracket(  # type: ignore[no-untyped-def]
    rows, tiles, bracket, held, floors,
    SUBTILES: tl.constexpr, ALL_SUBTILES: tl.constexpr, ALL_TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first bracket of each row that is searched, and what min-p alone would make its floor."""
    _wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not _has(rows, slot, _IS_CUT):
        return
    scale = _real(rows, slot, _SCALE)
    peak, masses = _peak_and_masses(tiles, row, rows.tiles, scale, ALL_TILES)
    tl.store(floors + row, peak + _real(rows, slot, _FLOOR))
    if not _has(rows, slot, _IS_SEARCHED):
        return
    whole = tl.sum(masses, axis=0).to(tl.float32)
    top_k, top_p = _word(rows, slot, _TOP_K), _real(rows, slot, _TOP_P)
    if top_k > SUBTILES:
        index = tl.arange(0, ALL_TILES)
        minima = tl.load(tiles.minima + row * rows.tiles + index, mask=index < rows.tiles, other=float("inf"))
        low = _just_below(tl.min(minima, axis=0))
    elif top_k > 0:
        index = tl.arange(0, ALL_SUBTILES)
        maxima = tl.load(tiles.maxima + row * SUBTILES + index, mask=index < SUBTILES, other=-float("inf"))
        low = _just_below(_kth_largest(maxima, top_k, _grain(rows, slot)))
    else:
        # All logits below this together have less mass than the nucleus leaves out; 1 % is for rounding.
        low = peak + tl.log2((1.0 - top_p) * 0.99 * (whole / _UNIT) / rows.vocab) / scale
    limit = tl.where(top_k > 0, top_k, (top_p * whole).to(tl.int64))
    above_low = tl.where(top_k > SUBTILES, rows.vocab, 0)
    _write(bracket, row, low, peak, peak, limit, tl.where(top_k > 0, above_low, whole.to(tl.int64)), limit * 0)
    tl.store(held + row, 0)


@triton.jit
def _write(bracket, row, low, high, peak, limit, above_low, above_high):  # type: ignore[no-untyped-def]
    words = bracket + row * 8
    tl.store(words + _LOW, low.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(words + _HIGH, high.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(words + _PEAK, peak.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(words + _LIMIT, limit)
    tl.store(words + _ABOVE_LOW, above_low)
    tl.store(words + _ABOVE_HIGH, above_high)


@triton.jit
def _read(bracket, row):  # type: ignore[no-untyped-def]
    words = bracket + row * 8
    low = tl.load(words + _LOW).to(tl.int32).to(tl.float32, bitcast=True)
    high = tl.load(words + _HIGH).to(tl.int32).to(tl.float32, bitcast=True)
    peak = tl.load(words + _PEAK).to(tl.int32).to(tl.float32, bitcast=True)
    return low, high, peak, tl.load(words + _LIMIT), tl.load(words + _ABOVE_LOW), tl.load(words + _ABOVE_HIGH)


@triton.jit
def _kth_largest(values, k, grain):  # type: ignore[no-untyped-def]
    """A value that no fewer than k are larger than or equal to, and that differs from the k-th by rounding only."""
    low, high = _bits_of(tl.min(values, axis=0)) - 1, _bits_of(tl.max(values, axis=0))
    while high - low >= grain:
        middle = (low + high) >> 1
        if tl.sum((values > _of_bits(middle)).to(tl.int32), axis=0) < k:
            high = middle
        else:
            low = middle
    return _of_bits(low + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _pivots(low, high, PIVOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    return low + (high - low) * ((tl.arange(0, PIVOTS) + 1).to(tl.float32) / (PIVOTS + 1))


@triton.jit  # type: ignore[untyped-decorator]
def _is_crowded(rows, slot, low, peak, above_low, above_high, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether more logits are in the bracket (all above low, where the nucleus follows) than there is room for."""
    count = (above_low - tl.where(_cuts_twice(rows, slot), 0, above_high)).to(tl.float32)
    if _word(rows, slot, _TOP_K) == 0:
        count /= _shares(low, peak, _real(rows, slot, _SCALE)) * _UNIT  # at most: none of them weighs less than low
    return count > ROOM


@triton.jit  # type: ignore[untyped-decorator]
def _narrowed(  # type: ignore[no-untyped-def]
    rows, slot, row, bracket, amounts, after,
    SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, PIVOTS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The row's bracket after the amounts above its pivots are known; the row's first program writes it to `after`."""
    low, high, peak, limit, above_low, above_high = _read(bracket, row)
    if _is_crowded(rows, slot, low, peak, above_low, above_high, ROOM):
        splits = tl.arange(0, ALL_SPLITS)[:, None]
        places = (row * SPLITS + splits) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
        above = tl.sum(tl.load(amounts + places, mask=splits < SPLITS, other=0), axis=0)
        pivots = _pivots(low, high, PIVOTS)
        stays = above < limit
        # Amounts fall from pivot to pivot, so each of these four is that of the pivot next to the edge.
        low = tl.maximum(low, tl.max(tl.where(stays, -float("inf"), pivots), axis=0))
        above_low = tl.minimum(above_low, tl.min(tl.where(stays, _NO_LIMIT, above), axis=0))
        high = tl.minimum(high, tl.min(tl.where(stays, pivots, float("inf")), axis=0))
        above_high = tl.maximum(above_high, tl.max(tl.where(stays, above, 0), axis=0))
    if tl.program_id(0) == 0:
        _write(after, row, low, high, peak, limit, above_low, above_high)
    return low, high, peak, above_low, above_high


@triton.jit  # type: ignore[untyped-decorator]
def _narrow(  # type: ignore[no-untyped-def]
    rows, peaks, bracket, amounts, after, amounts_after,
    FIRST: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, PIVOTS: tl.constexpr,
    ROOM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Narrow the bracket by what the pass before has found; then count or weigh what is above its new pivots."""
    _wait(PDL)
    row, split = tl.program_id(1), tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not _has(rows, slot, _IS_SEARCHED):
        return
    if FIRST:
        low, high, peak, _limit, above_low, above_high = _read(bracket, row)
    else:
        low, high, peak, above_low, above_high = _narrowed(
            rows, slot, row, bracket, amounts, after, SPLITS, ALL_SPLITS, PIVOTS, ROOM
        )
    if not _is_crowded(rows, slot, low, peak, above_low, above_high, ROOM):
        return
    scale, counts = _real(rows, slot, _SCALE), _word(rows, slot, _TOP_K) > 0
    pivots = _pivots(low, high, PIVOTS)
    above = tl.zeros([PIVOTS, TILE], tl.float32)
    for tile in range(split * TILES, tl.minimum(split * TILES + TILES, rows.tiles)):
        if tl.load(peaks + row * rows.tiles + tile) > low:
            x = _logits(rows, slot, row, tile * TILE + tl.arange(0, TILE))
            amount = tl.where(counts, 1.0, _shares(x, peak, scale))
            larger = (x[None, :] > pivots[:, None]).to(tl.float32)  # two instructions for each pivot and logit
            above = tl.fma(larger, amount[None, :], above)
    # Eight places are added as fp32, in an order given here; the rest as integers, in any order.
    for _ in tl.static_range(3):
        above = tl.sum(tl.reshape(above, [PIVOTS, 2, above.shape[1] // 2]), axis=1)
    places = (row * SPLITS + split) * PIVOTS + tl.arange(0, PIVOTS)
    tl.store(amounts_after + places, tl.sum((above * tl.where(counts, 1.0, _UNIT)).to(tl.int64), axis=1))


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    rows, peaks, bracket, amounts, after, candidates, held,
    TILES: tl.constexpr, SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, PIVOTS: tl.constexpr,
    ROOM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the logits in the bracket to `candidates` [rows, ROOM] in any order; `held` [rows] counts them."""
    _wait(PDL)
    row, split = tl.program_id(1), tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not _has(rows, slot, _IS_SEARCHED):
        return
    low, high, _peak, _above_low, _above_high = _narrowed(
        rows, slot, row, bracket, amounts, after, SPLITS, ALL_SPLITS, PIVOTS, ROOM
    )
    high = tl.where(_cuts_twice(rows, slot), float("inf"), high)
    for tile in range(split * TILES, tl.minimum(split * TILES + TILES, rows.tiles)):
        if tl.load(peaks + row * rows.tiles + tile) > low:
            x = _logits(rows, slot, row, tile * TILE + tl.arange(0, TILE))
            within = ((x > low) & (x <= high)).to(tl.int32)
            count = tl.sum(within, axis=0)
            if count > 0:
                places = tl.atomic_add(held + row, count, sem="relaxed") + tl.cumsum(within, axis=0) - 1
                tl.store(candidates + row * ROOM + places, x, mask=(within != 0) & (places < ROOM))


@triton.jit  # type: ignore[untyped-decorator]
def _cut(  # type: ignore[no-untyped-def]
    rows, bracket, candidates, held, floors, ROOM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    """The lowest logit that stays, exactly; the higher of it and min-p's is the row's floor.

    Bisected on the bits of fp32, as int64: above `low` there is too much for `low` to stay, above `high` there is not.
    """
    _wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not _has(rows, slot, _IS_SEARCHED):
        return
    low, high, peak, limit, _above_low, above_high = _read(bracket, row)
    scale, twice, counts = _real(rows, slot, _SCALE), _cuts_twice(rows, slot), _word(rows, slot, _TOP_K) > 0
    over = tl.where(twice, 0, above_high)  # the amount above all candidates
    high = tl.where(twice, peak, high)
    listed = tl.load(held + row)
    index = tl.arange(0, ROOM)
    is_listed = (index < listed) & (listed <= ROOM)
    values = tl.load(candidates + row * ROOM + index, mask=is_listed, other=-float("inf"))
    masses = _units(_shares(values, peak, scale))
    if (listed > 0) & (listed <= ROOM):
        low = _just_below(tl.min(tl.where(is_listed, values, float("inf")), axis=0))
        high = tl.max(values, axis=0)
    low, high = _bits_of(low), _bits_of(high)
    if listed == 0:  # by rounding, the edge lies between two logits
        low = high - 1
    top, grain = high, _grain(rows, slot)
    for stage in range(2):
        if (stage == 0) | twice:
            count_low, mass_low = _above(_of_bits(low), rows, slot, row, values, masses, listed, peak, scale, TILE)
            count_high, mass_high = _above(_of_bits(high), rows, slot, row, values, masses, listed, peak, scale, TILE)
            while (high - low >= grain) & (count_low - count_high > 1):
                middle = (low + high) >> 1
                count, mass = _above(_of_bits(middle), rows, slot, row, values, masses, listed, peak, scale, TILE)
                if tl.where(counts, count.to(tl.int64), mass) + tl.where(listed <= ROOM, over, 0) < limit:
                    high, count_high, mass_high = middle, count, mass
                else:
                    low, count_low, mass_low = middle, count, mass
            if (stage == 0) & twice:
                # All from low to high are equal. Of equals at its edge top-k weighs only as many as make up k.
                each = (mass_low - mass_high) // tl.maximum(count_low - count_high, 1)
                of_k = mass_high + each * (tl.minimum(limit, count_low.to(tl.int64)) - count_high)
                limit = (of_k.to(tl.float32) * _real(rows, slot, _TOP_P)).to(tl.int64)
                counts, high = counts & False, top
    tl.store(floors + row, tl.maximum(tl.load(floors + row), _of_bits(low + 1)))


@triton.jit  # type: ignore[untyped-decorator]
def _above(  # type: ignore[no-untyped-def]
    edge, rows, slot, row, values, masses, listed, peak, scale, TILE: tl.constexpr
):
    """How many candidates are larger than `edge`, and their mass; of the whole row if they are too many for a list."""
    if listed <= values.shape[0]:
        count = tl.sum((values > edge).to(tl.int32), axis=0)
        mass = tl.sum(tl.where(values > edge, masses, 0), axis=0)
    else:
        counts = tl.zeros([TILE], tl.int32)
        sums = tl.zeros([TILE], tl.int64)
        for tile in range(rows.tiles):
            x = _logits(rows, slot, row, tile * TILE + tl.arange(0, TILE))
            counts += (x > edge).to(tl.int32)
            sums += tl.where(x > edge, _units(_shares(x, peak, scale)), 0)
        count, mass = tl.sum(counts, axis=0), tl.sum(sums, axis=0)
    return count, mass


# --- the draw -------------------------------------------------------------------------------------------------------


@triton.jit
def _draw(rows, slot, total):  # type: ignore[no-untyped-def]
    """kernels/philox.py's uniform() of the slot's seed, choice and token index, times `total`, in integers."""
    seed_low = _word(rows, slot, _SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed_high = _word(rows, slot, _SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    index, choice = _word(rows, slot, _TOKEN_INDEX), _word(rows, slot, _CHOICE)
    bits, _1, _2, _3 = tl.philox((seed_high << 32) | seed_low, index, choice, 0, 0)
    uniform = (bits >> 8).to(tl.int64)  # in units of 2**-24
    return (total >> 24) * uniform + (((total & 0xFFFFFF) * uniform) >> 24)


@triton.jit
def _first_past(point, masses, places, last):  # type: ignore[no-untyped-def]
    """The first of `places`, up to `last`, at which the running sum of `masses` exceeds `point`; and the sum before it.

    If none does, since masses of tiles and of tokens are rounded apart: the last that has mass.
    """
    running = tl.cumsum(masses, axis=0)
    found = tl.min(tl.where(running > point, places, last + 1), axis=0)
    if found > last:
        found = tl.max(tl.where(masses > 0, places, 0), axis=0)
    return found, tl.sum(tl.where(places == found, running - masses, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    rows, tiles, floors, chosen, sampled, notes, ALL_TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    """One token per row; then its slot has one token more."""
    _wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        tl.store(chosen + row, 0)
        return
    scale = _real(rows, slot, _SCALE)
    index = tl.arange(0, ALL_TILES)
    if scale > 0:
        peak, masses = _peak_and_masses(tiles, row, rows.tiles, scale, ALL_TILES)
        point = _draw(rows, slot, tl.sum(masses, axis=0))
        tile, before = _first_past(point, masses, index, rows.tiles - 1)
        tokens = tile * TILE + tl.arange(0, TILE)
        x = _logits(rows, slot, row, tokens)
        shares = _shares(x, peak, scale)
        if floors is not None:
            if _has(rows, slot, _IS_CUT):
                shares = tl.where(x >= tl.load(floors + row), shares, 0.0)
        token, _before = _first_past(point - before, _units(shares), tokens, rows.vocab - 1)
    else:
        inside = index < rows.tiles
        peaks = tl.load(tiles.peaks + row * rows.tiles + index, mask=inside, other=-float("inf"))
        bests = tl.load(tiles.bests + row * rows.tiles + index, mask=inside, other=0)
        token = tl.min(tl.where(peaks == tl.max(peaks, axis=0), bests, rows.vocab), axis=0)
    token = tl.minimum(token, rows.vocab - 1)  # logits that are not finite must still give a token of the vocabulary
    tl.store(chosen + row, token.to(tl.int64))
    tl.store(sampled + slot, token.to(tl.int64))
    tl.store(rows.parameters + slot * 16 + _TOKEN_INDEX, _word(rows, slot, _TOKEN_INDEX) + 1)
    if _has(rows, slot, _IS_PENALIZED):
        note = notes + slot.to(tl.int64) * rows.vocab + token
        tl.store(note, tl.load(note) + 1)
