"""Triton kernels run on the GPU where there is one, else in Triton's interpreter, on CPU tensors of
small shapes.
"""

from __future__ import annotations

import os

import pytest
import torch

# Triton reads the switch when it is imported, so it is set before any test module imports a kernel.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """Where kernels run in this test session."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
