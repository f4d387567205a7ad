"""The CPU's runner: chunks -> logits -> tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from kvrelay.kernels.decoder_layer import computed_rows
from kvrelay.kernels.paged_attention import SequenceSpan, plan_attention
from kvrelay.paged_engine.adapters import AdapterStore
from kvrelay.paged_engine.before_loading import (
    CPU_POOL_BYTES,
    compute_dtype,
    default_block_tokens,
    fit_pool,
)
from kvrelay.paged_engine.blocks import NULL_BLOCK
from kvrelay.paged_engine.cpu_operations import CpuOperations, CpuStep, fewest_rows
from kvrelay.paged_engine.decoder import Decoder
from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.request import Chunk, Request, ScoredRows
from kvrelay.paged_engine.sampler import PromptScores, Sampler
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.outputs import TokenLogprobs

__all__ = ["CpuRunner", "CpuStepDone"]


# Enough for two cores at full speed: 1P1D under 8 clients has a TTFT p50 of 420 ms with 128 tokens
# and 585 ms with 512, at equal throughput.
_STEP_TOKENS = 128
_SCORED_ROWS = 64


class ChunkValues(msgspec.Struct, frozen=True, array_like=True):
    token_ids: list[int]
    start: int
    sampled_rows: int
    scored: tuple[int, int]  # first scored row, and how many
    blocks: list[int]
    adapter: int = -1

    @classmethod
    def from_chunk(cls, chunk: Chunk) -> ChunkValues:
        scored = (chunk.scored.start - chunk.start, len(chunk.scored))
        request = chunk.request
        return cls(
            chunk.token_ids,
            chunk.start,
            chunk.sampled_rows,
            scored,
            request.blocks,
            request.adapter_slot,
        )

    @property
    def count(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class CpuStepDone:
    """A step that has been launched; a GPU's has the same methods."""

    requests: Sequence[Request]  # of each sampled row
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_scores: PromptScores | None
    is_done = True

    def sample(self) -> None:
        """Choose the tokens of guided rows, once the previous step's tokens are known."""

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Return the rows' tokens and log-probabilities as soon as the device has them."""
        return self.tokens, self.logprobs

    def scores(self) -> Iterable[tuple[Request, list[TokenLogprobs]]]:
        return () if self.prompt_scores is None else self.prompt_scores.by_request()


