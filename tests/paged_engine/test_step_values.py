"""The arrays of a step, against a plain re-telling of what each sequence must look like on the device."""

from __future__ import annotations

import random

import pytest

from paged_engine.blocks import BlockPool
from paged_engine.request import Request
from paged_engine.scheduler import Scheduler
from paged_engine.step_plan import Chunk
from paged_engine.step_values import Slots
from wire.engine_messages import Submit
from wire.sampling import SamplingParams

BLOCK, MAX_BLOCKS, SLOTS = 4, 40, 6


class Device:
    """What a device does with the arrays, in plain Python."""

    def __init__(self) -> None:
        self.tables = [[-1] * MAX_BLOCKS for _ in range(SLOTS)]
        self.sampled = [-1] * SLOTS
        self.kv: dict[tuple[int, int], int] = {}  # (block, offset) -> token id

    def run(self, values) -> list[int]:
        for index, block in values.new_blocks.T:
            self.tables[index // MAX_BLOCKS][index % MAX_BLOCKS] = int(block)
        texts, end = [], 0
        for (slot, context_len, last), count in zip(values.sequences.T, values.counts, strict=True):
            self.tables[slot][(context_len - 1) // BLOCK] = int(last)
            for row in range(end, end + count):
                token, source, position, block, offset = (int(v) for v in values.rows[:, row])
                assert block == self.tables[slot][position // BLOCK]
                assert offset == position % BLOCK
                self.kv[block, offset] = self.sampled[source] if source >= 0 else token
            end += count
            texts.append([self.kv[self.tables[slot][p // BLOCK], p % BLOCK] for p in range(context_len)])
        assert end == values.rows.shape[1]
        tokens = []
        last_rows = dict(zip((values.counts.cumsum() - 1).tolist(), texts, strict=True))
        for row, slot in zip(values.sampled_rows, values.sampled_slots, strict=True):
            tokens.append(sum(last_rows[int(row)]) % 97 + 3)
            self.sampled[slot] = tokens[-1]
        return tokens


@pytest.mark.parametrize("seed", range(12))
def test_a_device_that_is_one_step_behind_sees_the_right_tokens(seed):
    rng = random.Random(seed)
    scheduler = Scheduler(
        BlockPool(rng.choice([18, 80])),
        block_tokens=BLOCK,
        max_batched_tokens=rng.choice([7, 32]),
        max_running=SLOTS,
        max_model_len=MAX_BLOCKS * BLOCK,
        eos_token_ids=(5,),
    )
    slots, device = Slots(SLOTS, max_blocks=MAX_BLOCKS, block_tokens=BLOCK), Device()
    requests: list[tuple[Request, list[int]]] = []
    before: list[tuple[Request, int]] = []
    for turn in range(250):
        if turn < 150 and rng.random() < 0.4:
            prompt = [rng.randrange(6, 90) for _ in range(rng.randint(1, 30))]
            params = SamplingParams(rng.randint(1, 20), seed=0, temperature=0)
            request = Request.of(Submit(f"r{turn}", prompt, params), float(turn))
            scheduler.add(request)
            requests.append((request, prompt))
        if rng.random() < 0.03 and requests:
            scheduler.abort(rng.choice(requests)[0].request_id)
        plan = scheduler.schedule(float(turn))
        now: list[tuple[Request, int]] = []
        if plan.chunks:
            planned = slots.step(plan.chunks)
            assert len({slot for slot, _ in planned.admitted}) == len(planned.admitted)
            now = list(zip(planned.sampling, device.run(planned.values), strict=True))
            for chunk in plan.chunks:
                scheduler.launched(chunk)
        for request, token in before:
            scheduler.append(request, token, float(turn))
        before = now
        scheduler.check()
    for request, prompt in requests:
        expected = list(prompt)
        while len(expected) < len(request.token_ids):
            expected.append(sum(expected) % 97 + 3)
        assert request.token_ids == expected


def test_decode_steps_are_told_apart():
    slots = Slots(2, max_blocks=4, block_tokens=4)
    request = Request.of(Submit("a", [7] * 6, SamplingParams(4, seed=0)), 0.0)
    request.blocks = [3, 2]
    assert not slots.step([Chunk(request, 0, 6, True)]).values.is_decode
    assert slots.step([Chunk(request, 6, 1, True)]).values.is_decode
    assert not slots.step([Chunk(request, 6, 1, False)]).values.is_decode
