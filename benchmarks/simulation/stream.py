"""One request of a simulation, what became of it, and how fast the nodes are that serve it. Times are milliseconds.

The speeds are those of an H200 with a model of 8 billion parameters in bf16, fitted to benchmarks/RESULTS.md: a prompt
of 4,096 tokens at 43,400 tokens/s; decode steps of 3.99, 5.29 and 9.30 ms at 1, 32 and 128 requests of 1k context and
of 8.3 ms at 32 of 4k (measured: 4.03, 5.18, 9.2 to 9.5, 8.1). 256 requests of 384 would take 9.6 (measured 11.4).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Speeds", "Stream"]


@dataclass(frozen=True, slots=True)
class Speeds:
    """How long things take, in milliseconds, and how much a node holds, in tokens."""

    prefill_fixed: float = 1.5
    prefill_least: float = 4.0
    """A step reads all weights, however short the prompt."""
    prefill_token: float = 0.0205
    prefill_pair: float = 1.05e-6
    """For each token and each token before it: attention."""
    decode_fixed: float = 3.95
    decode_request: float = 0.0105
    decode_context: float = 3.1e-5
    """For each token of KV that a decode step reads."""
    transfer_fixed: float = 0.5
    transfer_token: float = 0.00037
    """512 MiB, 4,096 tokens, in 2 ms."""
    network: float = 0.3
    """From the client through the router to a node, and back, beside all work."""
    kv_tokens: int = 800_000
    step_tokens: int = 8_192
    max_running: int = 256

    def chunk_ms(self, pieces: list[tuple[int, int]]) -> float:
        """One step that computes, of each prompt, so many tokens behind so many."""
        tokens = sum(count for count, _ in pieces)
        pairs = sum(count * (behind + count / 2) for count, behind in pieces)
        linear = max(self.prefill_least, self.prefill_fixed + self.prefill_token * tokens)
        return linear + self.prefill_pair * pairs

    def prompt_ms(self, tokens: int, cached: int = 0) -> float:
        """A prompt alone, of which some is cached, in as many steps as it needs."""
        total = 0.0
        while cached < tokens:
            count = min(self.step_tokens, tokens - cached)
            total += self.chunk_ms([(count, cached)])
            cached += count
        return total

    def step_ms(self, running: float, context: float) -> float:
        """A decode step of so many requests that have so many tokens of KV together."""
        return self.decode_fixed + self.decode_request * running + self.decode_context * context

    def fetch_ms(self, tokens: int) -> float:
        """The KV of so many tokens, from node to node."""
        return self.transfer_fixed + self.transfer_token * tokens


@dataclass(eq=False, slots=True)
class Stream:
    """A request: `output` tokens after `prompt` tokens whose full blocks are named by `blocks`; then its fate."""

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    session: str = ""
    priority: int = 0

    number: int = 0
    cached: int = 0
    """Tokens of the prompt that its prefill node had when it began."""
    begun: float = -1.0
    """When its prompt began to be computed; then, when its first and its last token were there."""
    first: float = -1.0
    last: float = -1.0
    preempted: int = 0

    @property
    def ttft(self) -> float:
        """From its arrival to its first token."""
        return self.first - self.at

    @property
    def tpot(self) -> float:
        """Milliseconds for each token after the first."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0
