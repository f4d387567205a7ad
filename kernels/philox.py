"""Philox4x32-10 counter-based random numbers: the draw of a token is a function of (seed, choice,
token index).

Owns the random bits and nothing else; never keyed by batch row, node or time, so that a hand-over
or a fail-over draws what the first node would have drawn. Integer arithmetic only: bit-equal on
every device. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
2011.
"""

from __future__ import annotations

import torch

__all__ = ["philox_4x32", "uniform"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _mul_hi_lo(a: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a * multiplier, both below 2**32, without leaving signed 64-bit
    integers.
    """
    low_part = (a & 0xFFFF) * multiplier  # < 2**48
    high_part = (a >> 16) * multiplier + (low_part >> 16)  # < 2**49
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def philox_4x32(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words for each element of four counter words and two key words (int64 tensors
    holding uint32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        hi0, lo0 = _mul_hi_lo(c0, _MULTIPLIERS[0])
        hi1, lo1 = _mul_hi_lo(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, choice: torch.Tensor, token_index: torch.Tensor) -> torch.Tensor:
    """One uniform number in [0, 1) per row, fp32 with 24 random bits; all arguments int64 [rows]."""
    zero = torch.zeros_like(seed)
    words = philox_4x32(
        (token_index & _MASK, choice & _MASK, zero, zero), (seed & _MASK, (seed >> 32) & _MASK)
    )
    return (words[0] >> 8).to(torch.float32) * (1.0 / (1 << 24))
