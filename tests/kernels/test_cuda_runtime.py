"""Calls of the CUDA runtime: those that fail, and copies."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kvrelay.kernels import cuda_runtime


def test_a_failed_call_leaves_no_error_for_torch_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Mock()
    library.cudaHostUnregister.return_value = 713
    library.cudaGetErrorString.return_value = b"not registered"
    monkeypatch.setattr(cuda_runtime, "_library", lambda: library)
    with pytest.raises(cuda_runtime.CudaError, match=r"cudaHostUnregister: not .* error 713"):
        cuda_runtime.unpin(4096)
    library.cudaGetLastError.assert_called_once_with()


@pytest.mark.parametrize(
    ("version", "capability", "same_addresses", "pinned", "arguments"),
    [
        (13_000, 9, 1, True, 8),
        (12_080, 8, 1, True, 9),
        (12_060, 9, 1, True, 0),
        (13_000, 10, 1, True, 0),
        (13_000, 8, 0, True, 0),
        (13_000, 9, 1, False, 0),
    ],
)
def test_copies_are_one_call_where_cuda_has_it(
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    capability: int,
    same_addresses: int,
    pinned: bool,
    arguments: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def tell(into: Any, *attribute: Any) -> int:
        into._obj.value = same_addresses if attribute else version
        return 0

    library, copies = Mock(), [(1 << 40, 2 << 40, 8), (3 << 40, 4 << 40, 16)]
    library.cudaRuntimeGetVersion = library.cudaDriverGetVersion = tell
    library.cudaDeviceGetAttribute = tell
    library.cudaMemcpyBatchAsync.return_value = library.cudaMemcpyAsync.return_value = 0
    monkeypatch.setattr(cuda_runtime, "_library", lambda: library)
    for cached in (cuda_runtime._can_copy_all, cuda_runtime._number):
        monkeypatch.setattr(cuda_runtime, cached.__name__, cached.__wrapped__)
    cuda_runtime.copy_all(copies, 7, pinned=pinned)
    if not arguments:
        singly = [
            tuple(each.value for each in call.args[:3])
            for call in library.cudaMemcpyAsync.call_args_list
        ]
        assert singly == copies
        return
    (call,) = library.cudaMemcpyBatchAsync.call_args_list
    assert len(call.args) == arguments
    assert list(zip(*map(list, call.args[:3]), strict=True)) == copies
    assert call.args[3].value == 2
    assert call.args[-1].value == 7
    library.cudaMemcpyAsync.assert_not_called()
