"""Products on a CPU: few counts of rows, because the library keeps what it has generated for each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kernels.decoder_layer import Linear, computed_rows, packs


@given(st.integers(1, 5000))
def test_a_few_rows_more_are_computed_and_the_same_count_again(rows: int) -> None:
    computed = computed_rows(rows)
    assert rows <= computed <= max(rows + 3, 1.25 * rows)
    assert computed_rows(computed) == computed


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN here")
def test_the_library_sees_no_other_counts_and_results_are_those_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(130, 16, generator=generator)
    linear, seen = Linear(weight), set()
    library = torch.ops.mkldnn._linear_pointwise

    def counted(rows: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.add(len(rows))
        result: torch.Tensor = library(rows, *rest)
        return result

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    for rows in range(1, 131):
        y = linear(x[:rows])
        assert y.shape == (rows, 24)
        torch.testing.assert_close(y, x[:rows] @ weight.T)
    assert seen == {computed_rows(rows) for rows in range(1, 131)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_is_multiplied_on_every_cpu(dtype: torch.dtype) -> None:
    """Packed where oneDNN has a kernel for it here, as they are elsewhere."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 16), (24,), (5, 16))
    )
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(Linear(weight, bias)(x).double(), expected, rtol=0.02, atol=0.05)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN here")
@pytest.mark.parametrize("has", [True, False])
def test_what_a_cpu_has_no_instructions_for_is_not_packed(
    has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: has)
    assert [packs(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [
        True,
        has,
        has,
    ]
