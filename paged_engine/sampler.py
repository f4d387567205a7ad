"""Choose the next tokens on the CPU, and score a prompt's own tokens on any device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import torch

from kvrelay.kernels.sampling import draw, keep_likely, penalize, uniform
from kvrelay.paged_engine.grammar import row_masks
from kvrelay.paged_engine.request import Request, ScoredRows
from kvrelay.wire.outputs import TokenLogprobs

__all__ = ["SLICE_ROWS", "Columns", "PromptScores", "Sampler", "scores_of"]


class Sampler:
    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos = tuple(eos_token_ids)

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, requests: Sequence[Request]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Sample logits fp32 [rows, vocab], changed in place; row i is requests[i]'s."""
        wanted = [
            row for row, request in enumerate(requests) if request.params.logprobs is not None
        ]
        raw = logits[wanted]  # a copy
        for row, request in enumerate(requests):
            self._adjust(logits, row, request)
        if any(request.guide is not None for request in requests):
            _mask(logits, requests)
        tokens = logits.argmax(-1)
        random = [row for row, request in enumerate(requests) if request.params.temperature > 0]
        if random:
            tokens[random] = _draw_rows(logits[random], [requests[row] for row in random])
        chosen: list[int] = tokens.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        counts = {row: requests[row].params.logprobs or 0 for row in wanted}
        if counts:
            columns = scores_of(raw, tokens[wanted], max(counts.values()))
            for (row, k), logprob, _, ids, values in zip(
                counts.items(), *(column.tolist() for column in columns), strict=True
            ):
                logprobs[row] = TokenLogprobs(
                    chosen[row], logprob, tuple(ids[:k]), tuple(values[:k])
                )
        return chosen, logprobs

    def _adjust(self, logits: torch.Tensor, row: int, request: Request) -> None:
        params = request.params
        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias, strict=True)
            logits[row, list(tokens)] += torch.tensor(biases)
        if request.output_tokens < params.min_tokens:
            logits[row, [*self._eos, *params.stop_token_ids]] = -torch.inf
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            everything = torch.tensor(request.token_ids)
            generated, counts = everything[request.prompt_tokens :].unique(return_counts=True)  # type: ignore[no-untyped-call]
            penalize(
                logits,
                row,
                everything.unique(),  # type: ignore[no-untyped-call]
                generated,
                counts,
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )


def _mask(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    masks = row_masks(requests, logits.shape[1])
    if masks is not None:
        allowed = np.unpackbits(
            masks.words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little"
        )
        for row, flags in zip(masks.rows, torch.from_numpy(allowed), strict=True):
            logits[row].masked_fill_(flags == 0, -torch.inf)


def _draw_rows(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    params = [request.params for request in requests]

    def column(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values))

    logits = logits / column(p.temperature for p in params)[:, None]
    cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if cut:
        logits[cut] = keep_likely(
            logits[cut],
            column(params[row].top_k for row in cut),
            column(params[row].top_p for row in cut),
            column(params[row].min_p for row in cut),
        )
    draws = uniform(
        column(p.seed for p in params),
        column(p.choice for p in params),
        column(r.output_tokens for r in requests),
    )
    return draw(logits, draws)


SLICE_ROWS = 16  # twice 16 rows of 128,256 in fp32: 16 MB beside the step's memory

Columns = tuple[torch.Tensor, ...]
"""Each row's log-probability and rank [n], and likeliest ids and values [n, most]."""


class PromptScores:
    """A step's log-probabilities of prompt tokens, on their way to the host.

    Logits of a whole prompt would be gigabytes, so they are computed by slices.
    """

    def __init__(
        self,
        rows: ScoredRows,
        hidden: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
        at_a_time: int,
    ) -> None:
        """Score `hidden` [n, hidden]; `logits` is called for `at_a_time` rows."""
        self._rows = rows
        targets = torch.tensor(rows.targets)
        if hidden.is_cuda:
            targets = targets.pin_memory().to(hidden.device, non_blocking=True)
        parts = [
            scores_of(logits(some), wanted, rows.most)
            for some, wanted in zip(
                torch.split(hidden, at_a_time), torch.split(targets, at_a_time), strict=True
            )
        ]
        self.columns: Columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def by_request(self) -> Iterator[tuple[Request, list[TokenLogprobs]]]:
        values = zip(self._rows.targets, *(column.tolist() for column in self.columns), strict=True)
        for request, count in self._rows.parts:
            k = request.params.prompt_logprobs or 0
            entries = []
            for _ in range(count):
                token, logprob, rank, ids, logprobs = next(values)
                entries.append(
                    TokenLogprobs(token, logprob, tuple(ids[:k]), tuple(logprobs[:k]), rank)
                )
            yield request, entries


@torch.inference_mode()
def scores_of(logits: torch.Tensor, targets: torch.Tensor, most: int) -> Columns:
    """Return log-probability and rank of each row's target, and its `most` likeliest tokens."""
    parts = []
    for part, wanted in zip(
        torch.split(logits, SLICE_ROWS), torch.split(targets, SLICE_ROWS), strict=True
    ):
        raw = part.float().log_softmax(-1)
        chosen = raw.gather(1, wanted[:, None])
        top = raw.topk(most)
        parts.append((chosen[:, 0], (raw > chosen).sum(-1) + 1, top.indices, top.values))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
