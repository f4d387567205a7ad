"""Frequencies of the rotary embedding, under every context extension that checkpoints name.

Computed once, for the node's own limit, as in vLLM. transformers changes longrope while a context
grows, which would mix frequencies in one KV cache.
"""

from __future__ import annotations

import math

import torch

from kvrelay.paged_engine.model_config import RopeScaling

__all__ = ["rope_frequencies", "rope_variant"]


def rope_frequencies(
    scaling: RopeScaling | None, theta: float, rotary_dim: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Return fp32 angles per position [rotary_dim / 2], and the factor of cos and sin.

    Element i is turned with element i + rotary_dim / 2. No context is longer than `max_positions`.
    """
    powers: torch.Tensor = theta ** (
        torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    )
    frequencies = 1.0 / powers
    if scaling is None:
        return frequencies, 1.0
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor, 1.0
        case "llama3":
            return _llama3(frequencies, scaling), 1.0
        case "yarn":
            return _yarn(frequencies, scaling, theta), _attention_factor(scaling)
        case _:  # longrope
            extended = max_positions > scaling.original_max_position
            factors = torch.tensor(
                scaling.long_factors if extended else scaling.short_factors, dtype=torch.float32
            )
            return 1.0 / (factors * powers), _attention_factor(scaling)


def rope_variant(scaling: RopeScaling | None, max_positions: int) -> str:
    """Return what depends on a node's own limit; KV moves only between equal ones."""
    if scaling is None or scaling.kind != "longrope":
        return ""
    return "longrope, long" if max_positions > scaling.original_max_position else ""


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Stretch long wavelengths, keep short ones. Source: "The Llama 3 herd of models", 2024."""
    # Turns over the original context.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _blend(frequencies, kept.clamp(0, 1), scaling.factor)


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """Blend linearly in the pair's index. Source: "YaRN", Peng et al. 2023, section 3.2."""
    pairs = len(frequencies)

    def pair_with(turns: float) -> float:
        return (
            pairs
            * math.log(scaling.original_max_position / (turns * 2 * math.pi))
            / math.log(theta)
        )

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last: float = min(math.ceil(pair_with(scaling.beta_slow)), 2 * pairs - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return _blend(frequencies, kept, scaling.factor)


def _blend(frequencies: torch.Tensor, kept: torch.Tensor, factor: float) -> torch.Tensor:
    return (1 - kept) * frequencies / factor + kept * frequencies


def _attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    stretched = math.log(scaling.factor)
    if scaling.kind == "yarn":
        return 0.1 * stretched + 1.0
    # "LongRoPE", Ding et al. 2024, as Phi-3 has it.
    return math.sqrt(1 + stretched / math.log(scaling.original_max_position))
