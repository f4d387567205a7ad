"""One scheduled step on the device: plan -> tensors -> decoder -> logits of the rows that sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.paged_attention import SequenceSpan, plan_attention
from paged_engine.blocks import NULL_BLOCK
from paged_engine.decoder import Decoder, StepInput
from paged_engine.kv_pool import KVPool
from paged_engine.scheduler import Chunk

__all__ = ["Runner"]


class Runner:
    """Owns the decoder and the pool. `min_rows`: fewest rows for which a row's bits do not depend on the others."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self._decoder = decoder
        self._pool = pool
        # The first exp() that two OpenMP threads enter at once may return low-accuracy values on the second one (seen
        # with MKL 2024.2: errors of 7e-4, in the first call only). Let one thread enter it first.
        torch.exp(torch.zeros(16))
        self._min_rows = decoder.min_rows()

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Write the chunks' KV; fp32 logits [chunks that sample, vocab] in the order of `chunks`."""
        step, samples = self._step_input(chunks)
        logits = self._decoder.forward(step, self._pool)
        return logits[:samples]

    def _step_input(self, chunks: Sequence[Chunk]) -> tuple[StepInput, int]:
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
        step = StepInput(
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=torch.from_numpy(positions).to(device),
            blocks=torch.from_numpy(blocks).to(device),
            offsets=torch.from_numpy(offsets).to(device),
            sampled_rows=torch.tensor(sampled, device=device),
            attention=plan,
        )
        return step, samples
