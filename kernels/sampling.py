"""From logits to tokens, row by row and independent of the other rows. Torch reference and CPU
path.
"""

from __future__ import annotations

import torch

__all__ = ["draw", "keep_likely", "penalize"]

# Most rows' top-p set is this small; sorting it is 20 times cheaper than sorting a vocabulary of
# 49,152.
_SHORT_LIST = 256


def penalize(
    logits: torch.Tensor,
    row: int,
    seen: torch.Tensor,
    generated: torch.Tensor,
    counts: torch.Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Lower the logits of one row in place.

    `seen` are the distinct ids of prompt and output, `generated` those of the output only.

    logits [rows, vocab]; counts: how often each of `generated` occurs. Repetition as in Keskar et
    al., "CTRL", 2019; presence and frequency as the OpenAI API defines them.
    """
    if repetition != 1.0:
        values = logits[row, seen]
        logits[row, seen] = torch.where(values > 0, values / repetition, values * repetition)
    if presence or frequency:
        logits[row, generated] -= presence + frequency * counts


def keep_likely(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Logits with -inf outside the top-k, then the nucleus of what is left, then above min_p times
    the likeliest.

    logits [rows, vocab] after temperature; top_k int64 [rows] (0: all), top_p and min_p fp32
    [rows]. Sets are cut at a value, so equal logits stay or go together, in whatever order a sort
    leaves them. Nucleus: Holtzman et al., 2020. min_p: Nguyen et al., 2024.
    """
    vocab = logits.shape[1]
    size = min(vocab, max(int(top_k.max()), _SHORT_LIST))
    threshold, complete = _threshold(logits, logits.topk(size).values, top_k, top_p)
    rest = ~complete
    if bool(rest.any()):
        sorted_rows = logits[rest].sort(descending=True).values
        threshold[rest] = _threshold(logits[rest], sorted_rows, top_k[rest], top_p[rest])[0]
    floor = logits.amax(-1, keepdim=True) + min_p[:, None].log()
    return logits.masked_fill((logits < threshold[:, None]) | (logits < floor), -torch.inf)


def _threshold(
    logits: torch.Tensor, likeliest: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest logit that stays in each row, and whether the `likeliest` (descending) were enough
    to tell.
    """
    size, vocab = likeliest.shape[1], logits.shape[1]
    limited = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)  # [rows]
    inside_k = torch.arange(size, device=likeliest.device) < limited[:, None]
    peak = likeliest[:, :1]
    weights = (likeliest - peak).exp() * inside_k
    running = weights.cumsum(
        -1
    )  # one after the other: the same bits whatever `size` the other rows asked for
    of_k = running.gather(1, limited.clamp(max=size)[:, None] - 1)
    whole = (logits.logsumexp(-1, keepdim=True) - peak).exp()
    budget = top_p[:, None] * torch.where(limited[:, None] < vocab, of_k, whole)
    stays = inside_k & (running - weights < budget)
    last = stays.sum(-1).clamp(min=1) - 1
    everything = (limited == vocab) & (top_p >= 1)
    complete = (last + 1 < size) | (size == vocab) | (limited <= size) | everything
    threshold = likeliest.gather(1, last[:, None])[:, 0].masked_fill(everything, -torch.inf)
    return threshold, complete


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row by the inverse of the cumulative distribution, in order of token id.

    logits fp32 [rows, vocab] with -inf where a token is out; uniform fp32 [rows] in [0, 1). Returns
    int64 [rows].
    """
    cumulative = logits.softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may lift uniform * total to the total itself, behind the last token that has a share.
    point = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # Logits that are not finite (a model gone wrong) must still give a token of the vocabulary.
    return torch.searchsorted(cumulative, point, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
