"""The GPU's runner: steps are launched ahead of the host, decode steps as CUDA graphs over persistent buffers.

A step is three things in the stream: one upload of a few integers per row, the forward pass, the sampler. Nothing of it
waits for the host: a decode's token is read on the device from where the sampler of the step before has left it. The
host synchronizes once a step, when it takes the tokens of the step before the one it has just launched.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np
import torch

from kernels.block_tables import append_blocks, step_tables
from kernels.prefill_tiles import prefill_tiles
from paged_engine.before_loading import compute_dtype
from paged_engine.blocks import NULL_BLOCK
from paged_engine.decoder import Decoder
from paged_engine.gpu_memory import GpuBudget, least_weight_bytes
from paged_engine.gpu_operations import GpuOperations, GpuStep
from paged_engine.gpu_sampler import GpuSampler, Sampled, SamplePlan
from paged_engine.kv_pool import FP8, KVPool, block_bytes, blocks_in, default_block_tokens, longest_context
from paged_engine.model_config import ModelConfig
from paged_engine.ranks import Ranks
from paged_engine.request import Request
from paged_engine.scheduler import Chunk
from paged_engine.step_values import ROW_FIELDS, SEQUENCE_FIELDS, PlannedStep, Slots, StepValues
from wire.config import EngineConfig
from wire.engine_messages import Submit
from wire.errors import ConfigError
from wire.outputs import TokenLogprobs

__all__ = ["GpuRunner"]

log = logging.getLogger("kvrelay.engine")

_STEP_TOKENS = 8192
_MAX_RUNNING = 256
# Two uploads may be under way at once: that of the running step's successor and, not yet read, its own.
_UPLOADS = 2
# A step of several ranks that takes longer has lost one: NCCL itself would wait for it on the GPU for ever.
_RANKS_DEADLINE_S = 60.0
# NCCL's watchdog thread may ask for events while we capture.
_CAPTURE = "thread_local"


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that the device is running."""

    requests: Sequence[Request]
    sampled: Sampled
    deadline_s: float | None

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        return self.sampled.wait(self.deadline_s)


@dataclass(frozen=True, slots=True)
class _Graphs:
    """Of one batch size. The sampler is a graph of its own, so that something can be done to the logits before it."""

    forward: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [rows, vocab]
    samplers: dict[bool, tuple[torch.cuda.CUDAGraph, torch.Tensor]]  # by whether rows are cut; tokens int64 [rows]


