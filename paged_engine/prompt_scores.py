"""How likely a prompt's own tokens were: log-probabilities of rows that are not sampled, in slices
of bounded memory.

A step computes the logits of its scored rows (`ScoredRows`) a slice at a time, because those of a
whole prompt would be gigabytes; what stays of a slice is a few numbers per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.step_plan import ScoredRows
from kvrelay.wire.outputs import TokenLogprobs

__all__ = ["PromptScores"]

# 16 rows of 128,256 in fp32, twice: 16 MB beside the step's own memory.
_SLICE_ROWS = 16

Columns = tuple[torch.Tensor, ...]
"""Log-probability and rank of each row's token [n], ids and log-probabilities of the likeliest ones
[n, most].
"""


class PromptScores:
    """The scores of one step on their way to the host."""

    def __init__(
        self,
        rows: ScoredRows,
        hidden: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
        at_a_time: int,
    ) -> None:
        """`hidden` [n, hidden] of the scored rows; `logits` is asked for those of `at_a_time` rows."""
        self._rows = rows
        targets = torch.tensor(rows.targets)
        if hidden.is_cuda:
            targets = targets.pin_memory().to(hidden.device, non_blocking=True)
        parts: list[Columns] = []
        for some, wanted in zip(
            torch.split(hidden, at_a_time), torch.split(targets, at_a_time), strict=True
        ):
            parts += _scores(logits(some), wanted, rows.most)
        self.columns: Columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        """On the device, until whoever launched the step has queued their copy."""

    def of_requests(self) -> Iterator[tuple[Request, list[TokenLogprobs]]]:
        """What each request asked for, once the columns are on the host."""
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
def _scores(logits: torch.Tensor, targets: torch.Tensor, most: int) -> Iterator[Columns]:
    for part, wanted in zip(
        torch.split(logits, _SLICE_ROWS), torch.split(targets, _SLICE_ROWS), strict=True
    ):
        raw = part.float().log_softmax(-1)
        chosen = raw.gather(1, wanted[:, None])
        top = raw.topk(most)
        yield chosen[:, 0], (raw > chosen).sum(-1) + 1, top.indices, top.values
