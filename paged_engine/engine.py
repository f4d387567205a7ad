"""The engine of one node: model, pool, scheduler and sampler joined into one step. No HTTP, no peers, no roles.

It knows that KV may come from elsewhere (`fetch`) or be kept for others (`hold`), but not how: the process around it
(node/engine_process.py) moves the bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paged_engine.blocks import BlockPool
from paged_engine.cpu_operations import CpuOperations
from paged_engine.decoder import Decoder
from paged_engine.kv_pool import KVPool
from paged_engine.model_config import ModelConfig
from paged_engine.model_files import read_model_config, read_tensors
from paged_engine.request import Request
from paged_engine.runner import CpuRunner, Launched
from paged_engine.sampler import Sampler
from paged_engine.scheduler import Chunk, Fetch, Scheduler
from wire.config import EngineConfig
from wire.errors import ConfigError

__all__ = ["Counters", "Engine"]

# A chunk is as small as the device computes at full speed, so that the first of several prompts is not held up by the
# others: on two cores 128 tokens give 1P1D a TTFT p50 of 420 ms under 8 clients, 512 give 585 ms, at equal throughput.
_STEP_TOKENS = {"cpu": 128, "cuda": 2048}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class Counters:
    """What the engine did since start."""

    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0


class Engine:
    """Loads the model and serves requests step by step. Raises ConfigError when the configuration cannot work."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.device = _choose_device(config.device)
        if config.batch_invariant and self.device.type != "cpu":
            raise ConfigError("batch_invariant is built for the CPU only, where it is always on; leave it out on a GPU")
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        self.model: ModelConfig = read_model_config(config.model, config.load_format)
        # fp32 on CPU: bf16 products are ten times slower on CPUs without bf16 units (SmolLM2, prefill of 512).
        wanted = (
            config.dtype if config.dtype != "auto" else ("float32" if self.device.type == "cpu" else self.model.dtype)
        )
        self.dtype = _DTYPES[wanted]
        num_blocks = KVPool.blocks_in(
            self.model, pool_bytes=config.kv_cache_bytes, block_tokens=config.block_tokens, dtype=self.dtype
        )
        self.max_model_len = _fit_context(config, self.model, num_blocks)
        decoder = Decoder(
            self.model,
            read_tensors(config.model, self.model, config.load_format),
            CpuOperations(self.model, self.dtype),
            device=self.device,
            dtype=self.dtype,
            max_positions=self.max_model_len,
        )
        self.pool = KVPool(
            self.model, num_blocks=num_blocks, block_tokens=config.block_tokens, dtype=self.dtype, device=self.device
        )
        self.scheduler = Scheduler(
            BlockPool(num_blocks),
            block_tokens=config.block_tokens,
            max_batched_tokens=config.max_batched_tokens or _STEP_TOKENS[self.device.type],
            max_running=config.max_running,
            max_model_len=self.max_model_len,
            eos_token_ids=self.model.eos_token_ids,
            prefix_cache=config.prefix_cache,
        )
        self.counters = Counters()
        self._runner = CpuRunner(decoder, self.pool, Sampler(self.model.eos_token_ids))
        self._in_flight: Launched | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step could do something now, without news from outside."""
        return self.scheduler.has_work or self._in_flight is not None

    @property
    def in_flight(self) -> bool:
        """Whether a step is running on the device."""
        return self._in_flight is not None

    def step(self, start_fetch: Callable[[Fetch], None] | None = None) -> list[Request]:
        """Launch the next step, then take the tokens of the one before; the requests that have new tokens or ended.

        On a GPU the host stays one step ahead. On a CPU a launch computes at once, and its tokens are taken at once.
        """
        began = self._clock()
        plan = self.scheduler.schedule(began)
        before, self._in_flight = self._in_flight, None
        if before is None:
            self._start(plan.fetches, start_fetch)
        if plan.chunks:
            self._in_flight = self._runner.launch(plan.chunks)
            for chunk in plan.chunks:
                self._count(chunk)
                self.scheduler.launched(chunk)
        updated = self._take_tokens(before) if before is not None else []
        if before is not None:
            # Only now may others write to blocks that have just become free: the step that has ended was the last one
            # which could touch them.
            self._start(plan.fetches, start_fetch)
        if self._in_flight is not None and not self._runner.runs_ahead:
            done, self._in_flight = self._in_flight, None
            updated += self._take_tokens(done)
        self.counters.step_s += self._clock() - began
        return updated

    def _start(self, fetches: list[Fetch], start_fetch: Callable[[Fetch], None] | None) -> None:
        for fetch in fetches:
            assert start_fetch is not None, "a request with a fetch needs a connector"
            start_fetch(fetch)

    def _take_tokens(self, launched: Launched) -> list[Request]:
        """Give each request of a launched step its token; those that take it."""
        tokens, logprobs = launched.wait()
        now = self._clock()
        self.counters.steps += 1
        updated = []
        for request, token, logprob in zip(launched.requests, tokens, logprobs, strict=True):
            if request.finish is None:
                updated.append(request)
                if logprob is not None:
                    request.new_logprobs.append(logprob)
            self.scheduler.append(request, token, now)
        self.counters.generated_tokens += len(updated)
        return updated

    def _count(self, chunk: Chunk) -> None:
        """Prompt tokens, each once, however often it is computed after preemptions."""
        request = chunk.request
        if not request.num_counted:
            request.num_counted = request.cached_tokens or 0
            self.counters.cached_prompt_tokens += request.num_counted
        end = min(chunk.start + chunk.count, request.prompt_tokens)
        if end > request.num_counted:
            self.counters.prompt_tokens += end - request.num_counted
            request.num_counted = end


def _choose_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda was asked for, but torch sees no GPU; use --device cpu or install a CUDA build of torch"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _fit_context(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The longest context that the model and the pool both allow."""
    room = (num_blocks - 1) * config.block_tokens
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's own limit of {model.max_position}"
        )
    if config.max_model_len > room:
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit: the KV pool of {config.kv_cache_bytes} bytes holds "
            f"{room} tokens; lower max_model_len to at most {room} or raise kv_cache_bytes"
        )
    return config.max_model_len or min(model.max_position, room)
