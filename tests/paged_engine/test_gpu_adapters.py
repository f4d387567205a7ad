"""The GPU's linear layers with adapters: the twin's sums around the layer's own product, and plain
steps as ever.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engines import GPU_SIZES, ON_GPU, drain, make, output
from tiny_adapters import make_adapter, merged
from tiny_models import make_tiny

from kvrelay.kernels.decoder_layer import Norm, act_and_mul, rms_norm
from kvrelay.kernels.gpu_linear import GpuLinear
from kvrelay.paged_engine.adapters import Site
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.gpu_operations import AdaptedLinear
from kvrelay.paged_engine.request import Request
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import SamplingParams
from tests.kernels.twins import add_lora

WIDTHS, K, RANK = (64, 64), 96, 16


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    return values.half().to("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def layer() -> tuple[AdaptedLinear, SimpleNamespace, GpuLinear]:
    base = GpuLinear(random(sum(WIDTHS), K, seed=1))
    operations = SimpleNamespace(batch_invariant=False, row_adapters=None)
    adapted = AdaptedLinear(base, operations)
    adapted.make_room(Site(("gate", "up"), K, WIDTHS), 3, RANK, torch.float16)
    for slot in (0, 2):
        adapted.put(
            slot, (random(2 * RANK, K, seed=slot + 2), random(sum(WIDTHS), RANK, seed=slot + 5) * 3)
        )
    adapted.put(1, None)
    return adapted, operations, base


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("count", [1, 7])
def test_around_every_kind_of_product(layer, count):
    adapted, operations, base = layer
    x, residual, weight = (
        random(count, K, seed=20),
        random(count, sum(WIDTHS), seed=21),
        random(K, seed=22) + 1,
    )
    operations.row_adapters = torch.tensor(
        [2, -1, 0, 1, 0, 2, -1][:count], dtype=torch.int32, device=x.device
    )

    def twin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return add_lora(y.clone(), x, adapted._down, adapted._up, operations.row_adapters, WIDTHS)

    normed = rms_norm(x, weight, 1e-5)
    same(adapted(x), twin(x, base(x)))
    same(adapted.normed(x, Norm(weight, 1e-5)), twin(normed, base(normed)))
    same(
        adapted.gated(x, "silu", Norm(weight, 1e-5)),
        act_and_mul(twin(normed, base(normed)), "silu"),
    )
    hidden = residual.clone()
    assert adapted(x, residual=hidden, out=hidden) is hidden
    same(hidden, twin(x, base(x, residual=residual)))


def test_steps_without_adapters_are_those_of_the_layer_alone(layer):
    adapted, _, base = layer
    x, weight = random(5, K, seed=20), random(K, seed=22)
    assert torch.equal(adapted(x), base(x))
    assert torch.equal(adapted.normed(x, Norm(weight, 1e-5)), base.normed(x, Norm(weight, 1e-5)))
    assert torch.equal(
        adapted.gated(x, "silu", Norm(weight, 1e-5)), base.gated(x, "silu", Norm(weight, 1e-5))
    )


# --- whole engines, on a GPU ---

PROMPTS = [
    [3 + (i * i + 7 * seed) % 250 for i in range(length)]
    for seed, length in enumerate((5, 70, 130, 1, 33))
]
NAMES = ("", "one", "two", "one", "")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("gpu")
    make_tiny("LlamaForCausalLM", folder / "base", **GPU_SIZES)
    one = make_adapter(folder / "one", folder / "base", seed=1, rank=8)
    return (
        folder / "base",
        one,
        make_adapter(
            folder / "two", folder / "base", seed=2, rank=16, targets=("q_proj", "o_proj")
        ),
    )


def on_gpu(base: Path, *modules: str, **options: Any) -> Engine:
    lora = {"enable_lora": True, "lora_modules": modules} if modules else {}
    return make(base, **ON_GPU, enable_prefix_caching=False, **lora, **options)


def answers(
    engine: Engine, which: list[int], names: tuple[str, ...] = NAMES
) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of some of the prompts, in one batch."""
    requests: dict[int, Request] = {}
    for index in which:
        params = SamplingParams(16, seed=5, temperature=0.0, ignore_eos=True, logprobs=0)
        requests[index] = engine.request(
            Submit(f"r{index}", PROMPTS[index], params, adapter=names[index]), 0.0
        )
        engine.scheduler.add(requests[index])
    drain(engine)
    return {i: (output(r), [e.logprob for e in r.new_logprobs]) for i, r in requests.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=str)
def test_a_gpu_answers_as_merged_weights_do_but_for_rounding(files, tmp_path, options):
    base, one, two = files
    adapted = on_gpu(base, f"one={one}", f"two={two}", **options)
    mixed = answers(adapted, [0, 1, 2, 3, 4])
    plain = on_gpu(base, **options)
    assert (
        answers(plain, [0])[0] == answers(adapted, [0])[0]
    )  # a step without adapters: bit for bit
    for name, path, scale in (("one", one, 1.0), ("two", two, 0.5)):
        reference = on_gpu(merged(tmp_path / name, base, path, scale), **options)
        for index in [i for i, each in enumerate(NAMES) if each == name]:
            wanted = answers(reference, [index], ("",) * 5)[index]
            assert mixed[index][1][:1] == pytest.approx(wanted[1][:1], abs=0.3 if options else 0.1)
            assert mixed[index] != answers(plain, [index], ("",) * 5)[index]


@pytest.mark.gpu
def test_a_batch_invariant_gpu_keeps_adapters_apart(files):
    base, one, two = files
    adapted = on_gpu(base, f"one={one}", f"two={two}", batch_invariant=True)
    together = answers(adapted, [0, 1, 2, 3, 4])
    for index in range(5):
        assert answers(adapted, [index])[index] == together[index]


@pytest.mark.gpu
def test_a_gpu_loads_an_adapter_at_run_time(files):
    base, one, two = files
    adapted = on_gpu(base, enable_lora=True, allow_runtime_lora=True)
    assert adapted.adapters is not None
    for path in (one, two):
        adapted.adapters.load("x", str(path), in_place=True)
        got = answers(adapted, [1], ("x",) * 5)
        assert got == answers(on_gpu(base, f"x={path}"), [1], ("x",) * 5)
        adapted.adapters.free_unused(adapted.scheduler.live)
