"""A device that only remembers: the KV of a position is a number made of all tokens up to it.

So every block says whose it is. What is attended to is looked at: foreign KV, or KV that a late
READ has overwritten, is a Violation.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from simulated_world import Violation

from kvrelay.paged_engine.request import Chunk, Request

if TYPE_CHECKING:
    from simulated_node import SimulatedNode

BLOCK_TOKENS, BLOCK_BYTES = 4, 1000
MAX_MODEL_LEN = 64
EOS = 0


def chain(tokens: Sequence[int], value: int = 1) -> list[int]:
    """What the KV of each position is, behind one whose KV is `value`."""
    values = []
    for token in tokens:
        value = (value * 6364136223846793005 + token + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        values.append(value)
    return values


def next_token(value: int) -> int:
    """What the model says after this: rarely that it is the end."""
    return (value >> 33) % 40


class _Step:
    def __init__(self, device: Device, chunks: Sequence[Chunk]) -> None:
        self._device = device
        self.requests = [chunk.request for chunk in chunks if chunk.samples]
        self.rows = [(chunk, list(chunk.request.blocks)) for chunk in chunks]
        self.tokens: list[int] | None = None

    @property
    def is_done(self) -> bool:
        """Each time somebody looks, the device may have got there meanwhile."""
        if self.tokens is None and self._device.gets_on():
            self._device.catch_up()
        return self.tokens is not None

    def sample(self) -> None:
        """Its tokens are drawn in the same go."""

    def wait(self) -> tuple[list[int], list[None]]:
        self._device.catch_up()
        assert self.tokens is not None
        return self.tokens, [None] * len(self.tokens)


class Device:
    """A Runner. Does what it is given in order, some time between the launch and the wait for it."""

    rope_variant = ""
    max_model_len = MAX_MODEL_LEN

    def __init__(self, node: SimulatedNode, num_blocks: int, rng: random.Random) -> None:
        self._node, self._rng = node, rng
        self.pool = SimpleNamespace(
            block_size=BLOCK_TOKENS, num_blocks=num_blocks, block_bytes=BLOCK_BYTES
        )
        self.max_num_batched_tokens, self.max_num_seqs = rng.choice([4, 8, 24]), rng.choice([2, 8])
        self.runs_ahead = rng.random() < 0.5
        self.memory = [[0] * BLOCK_TOKENS for _ in range(num_blocks)]
        self._queue: deque[_Step] = deque()
        self._known: dict[
            Request, tuple[list[int], list[int]]
        ] = {}  # tokens as the device has them, and their chain

    def launch(self, chunks: Sequence[Chunk]) -> _Step:
        step = _Step(self, chunks)
        self._queue.append(step)
        if self._rng.random() < 0.5:
            self.catch_up()
        return step

    def gets_on(self) -> bool:
        return self._rng.random() < 0.5

    def catch_up(self) -> None:
        while self._queue:
            step = self._queue.popleft()
            step.tokens = [token for row in step.rows if (token := self._compute(*row)) is not None]

    def close(self) -> None:
        pass

    def _compute(self, chunk: Chunk, blocks: list[int]) -> int | None:
        request, begin, end = chunk.request, chunk.start, chunk.start + chunk.count
        tokens, values = self._known.setdefault(request, ([], []))
        if len(request.token_ids) > len(tokens):
            tokens[:], values[:] = request.token_ids, chain(request.token_ids)
        if request.finish is None:
            self.check(request, blocks, values, begin)
        for at in range(begin, end):
            self.memory[blocks[at // BLOCK_TOKENS]][at % BLOCK_TOKENS] = values[at]
        if not chunk.samples:
            return None
        token = next_token(values[end - 1])
        if len(tokens) == end:
            tokens.append(token)
            values += chain([token], values[-1])
        return token

    def check(self, request: Request, blocks: list[int], values: list[int], count: int) -> None:
        """The KV of the first `count` tokens is theirs."""
        for index in range(-(-count // BLOCK_TOKENS)):
            first = index * BLOCK_TOKENS
            want = values[first : min(first + BLOCK_TOKENS, count)]
            if self.memory[blocks[index]][: len(want)] != want:
                raise Violation(
                    f"{self._node.name}: block {blocks[index]} does not hold tokens {first} to "
                    f"{first + len(want)} of"
                    f" request {request.request_id}"
                )
