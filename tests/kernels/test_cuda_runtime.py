"""Calls of the CUDA runtime that fail."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from kvrelay.kernels import cuda_runtime


def test_a_failed_call_leaves_no_error_for_torch_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Mock()
    library.cudaHostUnregister.return_value = 713
    library.cudaGetErrorString.return_value = b"not registered"
    monkeypatch.setattr(cuda_runtime, "_library", lambda: library)
    with pytest.raises(cuda_runtime.CudaError, match=r"cudaHostUnregister: not .* error 713"):
        cuda_runtime.unpin(4096)
    library.cudaGetLastError.assert_called_once_with()
