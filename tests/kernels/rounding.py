"""What tests of element-wise kernels share: rounding as GPUs do it, and equality up to rare flips of the last place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

_TYPES = {
    "fp32": (torch.float32, torch.int32, np.uint32),
    "bf16": (torch.bfloat16, torch.int16, np.uint16),
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8, np.uint8),
}


@pytest.fixture
def exact_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts fp32 off to bf16, and loses carries on the way to fp8; here both round to nearest."""
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(array: Any, source: Any, target: Any, mode: Any) -> Any:
        if str(source) not in _TYPES or str(target) not in _TYPES:
            return plain(array, source, target, mode)
        (source_type, source_bits, numpy_source), (target_type, target_bits, numpy_target) = (
            _TYPES[str(source)],
            _TYPES[str(target)],
        )
        bits = np.ascontiguousarray(array).reshape(-1).view(numpy_source)
        values = torch.frombuffer(bytearray(bits.tobytes()), dtype=source_bits).view(source_type)
        rounded = values.to(target_type).view(target_bits).numpy().view(numpy_target)
        return rounded.reshape(np.shape(array))

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, *, flips: float = 0.01, atol: float = 0.0) -> None:
    """Equal but for a share of `flips` of the elements, which are two units in the last place away, or `atol`."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    got, want = actual.double(), expected.double()
    assert not got.isnan().any()
    unit = {torch.float8_e4m3fn: 2**-3, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
    floor = 2**-9 if actual.dtype == torch.float8_e4m3fn else 4e-6
    torch.testing.assert_close(got, want, rtol=2 * unit[actual.dtype], atol=max(floor, atol))
    if actual.dtype != torch.float32 and got.numel() >= 64:
        assert ((got != want) & (want.abs() > floor)).double().mean() <= flips


def randn(*shape: int, seed: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Normal values that depend on the seed and the kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN (of the largest value in integers)."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(
        shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype, device=device
    )
