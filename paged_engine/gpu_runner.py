"""The GPU's runner: steps are launched ahead of the host, all but long prompts as CUDA graphs.

A step synchronizes once: for the previous step's tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from kvrelay.paged_engine.adapters import AdapterStore
from kvrelay.paged_engine.before_loading import (
    RESERVE_BYTES,
    compute_dtype,
    default_block_tokens,
    fit_pool,
    kv_dtype_name,
    least_weight_bytes,
)
from kvrelay.paged_engine.decoder import Decoder
from kvrelay.paged_engine.gpu_graphs import GpuGraphs, StepUploads
from kvrelay.paged_engine.gpu_operations import GpuOperations, GpuStep
from kvrelay.paged_engine.gpu_sampler import GpuSampler, Sampled, SamplePlan, to_host
from kvrelay.paged_engine.grammar import row_masks
from kvrelay.paged_engine.guide import RowMasks
from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.request import Chunk, Request, ScoredRows
from kvrelay.paged_engine.sampler import PromptScores
from kvrelay.paged_engine.step_shapes import step_shapes
from kvrelay.paged_engine.step_values import RankStep, Slots, SlotState, StepValues, null_step
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.config_checks import gib
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.outputs import TokenLogprobs

__all__ = ["GpuBudget", "GpuRunner", "GpuStepInFlight"]


log = logging.getLogger("kvrelay.engine")

# Beside decodes max_gap_ms allows less: 2,000 tokens of an 8B model, H200.
_STEP_TOKENS = 8192
_MAX_NUM_SEQS = 256
# A longer step of several ranks has lost one; NCCL would wait forever.
_RANKS_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """A share of a GPU's memory, measured before anything is allocated."""

    device: torch.device
    total_bytes: int
    free_bytes: int
    allowed_bytes: int

    @classmethod
    def measure(
        cls, device: torch.device, utilization: float, least_weight_bytes: int
    ) -> GpuBudget:
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * utilization)
        if allowed > free:
            raise ConfigError(
                f"gpu_memory_utilization {utilization:g} asks for {gib(allowed)} of {gib(total)}, "
                f"but only {gib(free)} are free on {device}; lower it to at most "
                f"{free / total:.2f} or end what else runs there"
            )
        if least_weight_bytes >= allowed:
            raise ConfigError(
                f"the weights need at least {gib(least_weight_bytes)} on each GPU, and "
                f"gpu_memory_utilization allows {gib(allowed)} of {gib(total)}; raise it, use "
                "quantization fp8, or spread the model over more GPUs with tensor_parallel_size"
            )
        return cls(device, total, free, allowed)

    def for_kv(self, wanted: int) -> int:
        """Return the bytes for KV after the largest step: `wanted`, or for 0 all that are left.

        Raises ConfigError if there are fewer.
        """
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        outside_torch = max(0, self.free_bytes - free - torch.cuda.memory_reserved(self.device))
        needed = torch.cuda.max_memory_allocated(self.device) + outside_torch + RESERVE_BYTES
        if wanted > self.free_bytes - needed:
            raise ConfigError(
                f"a KV pool of {gib(wanted)} does not fit: beside the weights and a step "
                f"{gib(max(0, self.free_bytes - needed))} are free; lower kv_cache_memory_bytes"
            )
        if not wanted and needed >= self.allowed_bytes:
            raise ConfigError(
                f"nothing is left for the KV cache: the weights and a step need {gib(needed)}, and "
                f"gpu_memory_utilization allows {gib(self.allowed_bytes)} of "
                f"{gib(self.total_bytes)}. Raise it, lower max_num_batched_tokens or max_num_seqs, "
                "or spread the model over more GPUs"
            )
        return wanted or self.allowed_bytes - needed


@dataclass(frozen=True, slots=True)
class _Forward:
    logits: torch.Tensor  # [rows, vocab]
    slots: torch.Tensor
    plan: SamplePlan
    by_graph: bool
    scored_hidden: torch.Tensor | None = None


@dataclass(slots=True)
class GpuStepInFlight:
    requests: Sequence[Request]
    deadline_s: float | None
    sampled: Sampled | None = None
    prompt_scores: PromptScores | None = None
    later: Callable[[], tuple[Sampled, PromptScores | None]] | None = None

    @property
    def is_done(self) -> bool:
        return self.sampled is not None and self.sampled.is_done

    def sample(self) -> None:
        if self.later is not None:
            (self.sampled, self.prompt_scores), self.later = self.later(), None

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        assert self.sampled is not None, "a step with guided rows was not told to sample"
        return self.sampled.wait(self.deadline_s)

    def scores(self) -> Iterable[tuple[Request, list[TokenLogprobs]]]:
        return () if self.prompt_scores is None else self.prompt_scores.by_request()


