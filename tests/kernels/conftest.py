"""Triton kernels run on the GPU where there is one, else in Triton's interpreter, on CPU tensors of
small shapes.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where kernels run in this test session."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
