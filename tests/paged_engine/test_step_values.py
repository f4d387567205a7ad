"""The arrays of a step, against a plain re-telling of what each sequence must look like on the
device.
"""

from __future__ import annotations

import itertools
import random

import pytest
from invariants import check_scheduler

from kvrelay.paged_engine.adapters import Loaded
from kvrelay.paged_engine.blocks import NULL_BLOCK, BlockPool
from kvrelay.paged_engine.request import Chunk, Request
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.paged_engine.speculation import Speculation
from kvrelay.paged_engine.step_shapes import (
    StepShape,
    padded,
    smallest_shape,
    step_shapes,
)
from kvrelay.paged_engine.step_values import PADDING_ROW, PADDING_SEQUENCE, Slots, null_step
from kvrelay.wire.engine_messages import AdapterFacts, Submit
from kvrelay.wire.sampling import SamplingParams

BLOCK, MAX_BLOCKS, SLOTS = 4, 40, 6


def drawn(tokens: list[int], index: int, loop: bool) -> int:
    """Model and draw: a function of the text and the token's index; with `loop` mostly what stood
    there before.
    """
    said = (sum(tokens) + index) % 97 + 3
    return tokens[-3] if loop and said % 4 and len(tokens) > 3 else said


class Device:
    """What a device does with the arrays, in plain Python."""

    def __init__(self, loop: bool) -> None:
        self.tables = [[-1] * MAX_BLOCKS for _ in range(SLOTS)] + [[NULL_BLOCK] * MAX_BLOCKS]
        self.sampled = [-1] * (2 * SLOTS)
        self.index = [-1] * (2 * SLOTS)  # of the token that each slot samples next
        self.loop = loop
        self.kv: dict[tuple[int, int], int] = {}  # (block, offset) -> token id

    def tell(self, planned) -> None:
        for slot, request in planned.admitted:
            self.sampled[slot], self.index[slot] = request.token_ids[-1], request.output_tokens
        for state in planned.states:
            self.sampled[state.slot], self.index[state.slot] = state.newest, state.token_index

    def run(self, values) -> list[int]:
        for index, block in values.new_blocks.T:
            self.tables[index // MAX_BLOCKS][index % MAX_BLOCKS] = int(block)
        texts, end = {}, 0
        for (slot, context_len, last), count in zip(values.sequences.T, values.counts, strict=True):
            if slot < 0:  # padding
                assert context_len == 0
                assert set(values.rows[3, end : end + count].tolist()) <= {NULL_BLOCK}
                end += count
                continue
            self.tables[slot][(context_len - 1) // BLOCK] = int(last)
            for row in range(end, end + count):
                token, source, position, block, offset, adapter = (
                    int(v) for v in values.rows[:, row]
                )
                assert adapter == -1
                assert block == self.tables[slot][position // BLOCK]
                assert block == NULL_BLOCK or offset == position % BLOCK
                self.kv[block, offset] = self.sampled[source] if source >= 0 else token
            end += count
            text = [self.kv[self.tables[slot][p // BLOCK], p % BLOCK] for p in range(context_len)]
            texts |= {
                end - behind: text[: context_len - behind + 1] for behind in range(1, count + 1)
            }
        assert end == values.rows.shape[1]
        assert len(set(values.sampled_slots.tolist())) == len(values.sampled_slots)
        tokens = []
        for row, slot in zip(values.sampled_rows, values.sampled_slots, strict=True):
            tokens.append(drawn(texts[int(row)], self.index[slot], self.loop))
            self.sampled[slot] = tokens[-1]
            self.index[slot] += 1
        return tokens


@pytest.mark.parametrize("proposed", [0, 3], ids=["", "with-proposals"])
@pytest.mark.parametrize("shaped", [False, True], ids=["", "shaped"])
@pytest.mark.parametrize("seed", range(12))
def test_a_device_that_is_one_step_behind_sees_the_right_tokens(seed, shaped, proposed):
    rng = random.Random(seed)
    shapes = step_shapes(max_num_seqs=SLOTS, max_prompt_rows=32 if shaped else 0)
    used = set()
    speculation = Speculation(proposed, 3, 1)
    scheduler = Scheduler(
        BlockPool(rng.choice([18, 80])),
        block_size=BLOCK,
        max_num_batched_tokens=rng.choice([7, 32]),
        max_num_seqs=SLOTS,
        max_model_len=MAX_BLOCKS * BLOCK,
        eos_token_ids=(5,),
        speculation=speculation,
    )
    slots, device = (
        Slots(SLOTS, max_blocks=MAX_BLOCKS, block_size=BLOCK),
        Device(loop=bool(proposed)),
    )
    requests: list[tuple[Request, list[int]]] = []
    before: list[tuple[Request, int]] = []

    def take(sampled: list[tuple[Request, int]]) -> None:
        for request, rows in itertools.groupby(sampled, key=lambda row: row[0]):
            scheduler.append_sampled(request, [token for _, token in rows], 0.0)

    for turn in range(1000):
        if turn > 150 and not (scheduler.has_work or before):
            break
        if turn < 150 and rng.random() < 0.4:
            prompt = [rng.randrange(6, 90) for _ in range(rng.randint(1, 30))]
            params = SamplingParams(rng.randint(1, 20), seed=0, temperature=0)
            request = Request.from_submit(Submit(f"r{turn}", prompt, params), float(turn))
            scheduler.add(request)
            requests.append((request, prompt))
        if rng.random() < 0.03 and requests:
            scheduler.abort(rng.choice(requests)[0].request_id)
        if scheduler.needs_tokens:
            take(before)
            before = []
        plan = scheduler.schedule(float(turn))
        # A GPU has room for so many sequences, whether they sample or not.
        assert sum(1 + len(chunk.proposals) for chunk in plan.chunks) <= SLOTS
        for chunk in plan.chunks:
            if chunk.proposals:
                assert not chunk.request.num_pending
                left = chunk.request.params.max_tokens - chunk.request.output_tokens
                assert chunk.sampled_rows <= left
        now: list[tuple[Request, int]] = []
        if plan.chunks:
            planned = slots.step(plan.chunks)
            assert len({slot for slot, _ in planned.admitted}) == len(planned.admitted)
            device.tell(planned)
            values, shape = planned.values, smallest_shape(planned.values, shapes)
            if shape is not None:
                values = padded(values, shape, null_slot=SLOTS, block_size=BLOCK)
                assert values.rows.shape == (len(PADDING_ROW), shape.rows)
                sequences = shape.decodes + shape.prompts
                assert values.sequences.shape == (len(PADDING_SEQUENCE), sequences)
                assert values.counts[-1] == 0
                used.add(shape)
            now = list(zip(planned.sampling, device.run(values), strict=True))
            for chunk in plan.chunks:
                scheduler.mark_launched(chunk)
        take(before)
        before = now
        check_scheduler(scheduler)
    assert scheduler.pool.free == scheduler.pool.total
    for request, prompt in requests:
        expected = list(prompt)
        while len(expected) < len(request.token_ids):
            expected.append(drawn(expected, len(expected) - len(prompt), bool(proposed)))
        assert request.token_ids == expected
    assert bool(speculation.accepted_tokens) == bool(proposed)
    assert used >= set(shapes[:2])


def test_decode_steps_are_told_apart():
    slots = Slots(2, max_blocks=4, block_size=4)
    request = Request.from_submit(Submit("a", [7] * 6, SamplingParams(4, seed=0)), 0.0)
    request.blocks = [3, 2]
    assert not slots.step([Chunk(request, 0, 6, True)]).values.is_decode
    assert slots.step([Chunk(request, 6, 1, True)]).values.is_decode
    assert not slots.step([Chunk(request, 6, 1, False)]).values.is_decode


def test_rows_of_an_adapter_stand_side_by_side():
    slots = Slots(SLOTS, max_blocks=MAX_BLOCKS, block_size=BLOCK)
    chunks = []
    for index, (adapter, count) in enumerate([(1, 1), (-1, 1), (0, 3), (1, 1), (-1, 2)]):
        loaded = None if adapter < 0 else Loaded(adapter, AdapterFacts(f"a{adapter}", "0", 4))
        req = Request.from_submit(
            Submit(f"r{index}", [3] * count, SamplingParams(4, seed=0)), 0.0, loaded
        )
        req.blocks = [index + 1]
        chunks.append(Chunk(req, 0, count, True))
    planned = slots.step(chunks)
    assert planned.values.rows[5].tolist() == [-1, 1, 1, -1, -1, 0, 0, 0]
    assert planned.values.adapted
    assert [req.request_id for req in planned.sampling] == ["r1", "r0", "r3", "r4", "r2"]
    assert not slots.step(chunks[1:2]).values.adapted


def step_of(counts):
    return null_step(counts, BLOCK, -1)


def test_a_step_takes_the_smallest_shape_that_holds_it():
    shapes = step_shapes(max_num_seqs=40, max_prompt_rows=800)
    rows = 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 840
    assert [shape.rows for shape in shapes] == [n for n in rows for _ in range(2)]
    for counts, rows, decodes, samples in (
        ([2], 32, 0, 16),
        ([32], 32, 0, 16),
        ([1, 31], 32, 32, 32),
        ([1, 32], 64, 40, 40),
        ([1] * 33 + [2] * 7, 64, 40, 40),
        ([2] * 22, 768, 0, 24),
        ([1] * 8 + [769 - 23 * 31, *[31] * 21], 768, 40, 40),
    ):
        assert smallest_shape(step_of(counts), shapes) == StepShape(rows, decodes, samples)
        assert samples >= len(counts)
    # Decodes alone, a prompt too long, prompts too many.
    for none in (step_of([1, 1]), step_of([841]), step_of([2] * 24)):
        assert smallest_shape(none, shapes) is None
    # As decode graphs have: the sampler's are theirs.
    assert all(shape.samples % 8 == 0 or shape.samples == 40 for shape in shapes)
    assert step_shapes(max_num_seqs=40, max_prompt_rows=1) == []


def test_a_padded_step_that_is_full_has_no_padding_prompt():
    shape = StepShape(32, 0, 4)
    whole = padded(step_of([30, 2]), shape, null_slot=9, block_size=BLOCK)
    assert whole.counts.tolist() == [30, 2] + [0] * (shape.prompts - 2)
    part = padded(step_of([29, 2]), shape, null_slot=9, block_size=BLOCK)
    assert part.counts.tolist() == [29, 2, 1] + [0] * (shape.prompts - 3)
    assert part.sequences[:, 2].tolist() == [9, 1, NULL_BLOCK]
