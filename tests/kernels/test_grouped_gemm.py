"""The Triton mixture of experts against its torch twin, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.kernels import grouped_gemm
from kvrelay.kernels.decoder_layer import route
from kvrelay.kernels.grouped_gemm import Tiling, moe
from tests.kernels.twins import moe as twin

SMALL = (16, Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2))


def inputs(
    device: torch.device,
    tokens: int,
    experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).to(dtype)

    return (
        random(tokens, hidden, std=1.0),
        random(tokens, experts, std=2.0),
        random(experts, 2 * inner, hidden, std=hidden**-0.5),
        random(experts, hidden, inner, std=inner**-0.5),
    )


def check(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, **options
) -> None:
    """Against the twin in fp32, relative to the largest result: bf16 has 8 bits, and there are
    three roundings.
    """
    ours = moe(x, logits, gate_up, down, out=torch.full_like(x, torch.nan), **options)
    options = {
        name: value for name, value in options.items() if name in ("top_k", "renormalize", "act")
    }
    expected = twin(x.float(), logits, gate_up.float(), down.float(), **options)
    limit = (2**-7 if x.dtype == torch.bfloat16 else 2**-9) * float(expected.abs().max())
    assert float((ours.float() - expected).abs().max()) < limit


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [
        (1, 4, 2, 64, 32),
        (1, 8, 8, 48, 40),
        (5, 5, 3, 64, 32),
        (33, 4, 2, 80, 24),
        (19, 16, 1, 32, 16),
    ],
)
def test_it_equals_its_twin(
    device: torch.device, tokens: int, experts: int, top_k: int, hidden: int, inner: int, act: str
) -> None:
    tensors = inputs(device, tokens, experts, hidden, inner, seed=tokens)
    check(*tensors, top_k=top_k, renormalize=tokens % 2 == 1, act=act, tilings=SMALL)


@pytest.mark.parametrize("tokens", [2, 8, 9, 40])
def test_places_of_many_chunks_are_sorted_by_expert(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(grouped_gemm, "MAX_CHUNK", 8)
    top_k, rows = 3, 4
    logits = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(tokens)).to(device)
    logits[:, 2] = -100.0  # an expert that nobody is sent to
    weights, (places, experts, counts) = grouped_gemm._sort_by_expert(logits, top_k, True, rows)
    chosen, expected = route(logits, top_k, True)
    assert torch.allclose(weights, expected.flatten(), atol=1e-6)
    found = []
    for tile, (expert, count) in enumerate(zip(experts.tolist(), counts.tolist(), strict=True)):
        assert count <= rows
        found += [(expert, place) for place in places[tile * rows : tile * rows + count].tolist()]
    assert [expert for expert, _ in found] == sorted(chosen.flatten().tolist())
    assert sorted(found) == sorted(
        (expert, place) for place, expert in enumerate(chosen.flatten().tolist())
    )
    full = [count for count in counts.tolist() if count]
    assert counts.tolist()[: len(full)] == full, "the tiles that exist come first"


def test_equal_logits_rows_of_one_value_and_nan_stay_within_bounds(device: torch.device) -> None:
    x, logits, gate_up, down = inputs(device, 6, 4, 32, 16)
    logits[:4] = 1.0
    check(x[:5], logits[:5], gate_up, down, top_k=2, renormalize=True, tilings=SMALL)
    logits[4:] = torch.nan
    out = moe(x, logits, gate_up, down, top_k=3, renormalize=False, tilings=SMALL)
    assert not out[:4].isnan().any()


def test_residual_and_strided_rows(device: torch.device) -> None:
    x, logits, gate_up, down = inputs(device, 9, 4, 32, 16)
    wide = torch.cat((x, torch.full_like(x, torch.nan)), dim=1)
    plain = moe(x, logits, gate_up, down, top_k=2, renormalize=True, tilings=SMALL)
    again = moe(wide[:, :32], logits, gate_up, down, top_k=2, renormalize=True, tilings=SMALL)
    assert torch.equal(plain, again)
    stream = torch.randn(9, 32, device=device).to(torch.float16)
    expected = stream.float() + plain.float()
    options = {"top_k": 2, "renormalize": True, "tilings": SMALL}
    moe(x, logits, gate_up, down, residual=stream, out=stream, **options)
    assert float((stream.float() - expected).abs().max()) < 2**-8


def test_a_token_has_the_same_bits_beside_others(device: torch.device) -> None:
    x, logits, gate_up, down = inputs(device, 24, 4, 64, 32)
    whole = moe(x, logits, gate_up, down, top_k=2, renormalize=True, tilings=SMALL)
    for selected in ([3], [23, 0, 7], list(range(11, 24))):
        part = moe(
            x[selected], logits[selected], gate_up, down, top_k=2, renormalize=True, tilings=SMALL
        )
        assert torch.equal(part, whole[selected])


def test_weights_by_tensor_descriptor_give_the_same(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("no TMA")
    tensors = inputs(device, 9, 4, 80, 24)
    tma = (16, Tiling(16, 32, 4, 2, tma=True), Tiling(32, 16, 4, 2, tma=True))
    check(*tensors, top_k=2, renormalize=True, tilings=tma)


MIXTRAL, QWEN3, QWEN3_TP8, ODD = (
    (8, 2, 4096, 14336),
    (128, 8, 2048, 768),
    (128, 8, 2048, 96),
    (60, 4, 1000, 72),
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "sizes", "tokens"),
    [
        *((torch.bfloat16, MIXTRAL, tokens) for tokens in (32, 300)),
        *((torch.bfloat16, QWEN3, tokens) for tokens in (1, 256, 3000)),
        (torch.float16, QWEN3_TP8, 1000),
        *((torch.float16, ODD, tokens) for tokens in (65, 3000)),
    ],
)
def test_on_a_gpu_it_equals_its_twin(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], tokens: int
) -> None:
    experts, top_k, hidden, inner = sizes
    torch.cuda.empty_cache()
    tensors = inputs(device, tokens, experts, hidden, inner, dtype, seed=tokens)
    check(*tensors, top_k=top_k, renormalize=True)


@pytest.mark.gpu
def test_on_a_gpu_bits_do_not_depend_on_the_batch_when_asked(device: torch.device) -> None:
    x, *rest = inputs(device, 3000, 16, 512, 256, torch.bfloat16)
    logits, weights = rest[0], rest[1:]
    whole = moe(x, logits, *weights, top_k=4, renormalize=True, batch_invariant=True)
    for tokens in (1, 2, 33, 200, 1999):
        part = moe(
            x[:tokens], logits[:tokens], *weights, top_k=4, renormalize=True, batch_invariant=True
        )
        assert torch.equal(part, whole[:tokens])
