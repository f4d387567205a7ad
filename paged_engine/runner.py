"""One scheduled step: plan -> tensors -> decoder -> logits of the rows that sample -> tokens. The CPU's runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kernels.linear import rows_are_invariant
from kernels.paged_attention import SequenceSpan, plan_attention
from paged_engine.blocks import NULL_BLOCK
from paged_engine.cpu_operations import CpuStep
from paged_engine.decoder import Decoder
from paged_engine.kv_pool import KVPool
from paged_engine.request import Request
from paged_engine.sampler import Sampler
from paged_engine.scheduler import Chunk
from wire.errors import ConfigError
from wire.outputs import TokenLogprobs

__all__ = ["CpuRunner", "Launched", "Runner"]


class Launched(Protocol):
    """A step that was given to the device."""

    @property
    def requests(self) -> Sequence[Request]:
        """The requests that sample, in the order of their chunks."""

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Their tokens, as soon as the device has them."""


class Runner(Protocol):
    """What the engine asks of a device."""

    runs_ahead: bool
    """Whether `launch` returns before the step is done, so that the next one can be scheduled meanwhile."""

    def launch(self, chunks: Sequence[Chunk]) -> Launched:
        """Begin a step: write the chunks' KV and sample a token for each chunk that samples."""


@dataclass(frozen=True, slots=True)
class _Done:
    """A step whose tokens are known."""

    requests: Sequence[Request]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        return self.tokens, self.logprobs


class CpuRunner:
    """Owns the decoder and the pool. `min_rows`: fewest rows for which a row's bits do not depend on the others."""

    runs_ahead = False

    def __init__(self, decoder: Decoder, pool: KVPool, sampler: Sampler) -> None:
        self._decoder = decoder
        self._pool = pool
        self._sampler = sampler
        # The first exp() that two OpenMP threads enter at once may return low-accuracy values on the second one (seen
        # with MKL 2024.2: errors of 7e-4, in the first call only). Let one thread enter it first.
        torch.exp(torch.zeros(16))
        self._min_rows = _fewest_invariant_rows(decoder)

    def launch(self, chunks: Sequence[Chunk]) -> Launched:
        """Compute the step, all of it."""
        sampling = [chunk.request for chunk in chunks if chunk.samples]
        return _Done(sampling, *self._sampler.sample(self.run(chunks), sampling))

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Write the chunks' KV; fp32 logits [chunks that sample, vocab] in the order of `chunks`."""
        step, samples = self._step_input(chunks)
        logits = self._decoder.forward(step, self._pool)
        return logits[:samples]

    def _step_input(self, chunks: Sequence[Chunk]) -> tuple[CpuStep, int]:
        config, device, block_tokens = self._decoder.config, self._decoder.device, self._pool.block_tokens
        total = sum(chunk.count for chunk in chunks)
        rows = max(total, self._min_rows)
        # Rows that nobody owns are written to the null block.
        token_ids, positions, offsets = (np.zeros(rows, np.int64) for _ in range(3))
        blocks = np.full(rows, NULL_BLOCK, np.int64)
        spans, sampled, row = [], [], 0
        for chunk in chunks:
            request, end = chunk.request, row + chunk.count
            token_ids[row:end] = request.token_ids[chunk.start : chunk.start + chunk.count]
            place = np.arange(chunk.start, chunk.start + chunk.count)
            positions[row:end] = place
            offsets[row:end] = place % block_tokens
            blocks[row:end] = np.asarray(request.blocks, np.int64)[place // block_tokens]
            spans.append(SequenceSpan(row, chunk.count, chunk.start, request.blocks))
            if chunk.samples:
                sampled.append(end - 1)
            row = end
        samples = len(sampled)
        sampled += [0] * (max(samples, self._min_rows) - samples)
        plan = plan_attention(
            spans,
            tokens=rows,
            block_tokens=block_tokens,
            kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads,
            window=config.window,
            device=device,
        )
        step = CpuStep(
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=torch.from_numpy(positions).to(device),
            blocks=torch.from_numpy(blocks).to(device),
            offsets=torch.from_numpy(offsets).to(device),
            sampled_rows=torch.tensor(sampled, device=device),
            attention={config.window: plan},
        )
        return step, samples


def _fewest_invariant_rows(decoder: Decoder) -> int:
    """Fewest rows of a step for which a row's bits do not depend on the others, by trial on this machine.

    Raises ConfigError where they always do, because the CPU path promises to be batch-invariant.
    """
    for rows in (1, 2, 4, 16):
        if all(rows_are_invariant(linear, rows, decoder.dtype) for linear in decoder.linears()):
            return rows
    raise ConfigError("this machine's matrix library gives a row other bits in other batches; use dtype float32")