class _RankStep(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells the others of a step."""

    arrays: list[tuple[tuple[int, ...], bytes]]  # the fields of StepValues: shape and int32 values
    admitted: list[tuple[int, Submit]]

    @classmethod
    def of(cls, planned: PlannedStep) -> _RankStep:
        arrays = [getattr(planned.values, field.name) for field in fields(StepValues)]
        return cls([(a.shape, a.tobytes()) for a in arrays], [(s, _submit(r)) for s, r in planned.admitted])

    def values(self) -> StepValues:
        return StepValues(*(np.frombuffer(raw, np.int32).reshape(shape) for shape, raw in self.arrays))


def _submit(request: Request) -> Submit:
    prompt, generated = request.token_ids[: request.prompt_tokens], request.token_ids[request.prompt_tokens :]
    return Submit(request.request_id, prompt, request.params, generated=generated)


class GpuRunner:
    """One rank on one GPU. See paged_engine/runner.py for the interface."""

    runs_ahead = True

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        device: torch.device,
        ranks: Ranks,
    ) -> GpuRunner:
        """Load the weights, measure what a step needs, give the rest to the KV pool, capture the graphs.

        Raises ConfigError when the configuration cannot work on this GPU.
        """
        torch.cuda.set_device(device)
        # Above the streams that move KV to and fro beside the steps, for which 0 is the lowest.
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
        _refuse_unserved(config, device)
        budget = GpuBudget.of(device, config.gpu_memory_utilization)
        budget.check_weights(least_weight_bytes(model, ranks.size, quantize=config.quantization == "fp8"))
        return cls(config, model, weights, device, ranks, budget)

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        device: torch.device,
        ranks: Ranks,
        budget: GpuBudget,
    ) -> None:
        dtype = compute_dtype(config, model, device)
        kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else dtype
        self._device, self._ranks = device, ranks
        self._block_tokens = config.block_tokens or default_block_tokens(device)
        self.max_batched_tokens = config.max_batched_tokens or _STEP_TOKENS
        self.max_running = min(config.max_running or _MAX_RUNNING, self.max_batched_tokens)
        self._sampler = GpuSampler(
            max_slots=self.max_running, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids, device=device
        )
        self._operations = GpuOperations(
            model,
            ranks,
            sampled=self._sampler.sampled,
            max_rows=self.max_running,
            kv_dtype=kv_dtype,
            batch_invariant=config.batch_invariant,
            quantize=config.quantization == "fp8",
        )
        self._decoder = Decoder(
            model,
            weights,
            self._operations,
            device=device,
            dtype=dtype,
            max_positions=config.max_model_len or model.max_position,
        )
        self.rope_variant = self._decoder.rope_variant
        self._chunks_only = config.batch_invariant  # decodes are computed as chunks of one token
        # A step is measured over a pool of two blocks; then the pool takes what is left.
        self.pool = KVPool(model, num_blocks=2, block_tokens=self._block_tokens, dtype=kv_dtype, device=device)
        longest = min(config.max_model_len or model.max_position, self.max_batched_tokens)
        self._make_buffers(longest)
        self._run_largest_step(longest)
        pool_bytes = config.kv_cache_memory or budget.left_for_kv()
        num_blocks = ranks.least(
            blocks_in(model, pool_bytes=pool_bytes, block_tokens=self._block_tokens, dtype=kv_dtype)
        )
        budget.check(num_blocks * block_bytes(model, self._block_tokens, kv_dtype))
        self.max_model_len = longest_context(
            config.max_model_len, model, num_blocks=num_blocks, block_tokens=self._block_tokens, dtype=kv_dtype
        )
        self.pool = KVPool(model, num_blocks=num_blocks, block_tokens=self._block_tokens, dtype=kv_dtype, device=device)
        self._make_buffers(self.max_model_len)
        self._slots = Slots(self.max_running, max_blocks=self._max_blocks, block_tokens=self._block_tokens)
        self._graphs: dict[int, _Graphs] = {}
        self._followed: dict[int, Request] = {}
        self._warm_up()
        self._capture()
        log.info("%s", budget.report(num_blocks * self._block_tokens))

    # --- a step --------------------------------------------------------------------------------------------------

    def launch(self, chunks: Sequence[Chunk]) -> _InFlight:
        """Queue the step on the device; returns at once."""
        planned = self._slots.step(chunks)
        if self._ranks.size > 1:
            self._ranks.tell(msgspec.msgpack.encode(_RankStep.of(planned)))
        for slot, request in planned.admitted:
            self._sampler.admit(slot, request)
        sampled = self._execute(planned.values, planned.sampling)
        sampled.start_copy()
        return _InFlight(planned.sampling, sampled, _RANKS_DEADLINE_S if self._ranks.size > 1 else None)

    def follow(self, message: bytes) -> None:
        """The step that rank 0 has launched. The logits are equal on all ranks, and so are the tokens drawn of them."""
        step = msgspec.msgpack.decode(message, type=_RankStep)
        for slot, submit in step.admitted:
            request = self._followed[slot] = Request.of(submit, 0.0)
            self._sampler.admit(slot, request)
        values = step.values()
        self._execute(values, [self._followed[slot] for slot in values.sampled_slots.tolist()])

    def close(self) -> None:
        """Leave the group; rank 0 ends the others."""
        if self._ranks.rank == 0:
            self._ranks.tell(b"")
        # A NCCL group does not end before the last graph that holds its calls.
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._ranks.close()

    @torch.inference_mode()
    def _execute(self, values: StepValues, sampling: Sequence[Request]) -> Sampled:
        plan = self._sampler.prepare(values.sampled_slots.tolist(), sampling)
        if values.is_decode:
            graphs = self._graphs[self._bucket(plan.rows)]
            self._upload_decodes(values)
            graphs.forward.replay()
            logits, slots = graphs.logits[: plan.rows], self._sequences[0, : plan.rows]
            if not plan.adjusted:
                sampler, tokens = graphs.samplers[plan.cut]
                sampler.replay()
                return self._sampler.read(logits, tokens[: plan.rows], plan)
        else:
            step, slots = self._upload_chunks(values)
            logits = self._forward(step)
        return self._sampler.launch(logits, slots, plan)

    def _forward(self, step: GpuStep) -> torch.Tensor:
        self._operations.plan(step, self._block_tokens)
        return self._decoder.forward(step, self.pool)

    # --- what goes up to the device ------------------------------------------------------------------------------

    def _make_buffers(self, max_model_len: int) -> None:
        # Rows of these tables begin on 16 bytes whatever the limits: kernels are compiled for one alignment only.
        self._max_blocks = _to_16_bytes(-(-max_model_len // self._block_tokens))
        rows = _to_16_bytes(self.max_running)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        self._slot_tables = zeros(rows, self._max_blocks)
        self._tables = zeros(rows, self._max_blocks)
        # What decode graphs read: at fixed addresses, one upload for all.
        decodes = zeros(ROW_FIELDS + SEQUENCE_FIELDS, rows)
        self._rows, self._sequences, self._decodes = decodes[:ROW_FIELDS], decodes[ROW_FIELDS:], decodes
        self._pinned_decodes = [torch.zeros(decodes.shape, dtype=torch.int32).pin_memory() for _ in range(_UPLOADS)]
        self._one_row_each = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        self._one_tile_each = torch.stack((self._one_row_each[:-1], torch.zeros_like(self._one_row_each[:-1])), 1)
        self._turn = 0

    def _upload_decodes(self, values: StepValues) -> None:
        """Into the graphs' buffers; rows beyond the step's are padding, which touches nothing but the null block."""
        count = values.rows.shape[1]
        self._turn = (self._turn + 1) % _UPLOADS
        pinned = self._pinned_decodes[self._turn]
        host = pinned.numpy()
        host[:ROW_FIELDS, :count] = values.rows
        host[ROW_FIELDS:, :count] = values.sequences
        host[:, count:] = _PADDING[:, None]
        self._decodes.copy_(pinned, non_blocking=True)
        if values.new_blocks.size:
            self._append(self._send(values.new_blocks)[0])

    def _upload_chunks(self, values: StepValues) -> tuple[GpuStep, torch.Tensor]:
        """The tensors of a step that is not one of the graphs', and the slots of its sampled rows."""
        decodes = 0 if self._chunks_only else int((values.counts == 1).sum())
        counts = values.counts[decodes:]
        starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
        contexts = values.sequences[1, decodes:]
        config = self._decoder.config
        tiles = prefill_tiles(
            counts.tolist(),
            contexts.tolist(),
            group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim,
        )
        rows, sequences, contexts_, starts_, tiles_, new_blocks, sampled_rows, slots = self._send(
            values.rows,
            values.sequences,
            contexts,
            starts,
            tiles.reshape(-1),
            values.new_blocks,
            values.sampled_rows,
            values.sampled_slots,
        )
        if values.new_blocks.size:
            self._append(new_blocks)
        tables = self._tables[: sequences.shape[1]]
        all_slots, all_contexts, newest_blocks = sequences
        step_tables(all_slots, all_contexts, newest_blocks, self._slot_tables, tables, block_tokens=self._block_tokens)
        return (
            GpuStep(
                decodes=decodes,
                token_ids=rows[0],
                source=rows[1],
                positions=rows[2],
                blocks=rows[3],
                offsets=rows[4],
                context_lens=sequences[1],
                tables=tables,
                chunk_context_lens=contexts_,
                query_starts=starts_ if len(counts) else None,
                tiles=tiles_.view(-1, 2) if len(counts) else None,
                sampled_rows=sampled_rows,
            ),
            slots,
        )

    def _append(self, new_blocks: torch.Tensor) -> None:
        append_blocks(self._slot_tables, new_blocks[0], new_blocks[1])

    def _send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """All arrays in one upload, each of their rows from 16 bytes on: kernels are compiled for one alignment only.

        The pinned memory returns to torch's cache when the copy is done.
        """
        padded = [(a.shape[:-1], -(-a.shape[-1] // 4) * 4) for a in arrays]
        sizes = [math.prod(outer) * width for outer, width in padded]
        flat = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
        host, end = flat.numpy(), 0
        for array, (outer, width), size in zip(arrays, padded, sizes, strict=True):
            host[end : end + size].reshape(*outer, width)[..., : array.shape[-1]] = array
            end += size
        device = torch.split(flat.to(self._device, non_blocking=True), sizes)
        return [
            piece.view(*outer, width)[..., : array.shape[-1]]
            for piece, array, (outer, width) in zip(device, arrays, padded, strict=True)
        ]

    # --- graphs --------------------------------------------------------------------------------------------------

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def _decode_step(self, rows: int) -> GpuStep:
        """The persistent buffers of the graph for `rows` decodes."""
        return GpuStep(
            decodes=0 if self._chunks_only else rows,
            token_ids=self._rows[0, :rows],
            source=self._rows[1, :rows],
            positions=self._rows[2, :rows],
            blocks=self._rows[3, :rows],
            offsets=self._rows[4, :rows],
            context_lens=self._sequences[1, :rows],
            tables=self._tables[:rows],
            chunk_context_lens=self._sequences[1, :rows],
            query_starts=self._one_row_each[: rows + 1] if self._chunks_only else None,
            tiles=self._one_tile_each[:rows] if self._chunks_only else None,
            sampled_rows=None,
        )

    @torch.inference_mode()
    def _capture(self) -> None:
        """A graph for every batch size: all up to 8, then steps of 8; the largest first, as all share one memory."""
        top = self.max_running
        self._sizes: list[int] = sorted({*(n for n in (1, 2, 3, 4, 5, 6, 7) if n < top), *range(8, top, 8), top})
        memory = torch.cuda.graph_pool_handle()
        for rows in reversed(self._sizes):
            step = self._decode_step(rows)
            self._decode_pass(step)  # compiles what is not compiled yet
            torch.cuda.synchronize()
            forward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward, memory, torch.cuda.current_stream(), _CAPTURE):
                logits = self._decode_pass(step)
            self._graphs[rows] = _Graphs(
                forward, logits, {cut: self._capture_sampler(logits, rows, cut, memory) for cut in (False, True)}
            )

    def _capture_sampler(
        self, logits: torch.Tensor, rows: int, cut: bool, memory: Any
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        plan, slots = SamplePlan(rows, cut=cut), self._sequences[0, :rows]
        self._sampler.draw(logits, slots, plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, memory, torch.cuda.current_stream(), _CAPTURE):
            tokens = self._sampler.draw(logits, slots, plan)
        return graph, tokens

    def _decode_pass(self, step: GpuStep) -> torch.Tensor:
        rows = len(step.token_ids)
        slots, contexts, newest = self._sequences[:, :rows]
        step_tables(slots, contexts, newest, self._slot_tables, self._tables[:rows], block_tokens=self._block_tokens)
        return self._forward(step)

    # --- before the first request --------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run_largest_step(self, longest: int) -> None:
        """As many tokens as a step may have, and as many sampled rows, over the null block."""
        whole, rest = divmod(min(self.max_batched_tokens, longest * self.max_running), longest)
        self._run_dummy([longest] * whole + [rest] * (rest > 0))
        self._run_dummy([1] * self.max_running)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Every kernel variant is compiled and every library handle made before the node says that it is ready."""
        largest = min(self.max_batched_tokens, self.max_model_len)
        for counts in ([1], [2], [17], [16, 1], [300, 5, 1, 1], [largest]):
            if max(counts) <= largest and sum(counts) <= self.max_batched_tokens and len(counts) <= self.max_running:
                self._run_dummy(counts)
        self._append(torch.zeros(2, 1, dtype=torch.int32, device=self._device))
        self._sampler.warm_up(self._decoder.dtype)
        torch.cuda.synchronize()

    def _run_dummy(self, counts: Sequence[int]) -> None:
        counts = sorted(counts, key=lambda count: count > 1)
        total, sequences = sum(counts), len(counts)
        rows = np.zeros((ROW_FIELDS, total), np.int32)
        rows[1] = -1
        rows[2] = np.concatenate([np.arange(count) for count in counts])
        rows[3], rows[4] = NULL_BLOCK, rows[2] % self._block_tokens
        values = StepValues(
            rows=rows,
            sequences=np.stack((np.arange(sequences), np.array(counts), np.zeros(sequences))).astype(np.int32),
            counts=np.array(counts, np.int32),
            new_blocks=np.zeros((2, 0), np.int32),
            sampled_rows=(np.cumsum(counts) - 1).astype(np.int32),
            sampled_slots=np.arange(sequences, dtype=np.int32),
        )
        step, slots = self._upload_chunks(values)
        self._sampler.launch(self._forward(step), slots, SamplePlan(len(slots), cut=True, adjusted=True))


# token id, source, position, block, offset; slot, context length, newest block
_PADDING = np.array([0, -1, 0, NULL_BLOCK, 0, -1, 0, NULL_BLOCK], np.int32)


def _to_16_bytes(numbers: int) -> int:
    return -(-numbers // 4) * 4


def _refuse_unserved(config: EngineConfig, device: torch.device) -> None:
    in_fp8 = config.kv_cache_dtype == "fp8" or config.quantization == "fp8"
    capability = torch.cuda.get_device_capability(device)
    if in_fp8 and capability < (8, 9):
        raise ConfigError(
            f"fp8 needs a GPU of compute capability 8.9 or more, {torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}; leave out kv_cache_dtype and quantization"
        )