class GpuRunner:
    runs_ahead = True

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        """Load weights, measure a step, give the rest to the KV pool and capture graphs.

        Raises ConfigError.
        """
        torch.cuda.set_device(device)
        # Above the streams that move KV beside the steps.
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
        _refuse_fp8(config, device)
        dtype_name, quantize = (
            compute_dtype(config, model, device.type),
            config.quantization == "fp8",
        )
        least = least_weight_bytes(model, ranks.size, dtype=dtype_name, quantize=quantize)
        budget = GpuBudget.measure(device, config.gpu_memory_utilization, least)
        dtype: torch.dtype = getattr(torch, dtype_name)
        kv_dtype: torch.dtype = getattr(torch, kv_dtype_name(config, model, device.type))
        self._device, self._ranks = device, ranks
        self._block_size = config.block_size or default_block_tokens(device.type)
        self.max_num_seqs = config.max_num_seqs or _MAX_NUM_SEQS
        self.max_num_batched_tokens = config.max_num_batched_tokens or _STEP_TOKENS
        self._sampler = GpuSampler(
            max_slots=self.max_num_seqs,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            device=device,
            spare_slots=self.max_num_seqs if config.speculative_config else 0,
        )
        self._operations = GpuOperations(
            model,
            ranks,
            sampled=self._sampler.sampled,
            max_rows=self.max_num_seqs,
            kv_dtype=kv_dtype,
            batch_invariant=config.batch_invariant,
            quantize=quantize,
            adapted=config.adapter_slots > 0,
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
        self.adapters: AdapterStore | None = None
        if config.adapter_slots:
            tile = 16  # a tensor core's
            self.adapters = AdapterStore(config, model, self._decoder.sites(), dtype, tile)
        self._chunks_only = config.batch_invariant
        # A step is measured over a pool of two blocks.
        self.pool = KVPool(
            model, num_blocks=2, block_size=self._block_size, dtype=kv_dtype, device=device
        )
        longest = min(config.max_model_len or model.max_position, self.max_num_batched_tokens)
        self._uploads = self._open_uploads(longest)
        self._run_largest_step(longest)
        pool_bytes = budget.for_kv(config.kv_cache_memory_bytes)
        num_blocks, self.max_model_len = fit_pool(
            config, model, device.type, pool_bytes, ranks.minimum
        )
        self.pool = KVPool(
            model, num_blocks=num_blocks, block_size=self._block_size, dtype=kv_dtype, device=device
        )
        self._uploads = self._open_uploads(self.max_model_len)
        self.shapes = tuple(sorted({shape.rows for shape in self._uploads.shapes}))
        self._slots = Slots(
            self.max_num_seqs, max_blocks=self._uploads.max_blocks, block_size=self._block_size
        )
        self._seated: dict[int, Request] = {}
        self._unsampled: _Forward | None = None
        self._warm_up()
        self._graphs = GpuGraphs(
            self._forward,
            self._uploads,
            self._sampler,
            max_num_seqs=self.max_num_seqs,
            adapters=self.adapters is not None,
        )
        log.info("the KV pool holds %d tokens", num_blocks * self._block_size)

    def _open_uploads(self, max_model_len: int) -> StepUploads:
        # A shape has room for few chunks.
        longest = 0 if self._chunks_only else min(self.max_num_batched_tokens, max_model_len)
        return StepUploads(
            self._decoder.config,
            block_size=self._block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            chunks_only=self._chunks_only,
            shapes=step_shapes(max_num_seqs=self.max_num_seqs, max_prompt_rows=longest),
            device=self._device,
        )

    def can_speculate(self, request: Request) -> bool:
        """Return False where logits are changed in a way that depends on other tokens."""
        return request.guide is None and self._sampler.is_unadjusted(
            request.params, request.output_tokens
        )

    def launch(self, chunks: Sequence[Chunk]) -> GpuStepInFlight:
        planned = self._slots.step(chunks)
        guided = any(request.guide is not None for request in planned.sampling)
        if self._ranks.size > 1:
            self._ranks.broadcast(msgspec.msgpack.encode(RankStep.from_planned(planned, guided)))
        self._tell_slots(planned.admitted, planned.states)
        forward = self._forward_pass(planned.values, planned.sampling)
        launched = GpuStepInFlight(
            planned.sampling, _RANKS_DEADLINE_S if self._ranks.size > 1 else None
        )

        def sample() -> tuple[Sampled, PromptScores | None]:
            masks = self._masks(forward, planned.sampling) if guided else None
            return self._sample(forward, masks, planned.scored)

        launched.later = sample
        if not guided:
            launched.sample()
        return launched

    def follow(self, message: bytes) -> None:
        if self._unsampled is not None:
            forward, self._unsampled = self._unsampled, None
            rows, words = msgspec.msgpack.decode(message, type=tuple[list[int], bytes])
            told = np.frombuffer(words, np.uint32).reshape(len(rows), -1) if rows else None
            self._sample(forward, None if told is None else RowMasks(rows, told))
            return
        step = msgspec.msgpack.decode(message, type=RankStep)
        self._tell_slots(
            [(slot, Request.from_submit(submit, 0.0)) for slot, submit in step.admitted],
            step.states,
        )
        values = step.values()
        forward = self._forward_pass(
            values, [self._seated[slot] for slot in values.sampled_slots.tolist()]
        )
        if step.guided:
            self._unsampled = forward
        else:
            self._sample(forward, None)

    def _tell_slots(
        self, admitted: Sequence[tuple[int, Request]], states: Sequence[SlotState]
    ) -> None:
        for slot, request in admitted:
            self._seated[slot] = request
            self._sampler.admit(slot, request)
        for slot, seat, token_index, newest in states:
            request = self._seated[slot] = self._seated[seat]
            self._sampler.set(slot, request.params, token_index, newest)

    def close(self) -> None:
        if self._ranks.rank == 0:
            self._ranks.broadcast(b"")
        # A NCCL group does not end before the last graph that holds its calls.
        torch.cuda.synchronize(self._device)
        self._graphs.close()
        self._ranks.close()

    @torch.inference_mode()
    def _forward_pass(self, values: StepValues, sampling: Sequence[Request]) -> _Forward:
        plan = self._sampler.prepare(values.sampled_slots.tolist(), sampling)
        logits = self._graphs.logits(values)
        if logits is not None:
            return _Forward(logits, self._uploads.decode_slots[: plan.rows], plan, by_graph=True)
        step, slots = self._uploads.chunks(values)
        self._operations.plan(step, self._block_size)
        hidden = self._decoder.hidden(step, self.pool)
        logits, scored = self._decoder.logits(hidden[: plan.rows]), hidden[plan.rows :]
        return _Forward(
            logits, slots, plan, by_graph=False, scored_hidden=scored if len(scored) else None
        )

    def _masks(self, forward: _Forward, sampling: Sequence[Request]) -> RowMasks | None:
        masks = row_masks(sampling, forward.logits.shape[1])
        if self._ranks.size > 1:
            told = ([], b"") if masks is None else (masks.rows, masks.words.tobytes())
            self._ranks.broadcast(msgspec.msgpack.encode(told))
        return masks

    @torch.inference_mode()
    def _sample(
        self, forward: _Forward, masks: RowMasks | None, scored: ScoredRows | None = None
    ) -> tuple[Sampled, PromptScores | None]:
        logits, plan = forward.logits, forward.plan
        if masks is not None:
            sampled = self._sampler.launch(
                logits, forward.slots, plan, self._sampler.mask(masks, plan.rows)
            )
        elif plan.adjusted or not (forward.by_graph and plan.rows):
            sampled = self._sampler.launch(logits, forward.slots, plan)
        else:
            sampled = self._sampler.read(logits, self._graphs.sample(plan), plan)
        # Behind the sampler: all logits lie in the same memory.
        scores = (
            None if forward.scored_hidden is None else self._score(forward.scored_hidden, scored)
        )
        if self._ranks.rank == 0:
            sampled.start_copy()
        return sampled, scores

    def _score(self, hidden: torch.Tensor, scored: ScoredRows | None) -> PromptScores | None:
        if scored is None:
            for part in torch.split(hidden, self.max_num_seqs):
                self._decoder.logits(part)
            return None
        scores = PromptScores(scored, hidden, self._decoder.logits, self.max_num_seqs)
        scores.columns = tuple(to_host(column) for column in scores.columns)
        return scores

    def _forward(self, step: GpuStep) -> torch.Tensor:
        self._operations.plan(step, self._block_size)
        return self._decoder.logits(self._decoder.hidden(step, self.pool))

    @torch.inference_mode()
    def _run_largest_step(self, longest: int) -> None:
        whole, rest = divmod(min(self.max_num_batched_tokens, longest * self.max_num_seqs), longest)
        prompts = [longest] * whole + [rest] * (rest > 0)
        for adapter in self._kinds:
            self._run_dummy([1] * (self.max_num_seqs - len(prompts)) + prompts, adapter)
            self._run_dummy([1] * self.max_num_seqs, adapter)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        largest = min(self.max_num_batched_tokens, self.max_model_len)
        for counts in ([1], [2], [17], [16, 1], [300, 5, 1, 1], [largest]):
            if max(counts) <= largest and len(counts) <= self.max_num_seqs:
                for adapter in self._kinds:
                    self._run_dummy(counts, adapter)
        self._uploads.append(torch.zeros(2, 1, dtype=torch.int32, device=self._device))
        self._sampler.warm_up(self._decoder.dtype)
        torch.cuda.synchronize()

    @property
    def _kinds(self) -> tuple[int, ...]:
        return (-1,) if self.adapters is None else (-1, 0)

    def _run_dummy(self, counts: Sequence[int], adapter: int) -> None:
        step, slots = self._uploads.chunks(null_step(counts, self._block_size, adapter))
        self._sampler.launch(
            self._forward(step), slots, SamplePlan(len(slots), cut=True, adjusted=True)
        )


def _refuse_fp8(config: EngineConfig, device: torch.device) -> None:
    in_fp8 = config.kv_cache_dtype == "fp8" or config.quantization == "fp8"
    capability = torch.cuda.get_device_capability(device)
    if in_fp8 and capability < (8, 9):
        raise ConfigError(
            f"fp8 needs a GPU of compute capability 8.9 or more, "
            f"{torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}; leave out kv_cache_dtype and quantization"
        )