class CpuRunner:
    """A rank on the CPU; GpuRunner has the same methods and attributes."""

    runs_ahead = False
    shapes: tuple[int, ...] = ()
    """Rows to which a step with prompts is padded; none where it is not."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        ranks: Ranks,
    ) -> None:
        torch.set_num_threads(config.threads_on(len(os.sched_getaffinity(0))))
        device = torch.device("cpu")
        dtype: torch.dtype = getattr(torch, compute_dtype(config, model, device.type))
        num_blocks, self.max_model_len = fit_pool(
            config, model, device.type, config.kv_cache_memory_bytes or CPU_POOL_BYTES
        )
        self._ranks, adapted = ranks, config.adapter_slots > 0
        self._decoder = Decoder(
            model,
            weights,
            CpuOperations(model, dtype, ranks, adapted=adapted),
            device=device,
            dtype=dtype,
            max_positions=self.max_model_len,
        )
        self.rope_variant = self._decoder.rope_variant
        self._sampler = Sampler(model.eos_token_ids)
        self.pool = KVPool(
            model,
            num_blocks=num_blocks,
            block_size=config.block_size or default_block_tokens(device.type),
            dtype=dtype,
            device=device,
        )
        self.adapters: AdapterStore | None = None
        if adapted:
            self.adapters = AdapterStore(config, model, self._decoder.sites(), dtype)
        self.max_num_batched_tokens = config.max_num_batched_tokens or _STEP_TOKENS
        self.max_num_seqs = config.max_num_seqs or 64
        # The first exp() of two OpenMP threads at once may be off by 7e-4 (MKL 2024.2).
        torch.exp(torch.zeros(16))
        self._min_rows = fewest_rows(self._decoder.linears(), dtype)
        self._windows = model.windows

    def can_speculate(self, request: Request) -> bool:
        """Return whether proposals can be sampled in one step; a guide follows one text."""
        return request.guide is None

    def launch(self, chunks: Sequence[Chunk]) -> CpuStepDone:
        rows = [
            (chunk.request, chunk.proposals[:ahead])
            for chunk in chunks
            for ahead in range(chunk.sampled_rows)
        ]
        states = [request.with_tokens(ahead) if ahead else request for request, ahead in rows]
        logits, scores = self.run(chunks)
        tokens, logprobs = self._sampler.sample(logits, states)
        return CpuStepDone([request for request, _ in rows], tokens, logprobs, scores)

    def run(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, PromptScores | None]:
        """Write the chunks' KV; return fp32 logits [sampled rows, vocab] and scores."""
        values = [ChunkValues.from_chunk(chunk) for chunk in chunks]
        if self._ranks.size > 1:
            self._ranks.broadcast(msgspec.msgpack.encode(values))
        return self._compute(values, ScoredRows.from_chunks(chunks))

    def follow(self, message: bytes) -> None:
        self._compute(msgspec.msgpack.decode(message, type=list[ChunkValues]))

    def close(self) -> None:
        if self._ranks.rank == 0:
            self._ranks.broadcast(b"")
        self._ranks.close()

    def _compute(
        self, chunks: Sequence[ChunkValues], scored: ScoredRows | None = None
    ) -> tuple[torch.Tensor, PromptScores | None]:
        step, samples = self._step_input(chunks)
        hidden = self._decoder.hidden(step, self.pool)
        to_score = sum(chunk.scored[1] for chunk in chunks)
        hidden, scored_hidden = hidden[: len(hidden) - to_score], hidden[len(hidden) - to_score :]
        logits = self._decoder.logits(hidden)[:samples]
        if scored is not None:
            return logits, PromptScores(scored, scored_hidden, self._slice_logits, _SCORED_ROWS)
        for part in torch.split(scored_hidden, _SCORED_ROWS) if to_score else ():
            self._slice_logits(part)
        return logits, None

    def _slice_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = len(hidden)
        if rows < self._min_rows:
            hidden = hidden[torch.arange(self._min_rows) % rows]
        return self._decoder.logits(hidden)[:rows]

    def _step_input(self, chunks: Sequence[ChunkValues]) -> tuple[CpuStep, int]:
        config = self._decoder.config
        block_size = self.pool.block_size
        total = sum(chunk.count for chunk in chunks)
        rows = computed_rows(max(total, self._min_rows))
        token_ids, positions, offsets = (np.zeros(rows, np.int64) for _ in range(3))
        blocks, adapters = np.full(rows, NULL_BLOCK, np.int64), np.full(rows, -1)
        spans, row = [], 0
        sampled: list[int] = []
        scored: list[int] = []
        for chunk in chunks:
            end = row + chunk.count
            token_ids[row:end] = chunk.token_ids
            place = np.arange(chunk.start, chunk.start + chunk.count)
            positions[row:end] = place
            offsets[row:end] = place % block_size
            blocks[row:end] = np.asarray(chunk.blocks, np.int64)[place // block_size]
            adapters[row:end] = chunk.adapter
            spans.append(SequenceSpan(row, chunk.count, chunk.start, chunk.blocks))
            sampled += range(end - chunk.sampled_rows, end)
            scored += range(row + chunk.scored[0], row + sum(chunk.scored))
            row = end
        samples = len(sampled)
        sampled += [0] * (computed_rows(max(samples, self._min_rows)) - samples) + scored
        plans = {
            window: plan_attention(
                spans,
                tokens=rows,
                block_size=block_size,
                kv_heads=config.num_kv_heads,
                group=config.num_heads // config.num_kv_heads,
                window=window,
            )
            for window in self._windows
        }
        step = CpuStep(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            blocks=torch.from_numpy(blocks),
            offsets=torch.from_numpy(offsets),
            sampled_rows=torch.tensor(sampled),
            attention=plans,
            adapted=_groups(adapters),
            adapted_samples=_groups(adapters[sampled]),
        )
        return step, samples


def _groups(adapters: np.ndarray) -> list[tuple[int, torch.Tensor]]:
    slots = sorted({*adapters.tolist()} - {-1})
    return [(slot, torch.from_numpy(np.flatnonzero(adapters == slot))) for slot in slots]
