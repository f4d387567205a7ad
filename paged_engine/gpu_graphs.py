"""The CUDA graphs of a GPU: of decode steps by batch size, of steps with short prompts by shape, of
the sampler.

Without them such a step takes what the host needs to launch its kernels, several times what the GPU
has to do. All are captured before the first request, over buffers at fixed addresses
(paged_engine/gpu_uploads.py), in one memory: they run one after the other. The sampler is a graph
of its own, so that something can be done to the logits before it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvrelay.paged_engine.gpu_operations import GpuStep
from kvrelay.paged_engine.gpu_sampler import GpuSampler, SamplePlan
from kvrelay.paged_engine.gpu_uploads import StepUploads
from kvrelay.paged_engine.step_shapes import StepShape, shape_of
from kvrelay.paged_engine.step_values import StepValues, null_step

__all__ = ["GpuGraphs"]

# NCCL's watchdog thread may ask for events while we capture.
_CAPTURE = "thread_local"


@dataclass(frozen=True, slots=True)
class _OfBatch:
    """The graphs of one number of sampled rows."""

    decodes: torch.cuda.CUDAGraph
    adapted: torch.cuda.CUDAGraph | None  # the same with adapters, into the same logits
    logits: torch.Tensor  # [rows, vocab]
    samplers: dict[
        bool, tuple[torch.cuda.CUDAGraph, torch.Tensor]
    ]  # by whether rows are cut; tokens int64 [rows]


class GpuGraphs:
    """`forward` computes the logits of a step, all in the same memory: those of row i lie in row i
    of it.
    """

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
        """Capture all; the largest first. `adapters`: each with adapters, too."""
        self._forward, self._uploads, self._sampler = forward, uploads, sampler
        self._memory: Any = torch.cuda.graph_pool_handle()
        # All batches up to 8, then steps of 8.
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
        """Upload and compute the step: the logits [sampled rows, vocab], whose slots are
        `decode_slots` of the uploads. None, and nothing done, if there is no graph for such a step.
        """
        rows = len(values.sampled_rows)
        if values.is_decode:
            graphs = self._of_batch[self._size(rows)]
            self._uploads.decodes(values)
            forward = graphs.adapted if values.adapted else graphs.decodes
            assert forward is not None, "a row has an adapter, and the engine has no slots for any"
            forward.replay()
            return graphs.logits[:rows]
        shape = shape_of(values, self._uploads.shapes)
        if shape is None:
            return None
        self._uploads.shaped(values, shape)
        self._of_shape[shape, values.adapted].replay()
        return self._of_batch[self._size(rows)].logits[:rows]

    def sample(self, plan: SamplePlan) -> torch.Tensor:
        """The tokens int64 [rows] of what logits() has computed last; for plans that adjust
        nothing.
        """
        sampler, tokens = self._of_batch[self._size(plan.rows)].samplers[plan.cut]
        sampler.replay()
        return tokens[: plan.rows]

    def close(self) -> None:
        """Drop all graphs, and with them what they hold of libraries."""
        self._of_shape.clear()
        self._of_batch.clear()

    def _size(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def _capture_shape(self, shape: StepShape, adapted: bool) -> torch.cuda.CUDAGraph:
        values = null_step([2], 1, 0 if adapted else -1)
        if not shape.samples:
            values = replace(
                values, sampled_rows=values.scored_rows, sampled_slots=values.scored_rows
            )  # none
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
        run()  # compiles what is not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._memory, torch.cuda.current_stream(), _CAPTURE):
            result = run()
        return graph, result


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """A capture fails if the collector frees memory of the GPU in it, of an engine before this one
    for example.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
