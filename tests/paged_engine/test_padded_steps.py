"""A step padded to a shape gives the logits of the same step as it is, whatever decodes beside it.

Kernels run in Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from scheduling import BLOCK, make, request
from tiny_models import make_tiny

from kvrelay.paged_engine.before_loading import checked_model
from kvrelay.paged_engine.decoder import Decoder, split_fused
from kvrelay.paged_engine.gpu_graphs import StepUploads
from kvrelay.paged_engine.gpu_operations import GpuOperations
from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.model_files import read_tensors
from kvrelay.paged_engine.ranks import Alone
from kvrelay.paged_engine.step_shapes import smallest_shape, step_shapes
from kvrelay.paged_engine.step_values import Slots, StepValues, null_step
from kvrelay.wire.config import EngineConfig

SLOTS, BLOCKS, LONGEST = 8, 64, 128


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    empty = torch.empty
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    return torch.device("cpu")


class Device:
    """A pool, a decoder and uploads to it, on the CPU or on a GPU."""

    def __init__(self, folder: str, device: torch.device) -> None:
        config = EngineConfig(folder)
        model = checked_model(config, "cpu")
        self.sampled = torch.zeros(2 * SLOTS, dtype=torch.int64, device=device)
        self.operations = GpuOperations(
            model, Alone(), sampled=self.sampled, max_rows=SLOTS, kv_dtype=torch.float16,
            batch_invariant=False, quantize=False, adapted=False,
        )  # fmt: skip
        stored = split_fused(model, read_tensors(config.model, model, "auto", torch.device("cpu")))
        half = {"device": device, "dtype": torch.float16}
        self.decoder = Decoder(model, stored, self.operations, **half, max_positions=LONGEST)
        self.pool = KVPool(model, num_blocks=BLOCKS, block_size=BLOCK, **half)
        self.shapes = step_shapes(max_num_seqs=SLOTS, max_prompt_rows=64)
        self.uploads = StepUploads(
            model, block_size=BLOCK, max_num_seqs=SLOTS, max_model_len=LONGEST,
            chunks_only=False, shapes=self.shapes, device=device,
        )  # fmt: skip

    def logits(self, values: StepValues, *, pads: bool) -> torch.Tensor:
        """Return those of the sampled rows."""
        shape = smallest_shape(values, self.shapes) if pads else None
        if shape is None:
            step, _ = self.uploads.chunks(values)
        else:
            step = self.uploads.shaped(values, shape)
            slots = self.uploads.decode_slots[: len(values.sampled_slots)]
            assert slots.tolist() == values.sampled_slots.tolist()
        self.operations.plan(step, BLOCK)
        logits = self.decoder.logits(self.decoder.hidden(step, self.pool))
        assert len(logits) == (len(values.sampled_rows) if shape is None else shape.samples)
        return logits[: len(values.sampled_rows)].float()


def test_padding_may_be_longer_than_any_request(device) -> None:
    """Rows of padding have positions with angles, and their slot's table has room for their blocks."""
    longest, shapes = 48, step_shapes(max_num_seqs=256, max_prompt_rows=48)
    model: Any = SimpleNamespace(num_heads=4, num_kv_heads=2)
    uploads = StepUploads(
        model, block_size=BLOCK, max_num_seqs=256, max_model_len=longest, chunks_only=False,
        shapes=shapes, device=device,
    )  # fmt: skip
    values = null_step([1] * 191 + [2], BLOCK, -1)
    shape = smallest_shape(values, shapes)
    assert shape is not None
    step = uploads.shaped(values, shape)
    assert step.context_lens.max() == shape.rows - 193 > longest
    assert step.context_lens.max() <= step.tables.shape[1] * BLOCK
    assert step.positions.max() < longest


def test_a_padded_step_has_the_logits_of_the_step(tmp_path, device) -> None:
    make_tiny("Gemma2ForCausalLM", tmp_path, num_hidden_layers=2)  # one layer has a window
    plain, shaped = (Device(str(tmp_path), device) for _ in range(2))
    rng, scheduler = random.Random(1), make(BLOCKS, max_model_len=LONGEST, max_num_seqs=SLOTS)
    slots = Slots(SLOTS, max_blocks=plain.uploads.max_blocks, block_size=BLOCK)
    used = set()
    for turn in range(12):
        if turn < 4:
            prompt = [rng.randrange(3, 250) for _ in range(rng.randint(2, 40))]
            scheduler.add(request(f"r{turn}", prompt, max_tokens=rng.randint(2, 6)))
        plan = scheduler.schedule(float(turn))
        if not plan.chunks:
            continue
        planned = slots.step(plan.chunks)
        found, padded = (
            each.logits(planned.values, pads=each is shaped) for each in (plain, shaped)
        )
        torch.testing.assert_close(padded, found, rtol=2e-2, atol=2e-2)
        used.add(smallest_shape(planned.values, shaped.shapes))
        tokens = found.argmax(-1)
        for each in (plain, shaped):
            each.sampled[torch.from_numpy(planned.values.sampled_slots).long()] = tokens
        for chunk in plan.chunks:
            scheduler.mark_launched(chunk)
        for sampled, token in zip(planned.sampling, tokens.tolist(), strict=True):
            scheduler.append_sampled(sampled, [token], float(turn))
    assert len(used) > 3
    assert not scheduler.has_work
