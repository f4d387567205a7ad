"""The plan of decodes cuts the line of key units into equal shares that cover it, whatever the
mixture of lengths.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.kernels.decode_plan import DecodeWorkspace, plan_decode

KV_HEADS = 2


def _workspace(max_batch: int, device: torch.device) -> DecodeWorkspace:
    return DecodeWorkspace(
        max_batch=max_batch, num_heads=4, num_kv_heads=KV_HEADS, head_dim=64, device=device
    )


def _lengths(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def test_shares_are_equal_and_cover_all_units(device):
    """The plan's starts are the positions p * share on the line of units."""
    lengths, window = [1000, 0, 64, 1, 333, 0], 130
    workspace, context_lens = _workspace(6, device), _lengths(lengths, device)
    for chosen in (0, window):
        plan_decode(context_lens, workspace, block_size=16, window=chosen)
        line = []  # (sequence, length, KV head, unit) of every unit
        for sequence, length in enumerate(lengths):
            units = -(-length // 64) - (max(0, length - chosen) // 64 if chosen else 0)
            line += [
                (sequence, length, head, unit) for head in range(KV_HEADS) for unit in range(units)
            ]
        share, total = workspace.line.tolist()
        assert total == len(line)
        starts = [tuple(start) for start in workspace.starts.tolist()]
        assert starts[: -(-total // share)] == line[::share]
        assert total <= share * len(starts)
