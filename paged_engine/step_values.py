"""A scheduled step as plain arrays: what a GPU and every rank of its group are told. Pure numpy.

A *slot* is a running request's row in tables on the device, so a step carries only one token,
position and block per decode. A chunk with proposals is sampled in *spare* slots, one per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import msgspec
import numpy as np

from kvrelay.paged_engine.blocks import NULL_BLOCK
from kvrelay.paged_engine.request import Chunk, Request, ScoredRows, State
from kvrelay.wire.engine_messages import Submit

__all__ = [
    "PADDING_ROW",
    "PADDING_SEQUENCE",
    "PlannedStep",
    "RankStep",
    "SlotState",
    "Slots",
    "StepValues",
    "null_step",
]

# Touches nothing but the null block.
PADDING_ROW = np.array([0, -1, 0, NULL_BLOCK, 0, -1], np.int32)
PADDING_SEQUENCE = np.array([-1, 0, NULL_BLOCK], np.int32)


@dataclass(frozen=True, slots=True)
class StepValues:
    """A step as int32 arrays: T rows (tokens) of S sequences, one-token sequences first.

    A newest token and its proposals are one-token sequences with the same slot.
    """

    rows: np.ndarray
    """[6, T]: token id, source slot, position, block, offset, adapter slot or -1.

    A source slot >= 0: the token is the newest one sampled for that slot.
    """
    sequences: np.ndarray
    """[3, S]: slot, context length, block of the newest token."""
    counts: np.ndarray  # [S] rows of each sequence
    new_blocks: np.ndarray  # [2, N] place in the flattened block tables of the slots, block id
    sampled_rows: np.ndarray  # [R]
    sampled_slots: np.ndarray  # [R]
    scored_rows: np.ndarray  # [Q] whose logits are wanted too

    @property
    def decodes(self) -> int:
        return int((self.counts == 1).sum())

    @property
    def adapted(self) -> bool:
        return bool((self.rows[5] >= 0).any())

    @property
    def is_decode(self) -> bool:
        one_row_each = len(self.sampled_rows) == self.rows.shape[1] == self.sequences.shape[1]
        return bool(one_row_each and not len(self.scored_rows))


class SlotState(NamedTuple):
    """A slot's next sampling state: that of `seat` at `token_index`."""

    slot: int
    seat: int
    token_index: int
    newest: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    values: StepValues
    admitted: list[tuple[int, Request]]
    states: list[SlotState]
    """News for slots, beside `admitted`."""
    sampling: list[Request]
    scored: ScoredRows | None


@dataclass(slots=True)
class _Seat:
    slot: int
    blocks: list[int]  # a preempted request comes back with another list
    known: int = 0  # to the device's table
    behind: bool = False  # sampled in spare slots


