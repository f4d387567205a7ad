"""From logits to tokens in torch, row by row: penalties, cuts, the draw, its random numbers.

The CPU path, and the twin of `kernels/fused_sampling.py`. A draw is a function of (seed, choice,
token index), so a fail-over draws the same. Philox4x32-10 is bit-equal on every device. Source:
Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch

__all__ = ["draw", "keep_likely", "penalize", "philox_4x32", "uniform"]

# Sorting these is 20 times cheaper than a vocabulary of 49,152.
_SHORT_LIST = 256
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


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
    """Lower the logits [rows, vocab] of one row in place.

    `seen`: distinct ids of prompt and output; `generated`: the output's, each `counts` times.
    Repetition as in Keskar et al., "CTRL", 2019; others as in the OpenAI API.
    """
    if repetition != 1.0:
        values = logits[row, seen]
        logits[row, seen] = torch.where(values > 0, values / repetition, values * repetition)
    if presence or frequency:
        logits[row, generated] -= presence + frequency * counts


def keep_likely(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return logits with -inf outside top-k, then top-p of what is left, then min-p.

    logits [rows, vocab] after temperature; top_k int64 [rows] (0: all), top_p and min_p fp32
    [rows]. Equal logits stay or go together. Nucleus: Holtzman et al., 2020. min_p: Nguyen et al.,
    2024.
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
    # The smallest logit that stays, and whether `likeliest` (descending) sufficed.
    size, vocab = likeliest.shape[1], logits.shape[1]
    limited = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)  # [rows]
    inside_k = torch.arange(size, device=likeliest.device) < limited[:, None]
    peak = likeliest[:, :1]
    weights = (likeliest - peak).exp() * inside_k
    running = weights.cumsum(-1)  # the same bits whatever `size`
    of_k = running.gather(1, limited.clamp(max=size)[:, None] - 1)
    whole = (logits.logsumexp(-1, keepdim=True) - peak).exp()
    budget = top_p[:, None] * torch.where(limited[:, None] < vocab, of_k, whole)
    stays = inside_k & (running - weights < budget)
    last = stays.sum(-1).clamp(min=1) - 1
    everything = (limited == vocab) & (top_p >= 1)
    complete = (last + 1 < size) | (size == vocab) | (limited <= size) | everything
    threshold = likeliest.gather(1, last[:, None])[:, 0].masked_fill(everything, -torch.inf)
    return threshold, complete


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token per row, int64 [rows], by the inverse of the cumulative distribution.

    logits fp32 [rows, vocab] with -inf where a token is out; uniforms fp32 [rows] in [0, 1).
    """
    cumulative = logits.softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may lift the product behind the last token with a share.
    point = torch.minimum(
        uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    # Even infinite logits must give a token.
    return torch.searchsorted(cumulative, point, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def _mul_hi_lo(a: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    # High and low 32 bits of a * multiplier, within signed 64 bits.
    low_part = (a & 0xFFFF) * multiplier  # < 2**48
    high_part = (a >> 16) * multiplier + (low_part >> 16)  # < 2**49
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def philox_4x32(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return four 32-bit words per element of counter and key (int64 tensors of uint32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        hi0, lo0 = _mul_hi_lo(c0, _MULTIPLIERS[0])
        hi1, lo1 = _mul_hi_lo(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, choice: torch.Tensor, token_index: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) per row, fp32 with 24 random bits; arguments int64 [rows]."""
    zero = torch.zeros_like(seed)
    words = philox_4x32(
        (token_index & _MASK, choice & _MASK, zero, zero), (seed & _MASK, (seed >> 32) & _MASK)
    )
    return (words[0] >> 8).to(torch.float32) * (1.0 / (1 << 24))
