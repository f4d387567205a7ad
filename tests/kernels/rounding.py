"""What tests of kernels share: rounding as GPUs do it, and equality up to what rounding explains."""

from __future__ import annotations

from collections.abc import Callable
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
    """Triton's interpreter cuts fp32 off to bf16, and loses carries on the way to fp8; here both
    round to nearest.
    """
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


def assert_same(
    actual: torch.Tensor, expected: torch.Tensor, *, flips: float = 0.01, atol: float = 0.0
) -> None:
    """Equal but for a share of `flips` of the elements, which are two units in the last place away,
    or `atol`.
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    got, want = actual.double(), expected.double()
    assert not got.isnan().any()
    unit = {
        torch.float8_e4m3fn: 2**-3,
        torch.bfloat16: 2**-7,
        torch.float16: 2**-10,
        torch.float32: 2**-20,
    }
    floor = 2**-9 if actual.dtype == torch.float8_e4m3fn else 4e-6
    torch.testing.assert_close(got, want, rtol=2 * unit[actual.dtype], atol=max(floor, atol))
    if actual.dtype != torch.float32 and got.numel() >= 64:
        assert ((got != want) & (want.abs() > floor)).double().mean() <= flips


# The largest relative error of rounding to the type. In fp32: what sums and exponentials lose.
_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}


def assert_attention(out: torch.Tensor, expected: torch.Tensor, of: object) -> None:
    """Rows of attention [..., head_dim] equal exact ones but for two roundings: of the output, and
    of each weight.

    Where few keys matter both are in proportion to the element. Else those of the weights add up
    like random numbers, as the weighted values do, and are in proportion to the row's root mean
    square. Simulated with the tests' inputs, an element has up to 2.8 roundings of this kind, and a
    row 1.2 of all kinds. A key left out of n changes rows by 1 / sqrt(n) of their size, which is
    far more. `of`: whose rows, for the message.
    """
    unit, exact = _ROUNDING[out.dtype], expected.double()
    error = (
        out.double() - exact
    ).abs()  # NaN where the output is NaN, which no comparison below accepts
    of_row = unit * exact.square().mean(-1, keepdim=True).sqrt()
    for name, roundings, most in (
        ("an element", (error - 2 * unit * exact.abs()) / of_row, 4),
        ("a row", error.square().mean(-1, keepdim=True).sqrt() / of_row, 1.75),
    ):
        assert (roundings <= most).all(), (
            f"{of}: {float(roundings.max()):.2f} roundings in {name}, {_worst(roundings)}"
        )


def _worst(values: torch.Tensor) -> list[int]:
    return [
        int(i) for i in torch.unravel_index(values.nan_to_num(torch.inf).argmax(), values.shape)
    ]


# Triton's interpreter multiplies bf16 matrices as integers; so without a GPU, in fp16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def randn(
    *shape: int, seed: int, device: torch.device, dtype: torch.dtype = DTYPE, scale: float = 1.0
) -> torch.Tensor:
    """Normal values that depend on the seed and the kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN (of the largest value in integers)."""
    return _poison(torch.empty(shape, dtype=dtype, device=device))


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives poisoned tensors: of an output that is not handed in, nothing may be left
    as it was.

    Not for tests of dependent launch: the poison's own launch would stand between the kernels.
    """
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: _poison(empty(*shape, **options)))


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
        return tensor
    return tensor.fill_(
        torch.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max
    )


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph of `run`, which has run once before, and what it returned."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result
