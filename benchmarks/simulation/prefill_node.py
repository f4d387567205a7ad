"""A prefill node of a simulation: steps of one token budget over prompts in the order of their turns.

As paged_engine/scheduler.py with no decodes: the shortest prompt first, with ageing (paged_engine/waiting.py), also
between the chunks of one that has begun; a prompt begins when all of it finds room. tests/benchmarks holds the two
side by side. KV stays until somebody has fetched it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.block_cache import BlockCache
from benchmarks.simulation.stream import Speeds, Stream
from paged_engine.waiting import OVERTAKEN
from wire.outputs import Load

__all__ = ["PrefillNode"]


@dataclass(eq=False, slots=True)
class _Prompt:
    stream: Stream
    arrived: float
    left: int
    """Tokens that no step computes yet: before it begins what it will probably be."""
    begun: bool = False


class PrefillNode:
    """`later(ms, call)` runs a call at a time; `begins` and `ends` are told of each prompt, in this order."""

    def __init__(
        self,
        speeds: Speeds,
        block_tokens: int,
        later: Callable[[float, Callable[[float], None]], None],
        begins: Callable[[Stream, float], None],
        ends: Callable[[Stream, float, float, float], None],
        *,
        shortest_first: bool = True,
    ) -> None:
        self.cache = BlockCache(speeds.kv_tokens, block_tokens)
        self.tokens = 0
        """Not computed, and in no step yet."""
        self.busy_until = 0.0
        self.running = 0
        self.waiting = 0
        self._speeds = speeds
        self._later, self._begins, self._ends = later, begins, ends
        self._overtaken = OVERTAKEN if shortest_first else 0
        self._line: list[tuple[int, int, int, _Prompt]] = []
        self._arrivals = 0
        self._arrived_tokens = 0
        self._stepping = False

    def submit(self, stream: Stream, now: float) -> None:
        """A prompt comes."""
        work = max(1, stream.prompt - min(self.cache.cached(stream.blocks), stream.prompt - 1))
        self._arrivals += 1
        self._arrived_tokens += work
        rank = self._arrived_tokens + self._overtaken * work
        # The number of the arrival is unlike any other, so prompts are never compared.
        bisect.insort(self._line, (stream.priority, rank, self._arrivals, _Prompt(stream, now, work)))
        self.tokens += work
        self.waiting += 1
        if not self._stepping:
            self._step(now)

    def release(self, stream: Stream, now: float) -> None:
        """Its KV is fetched."""
        self.cache.give_back(stream.blocks, self._private(stream))
        if not self._stepping:
            self._step(now)

    def load(self, now: float) -> Load:
        """As an engine reports it."""
        block_tokens, capacity = self.cache.block_tokens, self.cache.capacity
        return Load(
            running=self.running,
            waiting=self.waiting,
            waiting_tokens=self.tokens,
            free_blocks=max(0, self.cache.free) // block_tokens,
            total_blocks=capacity // block_tokens,
            block_tokens=block_tokens,
        )

    def _private(self, stream: Stream) -> int:
        return stream.prompt - len(stream.blocks) * self.cache.block_tokens

    def _step(self, now: float) -> None:
        """Choose what the next step computes, and begin it."""
        budget = self._speeds.step_tokens
        pieces: list[tuple[int, int]] = []
        ended: list[_Prompt] = []
        kept: list[tuple[int, int, int, _Prompt]] = []
        admits, at = True, 0
        for at, entry in enumerate(self._line):  # noqa: B007
            prompt = entry[3]
            if not budget:
                break
            if not prompt.begun:
                admits = admits and self.running < self._speeds.max_running and self._begin(prompt, now)
                if not admits:
                    kept.append(entry)
                    continue
            count = min(budget, prompt.left)
            pieces.append((count, prompt.stream.prompt - prompt.left))
            budget -= count
            prompt.left -= count
            self.tokens -= count
            if prompt.left:
                kept.append(entry)
            else:
                ended.append(prompt)
        else:
            at = len(self._line)
        if not pieces:
            return
        self._line[:at] = kept
        # Those whose last chunk is in this step leave the line now, but still run.
        self._stepping = True
        self.busy_until = now + self._speeds.chunk_ms(pieces)
        self._later(self.busy_until, lambda then: self._stepped(ended, then))

    def _begin(self, prompt: _Prompt, now: float) -> bool:
        stream = prompt.stream
        if not self.cache.room_for(stream.blocks, self._private(stream)):
            return False
        stream.cached = min(self.cache.cached(stream.blocks), stream.prompt - 1)
        self.cache.take(stream.blocks, self._private(stream))
        self.tokens += stream.prompt - stream.cached - prompt.left
        prompt.left = stream.prompt - stream.cached
        prompt.begun = True
        self.running += 1
        self.waiting -= 1
        if stream.begun < 0:
            stream.begun = now
        self._begins(stream, now)
        return True

    def _stepped(self, ended: list[_Prompt], now: float) -> None:
        self._stepping = False
        self.running -= len(ended)
        for prompt in ended:
            self._ends(prompt.stream, now, prompt.stream.begun - prompt.arrived, now - prompt.stream.begun)
        if not self._stepping:  # a release may have begun one
            self._step(now)
