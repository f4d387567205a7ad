"""CUDA graphs: decode steps by batch size, steps with short prompts by shape, and the sampler.

Launching a step's kernels one by one takes several times the GPU's own time. All graphs are
captured before the first request and share one memory.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvrelay.kernels.block_tables import append_blocks, step_tables
from kvrelay.kernels.paged_prefill import prefill_tiles, tile_tokens
from kvrelay.kernels.uploads import Uploads, copy_words
from kvrelay.paged_engine.gpu_operations import GpuStep
from kvrelay.paged_engine.gpu_sampler import GpuSampler, SamplePlan
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.step_shapes import MOST_PROMPTS, StepShape, padded, smallest_shape
from kvrelay.paged_engine.step_values import PADDING_ROW, PADDING_SEQUENCE, StepValues, null_step

__all__ = ["GpuGraphs", "StepUploads"]

_UPLOADS = 2
_ROW_FIELDS, _SEQUENCE_FIELDS = len(PADDING_ROW), len(PADDING_SEQUENCE)
# A decode's row, sequence and sampling slot.
_PADDING = np.array([*PADDING_ROW, *PADDING_SEQUENCE, -1], np.int32)


class StepUploads:
    """An uploader of a step's integers, to fixed buffers.

    Owns the block tables of slots.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        chunks_only: bool,
        shapes: Sequence[StepShape],
        device: torch.device,
    ) -> None:
        """Allocate buffers. `chunks_only`: decodes are chunks of one token."""
        self._group = model.num_heads // model.num_kv_heads
        self._block_size, self._chunks_only = block_size, chunks_only
        self._uploads = Uploads(device)
        # Padding may be longer than any request.
        longest = max([max_model_len, *(shape.rows for shape in shapes)])
        self.max_blocks = _to_16_bytes(-(-longest // block_size))
        rows = _to_16_bytes(max_num_seqs)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._null_slot = rows  # behind all others: its blocks stay null
        self._slot_tables = zeros(rows + 1, self.max_blocks)
        # Chunks and proposals together are `max_num_seqs` at most.
        self._tables = zeros(rows + MOST_PROMPTS, self.max_blocks)
        self._decodes = decodes = zeros(_ROW_FIELDS + _SEQUENCE_FIELDS + 1, rows)
        self._rows, self._sequences = decodes[:_ROW_FIELDS], decodes[_ROW_FIELDS:-1]
        self._pinned_decodes = [
            torch.zeros(decodes.shape, dtype=torch.int32).pin_memory() for _ in range(_UPLOADS)
        ]
        self._one_row_each = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._one_tile_each = torch.stack(
            (self._one_row_each[:-1], torch.zeros_like(self._one_row_each[:-1])), 1
        )
        self._turn = 0
        self.shapes = shapes
        self._shaped = zeros(max((self._numbers_of(shape) for shape in shapes), default=0))

    @property
    def decode_slots(self) -> torch.Tensor:
        return self._decodes[-1]

    def decode_step(self, rows: int, *, adapted: bool = False) -> GpuStep:
        sequences = self._sequences[:, :rows]
        return self._step(
            self._rows[:, :rows],
            sequences,
            decode_context_lens=sequences[1, : 0 if self._chunks_only else rows],
            query_starts=self._one_row_each[: rows + 1] if self._chunks_only else None,
            tiles=self._one_tile_each[:rows] if self._chunks_only else None,
            sampled_rows=None,
            adapted=adapted,
        )

    def _step(
        self, rows: torch.Tensor, sequences: torch.Tensor, *, adapted: bool, **others: Any
    ) -> GpuStep:
        return GpuStep(
            token_ids=rows[0],
            source=rows[1],
            positions=rows[2],
            blocks=rows[3],
            offsets=rows[4],
            context_lens=sequences[1],
            tables=self._tables[: sequences.shape[1]],
            adapters=rows[5] if adapted else None,
            **others,
        )

    def decode_tables(self, rows: int) -> None:
        self._fill_tables(self._sequences[:, :rows])

    def _fill_tables(self, sequences: torch.Tensor) -> None:
        slots, contexts, newest_blocks = sequences
        step_tables(
            slots,
            contexts,
            newest_blocks,
            self._slot_tables,
            self._tables[: sequences.shape[1]],
            block_size=self._block_size,
        )

    def decodes(self, values: StepValues) -> None:
        count = values.rows.shape[1]
        self._turn = (self._turn + 1) % _UPLOADS
        pinned = self._pinned_decodes[self._turn]
        host = pinned.numpy()
        host[:_ROW_FIELDS, :count] = values.rows
        host[_ROW_FIELDS:-1, :count] = values.sequences
        host[-1, :count] = values.sampled_slots
        host[:, count:] = _PADDING[:, None]
        copy_words(pinned, self._decodes)
        if values.new_blocks.size:
            self.append(self._send(values.new_blocks)[0])

    def chunks(self, values: StepValues) -> tuple[GpuStep, torch.Tensor]:
        """Upload a step without a graph; return its tensors and the slots of its sampled rows.

        Logits are wanted of the sampled rows, then of the scored ones.
        """
        decodes = 0 if self._chunks_only else values.decodes
        wanted = np.concatenate((values.sampled_rows, values.scored_rows))
        return self._chunk_step(
            values,
            values.sequences[1, :decodes],
            self._tiles(values, decodes),
            wanted,
            values.sampled_slots,
            None,
        )

    def shaped(self, values: StepValues, shape: StepShape) -> GpuStep:
        """Pad a step and upload it to its shape's fixed addresses and `decode_slots`."""
        padding, decodes = shape.samples - len(values.sampled_slots), values.decodes
        step = padded(values, shape, null_slot=self._null_slot, block_size=self._block_size)
        contexts = np.zeros(shape.decodes, np.int32)
        contexts[:decodes] = values.sequences[1, :decodes]
        tiles = np.zeros((self._most_tiles(shape), 2), np.int32)
        tiles[:, 0] = len(step.counts) - 1  # which has no rows
        needed = self._tiles(step, decodes)
        tiles[: len(needed)] = needed
        wanted = np.pad(step.sampled_rows, (0, padding))
        slots = np.pad(step.sampled_slots, (0, padding), constant_values=-1)
        on_device, slots_ = self._chunk_step(step, contexts, tiles, wanted, slots, self._shaped)
        self._decodes[-1, : shape.samples].copy_(slots_)
        return on_device

    def _numbers_of(self, shape: StepShape) -> int:
        sequences = shape.decodes + shape.prompts
        others = shape.decodes + 2 * (self._most_tiles(shape) + shape.samples)
        to_16_bytes = 64
        return _ROW_FIELDS * shape.rows + (_SEQUENCE_FIELDS + 1) * sequences + others + to_16_bytes

    def _most_tiles(self, shape: StepShape) -> int:
        return shape.rows // tile_tokens(self._group) + shape.prompts

    def _tiles(self, values: StepValues, decodes: int) -> np.ndarray:
        counts, contexts = values.counts[decodes:], values.sequences[1, decodes:]
        tiles = prefill_tiles(counts.tolist(), contexts.tolist(), group=self._group)
        return tiles + np.array([decodes, 0], np.int32)

    def _chunk_step(
        self,
        values: StepValues,
        decode_contexts: np.ndarray,
        tiles: np.ndarray,
        wanted_rows: np.ndarray,
        wanted_slots: np.ndarray,
        into: torch.Tensor | None,
    ) -> tuple[GpuStep, torch.Tensor]:
        if values.new_blocks.size:
            self.append(self._send(values.new_blocks)[0])
        rows, sequences, contexts, starts, tiles_, wanted, slots = self._send(
            values.rows,
            values.sequences,
            decode_contexts,
            np.concatenate(([0], values.counts.cumsum())).astype(np.int32),
            tiles.reshape(-1),
            wanted_rows,
            wanted_slots,
            into=into,
        )
        self._fill_tables(sequences)
        step = self._step(
            rows,
            sequences,
            decode_context_lens=contexts,
            query_starts=starts,
            tiles=tiles_.view(-1, 2) if len(tiles) else None,
            sampled_rows=wanted,
            adapted=values.adapted,
        )
        return step, slots

    def append(self, new_blocks: torch.Tensor) -> None:
        append_blocks(self._slot_tables, new_blocks[0], new_blocks[1])

    def _send(self, *arrays: np.ndarray, into: torch.Tensor | None = None) -> list[torch.Tensor]:
        widened = [(a.shape[:-1], -(-a.shape[-1] // 4) * 4) for a in arrays]
        sizes = [math.prod(outer) * width for outer, width in widened]
        flat = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
        host, end = flat.numpy(), 0
        for array, (outer, width), size in zip(arrays, widened, sizes, strict=True):
            host[end : end + size].reshape(*outer, width)[..., : array.shape[-1]] = array
            end += size
        device = torch.split(self._uploads.send(flat, into), sizes)
        return [
            piece.view(*outer, width)[..., : array.shape[-1]]
            for piece, array, (outer, width) in zip(device, arrays, widened, strict=True)
        ]


def _to_16_bytes(numbers: int) -> int:
    return -(-numbers // 4) * 4


# NCCL's watchdog thread may ask for events while we capture.
_CAPTURE = "thread_local"


@dataclass(frozen=True, slots=True)
class _OfBatch:
    decodes: torch.cuda.CUDAGraph
    adapted: torch.cuda.CUDAGraph | None  # into the same logits
    logits: torch.Tensor  # [rows, vocab]
    # By whether rows are cut; tokens int64 [rows].
    samplers: dict[bool, tuple[torch.cuda.CUDAGraph, torch.Tensor]]


class GpuGraphs:
    """A set of all CUDA graphs; logits share one memory."""

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[GpuStep], torch.Tensor],
        uploads: StepUploads,
        sampler: GpuSampler,
        *,
        max_num_seqs: int,
        adapters: bool,
    ) -> None:
        self._forward, self._uploads, self._sampler = forward, uploads, sampler
        self._memory: Any = torch.cuda.graph_pool_handle()
        small, steps = (n for n in range(1, 8) if n < max_num_seqs), range(8, max_num_seqs, 8)
        self._sizes: list[int] = [*small, *steps, max_num_seqs]
        with _nothing_collected():
            kinds = (False, True) if adapters else (False,)
            self._of_shape = {
                (s, adapted): self._capture_shape(s, adapted)
                for s in reversed(uploads.shapes)
                for adapted in kinds
            }
            self._of_batch = {
                rows: self._capture_batch(rows, adapters=adapters) for rows in reversed(self._sizes)
            }

    def logits(self, values: StepValues) -> torch.Tensor | None:
        """Upload and compute a step; return logits [sampled rows, vocab], of `decode_slots`.

        Returns None if there is no graph for it.
        """
        rows = len(values.sampled_rows)
        if values.is_decode:
            graphs = self._of_batch[self._size(rows)]
            self._uploads.decodes(values)
            forward = graphs.adapted if values.adapted else graphs.decodes
            assert forward is not None, "a row has an adapter, and the engine has no slots for any"
            forward.replay()
            return graphs.logits[:rows]
        shape = smallest_shape(values, self._uploads.shapes)
        if shape is None:
            return None
        self._uploads.shaped(values, shape)
        self._of_shape[shape, values.adapted].replay()
        return self._of_batch[self._size(rows)].logits[:rows]

    def sample(self, plan: SamplePlan) -> torch.Tensor:
        """Return int64 tokens [rows] of the newest logits(), for plans that adjust nothing."""
        sampler, tokens = self._of_batch[self._size(plan.rows)].samplers[plan.cut]
        sampler.replay()
        return tokens[: plan.rows]

    def close(self) -> None:
        self._of_shape.clear()
        self._of_batch.clear()

    def _size(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def _capture_shape(self, shape: StepShape, adapted: bool) -> torch.cuda.CUDAGraph:
        values = null_step([2], 1, 0 if adapted else -1)
        step = self._uploads.shaped(values, shape)
        graph, _ = self._capture(lambda: self._forward(step))
        return graph

    def _capture_batch(self, rows: int, *, adapters: bool) -> _OfBatch:
        step = self._uploads.decode_step(rows)
        decodes, logits = self._capture(lambda: self._decode_pass(step))
        adapted = None
        if adapters:
            with_adapters = self._uploads.decode_step(rows, adapted=True)
            adapted, same = self._capture(lambda: self._decode_pass(with_adapters))
            assert same.data_ptr() == logits.data_ptr()
        slots = self._uploads.decode_slots[:rows]

        def sampler(cut: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
            return self._capture(
                lambda: self._sampler.draw(logits, slots, SamplePlan(rows, cut=cut))
            )

        return _OfBatch(decodes, adapted, logits, {cut: sampler(cut) for cut in (False, True)})

    def _decode_pass(self, step: GpuStep) -> torch.Tensor:
        self._uploads.decode_tables(len(step.token_ids))
        return self._forward(step)

    def _capture(
        self, run: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        run()  # compiles kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._memory, torch.cuda.current_stream(), _CAPTURE):
            result = run()
        return graph, result


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