class Slots:
    """A table of running requests' slots, and of what the device knows of them.

    News of a slot is queued behind the step that used it.
    """

    def __init__(self, count: int, *, max_blocks: int, block_size: int) -> None:
        self._count = count
        self._free = list(reversed(range(count)))
        self._max_blocks, self._block_size = max_blocks, block_size
        self._seats: dict[Request, _Seat] = {}

    def step(self, chunks: Sequence[Chunk]) -> PlannedStep:
        # Rows of an adapter side by side.
        chunks = sorted(
            chunks, key=lambda chunk: (_by_rows(chunk) < chunk.count, chunk.request.adapter_slot)
        )
        seated = [self._seat(chunk.request) for chunk in chunks]
        rows = np.zeros((len(PADDING_ROW), sum(chunk.count for chunk in chunks)), np.int32)
        sequences, counts, new_blocks, end = [], [], [], 0
        sampled_rows: list[int] = []
        scored_rows: list[int] = []
        sampled: list[tuple[int, Request]] = []
        states: list[SlotState] = []
        for chunk, (seat, _) in zip(chunks, seated, strict=True):
            start, end = end, end + chunk.count
            self._fill(rows[:, start:end], chunk, seat.slot)
            newest = (chunk.start + chunk.count - 1) // self._block_size
            first = seat.slot * self._max_blocks
            new_blocks += [
                (first + index, seat.blocks[index]) for index in range(seat.known, newest)
            ]
            seat.known = newest + 1
            for context_len in range(
                chunk.start + chunk.count + 1 - _by_rows(chunk), chunk.start + chunk.count + 1
            ):
                sequences.append(
                    (seat.slot, context_len, seat.blocks[(context_len - 1) // self._block_size])
                )
                counts.append(chunk.count // _by_rows(chunk))
            sampled_rows += range(end - chunk.sampled_rows, end)
            scored_rows += [start + position - chunk.start for position in chunk.scored]
            if chunk.samples:
                slots, slot_states = self._sampled(chunk, seat, len(sampled))
                sampled += [(slot, chunk.request) for slot in slots]
                states += slot_states
        values = StepValues(
            rows=rows,
            sequences=_int32(sequences, len(PADDING_SEQUENCE)).T,
            counts=_int32(counts),
            new_blocks=_int32(new_blocks, 2).T,
            sampled_rows=_int32(sampled_rows),
            sampled_slots=_int32([slot for slot, _ in sampled]),
            scored_rows=_int32(scored_rows),
        )
        return PlannedStep(
            values,
            admitted=[
                (seat.slot, c.request) for c, (seat, new) in zip(chunks, seated, strict=True) if new
            ],
            states=states,
            sampling=[request for _, request in sampled],
            scored=ScoredRows.from_chunks(chunks),
        )

    def _sampled(self, chunk: Chunk, seat: _Seat, row: int) -> tuple[list[int], list[SlotState]]:
        request, behind = chunk.request, seat.behind
        seat.behind = bool(chunk.proposals)
        if not (chunk.proposals or behind):
            return [seat.slot], []
        slots = (
            [self._count + row + ahead for ahead in range(chunk.sampled_rows)]
            if chunk.proposals
            else [seat.slot]
        )
        index, newest = request.output_tokens, [request.token_ids[-1], *chunk.proposals]
        return slots, [
            SlotState(slot, seat.slot, index + i, newest[i]) for i, slot in enumerate(slots)
        ]

    def _fill(self, rows: np.ndarray, chunk: Chunk, slot: int) -> None:
        request, block_size = chunk.request, self._block_size
        if chunk.count == 1:
            position = chunk.start
            pending = position >= len(request.token_ids)
            rows[:, 0] = (
                0 if pending else request.token_ids[position],
                slot if pending else -1,
                position,
                request.blocks[position // block_size],
                position % block_size,
                request.adapter_slot,
            )
            return
        known = chunk.token_ids
        rows[0, : len(known)] = known
        rows[1] = -1
        rows[1, len(known) :] = slot
        places = np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int32)
        rows[2] = places
        rows[3] = np.asarray(request.blocks, np.int32)[places // block_size]
        rows[4] = places % block_size
        rows[5] = request.adapter_slot

    def _seat(self, request: Request) -> tuple[_Seat, bool]:
        seat = self._seats.get(request)
        if seat is not None and seat.blocks is request.blocks:
            return seat, False
        if seat is not None:
            self._leave(request)
        if not self._free:
            for other in [r for r in self._seats if r.state is not State.RUNNING]:
                self._leave(other)
        seat = self._seats[request] = _Seat(self._free.pop(), request.blocks)
        return seat, True

    def _leave(self, request: Request) -> None:
        self._free.append(self._seats.pop(request).slot)


def _by_rows(chunk: Chunk) -> int:
    return chunk.count if chunk.proposals else 1


def null_step(counts: Sequence[int], block_size: int, adapter: int) -> StepValues:
    counts = sorted(counts, key=lambda count: count > 1)
    rows = np.zeros((len(PADDING_ROW), sum(counts)), np.int32)
    rows[1] = -1
    rows[2] = np.concatenate([np.arange(count) for count in counts])
    rows[3], rows[4], rows[5] = NULL_BLOCK, rows[2] % block_size, adapter
    slots = np.arange(len(counts))
    return StepValues(
        rows=rows,
        sequences=np.stack((slots, np.array(counts), np.full(len(counts), NULL_BLOCK))).astype(
            np.int32
        ),
        counts=_int32(counts),
        new_blocks=np.zeros((2, 0), np.int32),
        sampled_rows=_int32(np.cumsum(counts) - 1),
        sampled_slots=_int32(slots),
        scored_rows=np.zeros(0, np.int32),
    )


def _int32(values: Sequence[object] | np.ndarray, columns: int = 0) -> np.ndarray:
    array = np.array(values, np.int32)
    return array.reshape(-1, columns) if columns else array.reshape(-1)


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    arrays: list[tuple[tuple[int, ...], bytes]]  # of StepValues: shape and int32 values
    admitted: list[tuple[int, Submit]]
    states: list[SlotState]
    guided: bool  # the tokens are chosen when a RankMasks has come

    @classmethod
    def from_planned(cls, planned: PlannedStep, guided: bool) -> RankStep:
        arrays = [getattr(planned.values, field.name) for field in fields(StepValues)]
        admitted = [(slot, _submit(request)) for slot, request in planned.admitted]
        return cls([(a.shape, a.tobytes()) for a in arrays], admitted, planned.states, guided)

    def values(self) -> StepValues:
        return StepValues(
            *(np.frombuffer(raw, np.int32).reshape(shape) for shape, raw in self.arrays)
        )


def _submit(request: Request) -> Submit:
    end = request.prompt_tokens
    prompt, generated = request.token_ids[:end], request.token_ids[end:]
    params = msgspec.structs.replace(
        request.params, constraint=None, allowed_token_ids=None, bad_words=()
    )
    return Submit(request.request_id, prompt, params, generated=generated)
