"""Time an engine's single steps, and fit the costs of steps (wire/step_costs.py) to them.

Contexts are dummy content: 128 of 16k tokens take a second. A time lies between two steps' tokens,
in ms.
"""

from __future__ import annotations

import contextlib
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.kv_pool import FP8
from kvrelay.paged_engine.request import Fetch, Request
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.step_costs import Point, StepCosts, fitted_costs
from kvrelay.wire.transfer import Ticket

__all__ = ["PREFILLS_AT_ONCE", "STEPS", "TimedSteps", "measure_steps"]

PREFILLS_AT_ONCE = 3
STEPS = 24
"""Most steps of a decode point, warm-up included."""
_WARM_UPS = 3
_FEWEST = 3
# Times the seconds of a point; then fewer runs are enough.
_ENOUGH = 4.0
_PIECE_BLOCKS = 16  # 128 MiB of an 8B model
# On a busy machine a CPU's step waits for a core, now long and now not at all. By the wall clock
# the prompts of every fourth node cost nothing then, so nothing was pulled for them.
_CLOCKS = {"cuda": time.perf_counter, "cpu": time.thread_time}


class TimedSteps:
    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] | None = None,
        *,
        fill: bool = True,
    ) -> None:
        """`fill` puts random numbers into the pool: zeros cost a GPU less power."""
        self.engine = engine
        self.clock = clock or _CLOCKS[engine.device.type]
        self._began_s, self._spent_s = time.perf_counter(), self.clock()
        self._rng = random.Random(0)
        self._made = 0
        vocabulary = range(3, engine.model.vocab_size)
        self._words = self._rng.choices(vocabulary, k=2 * engine.max_model_len)
        self._fetches: list[Fetch] = []
        if fill:
            _fill(engine)

    @property
    def slowed(self) -> float:
        """Return how many times as long as by the clock all has taken: on a CPU steps wait for cores."""
        return (time.perf_counter() - self._began_s) / (self.clock() - self._spent_s)

    # As the engine's Handover.
    def fetch(self, fetch: Fetch) -> None:
        self._fetches.append(fetch)

    def offer(self, request: Request) -> None: ...

    def grow(self, request: Request, tokens: int) -> None: ...

    def request(self, prompt_tokens: int, max_tokens: int, filled: int = 0) -> Request:
        self._made += 1
        at = self._rng.randrange(len(self._words) - prompt_tokens + 1)
        # No two have a prefix in common.
        tokens = [
            self._made % self.engine.model.vocab_size,
            *self._words[at + 1 : at + prompt_tokens],
        ]
        fetch = None
        if filled:
            blocks = [0] * -(-filled // self.engine.pool.block_size)
            fetch = Ticket(remote_block_ids=[blocks], num_tokens=filled)
        params = SamplingParams(max_tokens, seed=self._made, temperature=0.0, ignore_eos=True)
        request = Request.from_submit(
            Submit(f"timed-{self._made}", tokens, params, fetch=fetch), time.monotonic()
        )
        # Serving has made them before, step by step.
        request.block_hashes(self.engine.pool.block_size)
        return request

    def submit(self, prompt_tokens: int, max_tokens: int, filled: int = 0) -> Request:
        request = self.request(prompt_tokens, max_tokens, filled)
        self.engine.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        updated = self.engine.step(self)
        while self._fetches:
            self.engine.scheduler.finish_fetch(self._fetches.pop().request.request_id)
        return updated

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def clear(self) -> None:
        for request in list(self.engine.scheduler.live):
            self.engine.scheduler.abort(request.request_id)
        self.drain()

    def times(
        self,
        rows: int,
        context: int,
        tokens: int = 0,
        start: int = 0,
        *,
        most: int = STEPS - 2 * _WARM_UPS,
        seconds: float = 1.0,
    ) -> list[float]:
        """Return the times of steps of `rows` decodes and of `tokens` of one prompt.

        Each decode has `context` tokens, the prompt `start` others before. At most `most` times, and
        none after `seconds` unless there are fewer than 3. Raises ValueError if the pool or the
        batch has no room.
        """
        with self.decoding(rows, context, most + 2 * _WARM_UPS):
            if not tokens:
                return self._times([None] * most, 0, seconds, rows)
            self._require_room(1 if rows else PREFILLS_AT_ONCE, start + tokens + 1, tokens)
            # A prompt of 100k tokens takes longer to make than a short step.
            prompts = [
                self.request(start + tokens, 1, filled=start) for _ in range(most + _WARM_UPS)
            ]
            return self._times(prompts, _WARM_UPS, seconds, max(1, rows))

    @contextlib.contextmanager
    def decoding(self, requests: int, context: int, steps: int) -> Iterator[None]:
        """Let requests decode in the block, at most `steps`. Raises ValueError without room."""
        first = max(1, context - steps // 2)
        self._require_room(requests, first + steps + 1)
        for _ in range(requests):
            self.submit(first + 1, steps + 2, filled=first)
        try:
            for _ in range(_WARM_UPS):
                self.step()
            yield
        finally:
            self.clear()

    def _times(
        self, arrivals: Sequence[Request | None], warm_ups: int, seconds: float, whole: int
    ) -> list[float]:
        times: list[float] = []
        last = self.clock()
        for number, request in enumerate(arrivals):
            if request is not None:
                self.engine.scheduler.add(request)
            updated = len(self.step())
            now = self.clock()
            if number >= warm_ups:
                if updated < whole:
                    raise ValueError(f"only {updated} of {whole} requests fit in one step")
                times.append((now - last) * 1e3)
            last = now
            if _enough(times, seconds):
                break
        return times

    def _require_room(self, requests: int, tokens: int, computed: int = 0) -> None:
        engine = self.engine
        blocks = -(-tokens // engine.pool.block_size) * requests
        if (
            blocks > engine.scheduler.pool.free
            or tokens > engine.max_model_len
            or computed > engine.max_num_batched_tokens
        ):
            raise ValueError(
                f"{requests} requests of {tokens} tokens do not fit into {engine.max_model_len} "
                f"tokens of context, {engine.scheduler.pool.free} blocks and steps of "
                f"{engine.max_num_batched_tokens} tokens"
            )


def _enough(times: list[float], seconds: float) -> bool:
    took_s = sum(times) / 1e3
    return (len(times) >= _FEWEST and took_s >= seconds) or bool(
        times and took_s >= _ENOUGH * max(seconds, 0.1)
    )


def _fill(engine: Engine) -> None:
    view = engine.pool.view
    generator = torch.Generator(device=view.device).manual_seed(0)
    piece = torch.randn(
        (min(_PIECE_BLOCKS, len(view)), *view.shape[1:]),
        generator=generator,
        device=view.device,
        dtype=torch.bfloat16,
    ).to(view.dtype)
    for blocks in torch.split(view, len(piece)):
        blocks.copy_(piece[: len(blocks)])
    if view.dtype == FP8:
        for layer in engine.pool.layers:
            for scales in layer[2:]:
                scales.fill_(1.0)


log = logging.getLogger("kvrelay.engine")

_LIMIT_S = 3.0
_GAP_MS = {"cuda": 50.0, "cpu": 200.0}
# Decoding requests, their context, and how many such prompts the longest step has, 0 for none. Short
# prompts beside decodes are what spills: without the one here an H200 took them for a fifth quicker
# than they are.
_STEPS = (
    (1, 256, 0), (0, 0, 4), (8, 256, 0), (0, 0, 8), (32, 1024, 0), (0, 0, 2), (128, 1024, 0),
    (128, 512, 32), (256, 256, 0), (32, 4096, 0),
)  # fmt: skip
_RUNS = 3
_SHORTEST_S = 0.02


def measure_steps(engine: Engine, config: EngineConfig) -> StepCosts:
    kind = engine.device.type
    timed = TimedSteps(engine, fill=kind == "cuda")
    points, slowed = _points(timed), timed.slowed
    costs = fitted_costs(points).scaled(slowed)
    steps = [ms * slowed for rows, _, _, _, ms in points if rows]
    least = 2 * statistics.median(steps) if kind == "cpu" and steps else 0.0
    gap_ms = config.max_gap_ms or max(_GAP_MS[kind], least)
    log.info("measured steps: %s; at most %.0f ms beside decodes", costs, gap_ms)
    engine.reset()
    engine.costs = costs
    budget = engine.scheduler.budget
    engine.scheduler.budget = replace(
        budget, costs=costs, gap_ms=gap_ms, shapes=engine.shapes, pace=1.0
    )
    return costs


def _points(timed: TimedSteps) -> list[Point]:
    engine, until = timed.engine, timed.clock() + _LIMIT_S
    points: list[Point] = []

    def there_is_time(rows: int, context: int, tokens: int, start: int) -> bool:
        known = fitted_costs(points)
        ms = known.decode_ms(rows, rows * context) + known.chunk_ms(tokens, start)
        return timed.clock() + ms * (_RUNS + _WARM_UPS) / 1e3 < until

    longest = min(engine.max_num_batched_tokens, engine.max_model_len - 2)
    part, pool = longest // 4, engine.scheduler.pool.free * engine.pool.block_size
    behind = min(
        4 * longest, engine.max_model_len - 2 - part, pool // (2 * PREFILLS_AT_ONCE) - part
    )
    steps = [(rows, each, longest // parts if parts else 0, 0) for rows, each, parts in _STEPS]
    for step in (*steps, (0, 0, part, max(0, behind))):
        rows, context, tokens, start = step
        if rows <= engine.max_num_seqs and rows + tokens and there_is_time(*step):
            with contextlib.suppress(ValueError):  # no room
                times = timed.times(*step, most=_RUNS, seconds=_SHORTEST_S)
                points.append((rows, rows * context, tokens, start, statistics.median(times)))
    return points
