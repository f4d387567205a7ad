"""The engine of one node: model, KV pool, scheduler and sampler joined into one step.

KV may come from other nodes (`fetch`) or be kept for them (`hold`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from kvrelay.paged_engine.adapters import ABOUT_ADAPTERS, Adapters, read_given
from kvrelay.paged_engine.before_loading import checked_model, choose_device
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.decoder import split_fused
from kvrelay.paged_engine.guide import Guide
from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_files import read_tensors, weights_digest
from kvrelay.paged_engine.quantization import dequantized
from kvrelay.paged_engine.ranks import Alone, Ranks, TorchRanks
from kvrelay.paged_engine.request import Chunk, Fetch, Request, StepPlan
from kvrelay.paged_engine.runner import CpuRunner, CpuStepDone
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.paged_engine.sharding import shard_config, shard_weights
from kvrelay.paged_engine.speculation import Speculation
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.outputs import Load
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.step_costs import Pace, StepCosts
from kvrelay.wire.versions import RELEASE

if TYPE_CHECKING:
    from kvrelay.paged_engine.gpu_runner import GpuRunner, GpuStepInFlight
    from kvrelay.paged_engine.grammar import TimedMatcher

__all__ = ["AdapterNotLoaded", "Counters", "Engine", "Handover", "broadcast_aside", "run_follower"]

Runner: TypeAlias = "CpuRunner | GpuRunner"
# A longer wait for tokens shows when their step ended.
_WAITED_S = 2e-4
_PACE_EVERY = 4  # steps: summing up a step of 256 requests takes 60 us
# A longer step is waited for in one piece.
_PATIENCE_S = 0.5
# Begins a message that is not about a step; no msgpack begins so.
_ASIDE = b"\xc1"
assert ABOUT_ADAPTERS.startswith(_ASIDE)

# Settings that must be equal on all ranks, beside the model.
_EQUAL_SETTINGS = (
    "load_format",
    "dtype",
    "block_size",
    "max_model_len",
    "kv_cache_dtype",
    "quantization",
    "max_num_batched_tokens",
    "max_num_seqs",
    "tensor_parallel_size",
    "enable_lora",
    "lora_modules",
    "max_loras",
    "max_lora_rank",
    "allow_runtime_lora",
    "speculative_config",
)


@dataclass(slots=True)
class Counters:
    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0


class AdapterNotLoaded(LookupError):
    """A request's adapter has no slot."""


class Handover(Protocol):
    """A mover of KV between nodes; each method returns at once."""

    def fetch(self, fetch: Fetch) -> None:
        """Read remote blocks into local ones, to which nobody else writes."""

    def offer(self, request: Request) -> None:
        """Announce a request that holds its KV for a reader; no block can be read yet."""

    def grow(self, request: Request, tokens: int) -> None:
        """Announce that KV of an offered request's first `tokens` tokens is written."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    launched: CpuStepDone | GpuStepInFlight
    chunks: list[Chunk]
    at: float


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.device = choose_device(config.device)
        self.model: ModelConfig = checked_model(config, self.device.type)
        self._runner, self.adapters = _open_runner(
            config, self.model, self.device, ranks or Alone()
        )
        self.pool, self.max_model_len = self._runner.pool, self._runner.max_model_len
        self.rope_variant = self._runner.rope_variant
        self.max_num_batched_tokens = self._runner.max_num_batched_tokens
        self.max_num_seqs, self.shapes = self._runner.max_num_seqs, self._runner.shapes
        self.runs_ahead = self._runner.runs_ahead
        self._config, self._weights = config, weights_digest(config)
        self.costs: StepCosts | None = None
        self._pace = Pace()
        self.reset()
        self._in_flight: _InFlight | None = None
        self.idles = False
        """A step runs, and step() had nothing to launch behind it."""
        self._idle_since = 0.0
        self._tokens_at = 0.0  # when the host had the newest step's tokens

    def reset(self) -> None:
        asked = self._config.speculative_config
        self.scheduler = Scheduler(
            BlockPool(self.pool.num_blocks),
            block_size=self.pool.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            eos_token_ids=self.model.eos_token_ids,
            prefix_cache=self._config.enable_prefix_caching,
            speculation=None
            if asked is None
            else Speculation(
                asked.num_speculative_tokens,
                asked.prompt_lookup_max,
                asked.prompt_lookup_min,
                self._runner.can_speculate,
            ),
        )
        self.counters = Counters()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def load(self, now: float) -> Load:
        step = self._in_flight
        if step is None:
            return self.scheduler.load(now)
        return self.scheduler.load(now, step.chunks, now - max(step.at, self._tokens_at))

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def check(self, submit: Submit) -> None:
        """Raise ValueError for a request that would break the engine."""
        tokens = [*submit.prompt_token_ids, *submit.generated]
        vocab_size = self.model.vocab_size
        if (
            not 0 < len(tokens) <= self.max_model_len
            or min(tokens) < 0
            or max(tokens) >= vocab_size
        ):
            raise ValueError(
                f"{len(tokens)} tokens do not fit the context or the vocabulary of {vocab_size}"
            )

    def guide(self, params: SamplingParams, matcher: TimedMatcher | None = None) -> Guide | None:
        """Return None if the request rules no token out."""
        if not params.guided:
            return None
        model = self.model
        return Guide(
            params, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids, matcher=matcher
        )

    def close(self) -> None:
        self._runner.close()

    def request(self, submit: Submit, now: float) -> Request:
        adapter = None
        if submit.adapter:
            adapter = None if self.adapters is None else self.adapters.named(submit.adapter)
            if adapter is None:
                raise AdapterNotLoaded(f"adapter {submit.adapter!r} is not loaded here any more")
        return Request.from_submit(submit, now, adapter, self._weights)

    @property
    def is_done(self) -> bool:
        return self._in_flight is None or self._in_flight.launched.is_done

    def step(self, handover: Handover | None = None, *, wait: bool = True) -> list[Request]:
        """Schedule and launch a step, then take the previous one's tokens; return updated requests.

        On a GPU the host stays one step ahead, except where proposals depend on this step's tokens.
        Without `wait` it returns early, with `idles` set, if there is nothing to launch and tokens
        are still to come: whoever arrives meanwhile is launched behind.
        """
        began = self._clock()
        since = self._idle_since if self.idles else began
        updated: list[Request] = []
        if self._in_flight is not None and self.scheduler.needs_tokens:
            step, self._in_flight = self._in_flight, None
            updated = self._postprocess(step, handover)
        plan = self.scheduler.schedule(began)
        if handover is not None:
            for request in plan.offers:  # with a load that counts the running step
                handover.offer(request)
        previous, self._in_flight = self._in_flight, None
        self.idles = not (wait or plan.chunks or plan.fetches) and self._is_pending(previous, began)
        if self.idles:
            self._in_flight, self._idle_since = previous, since
            return []
        if previous is None:
            self._fetch(plan, handover)
        self._run(plan.chunks, began)
        if previous is not None:
            launched = self._clock()
            updated = self._postprocess(previous, handover)
            # Else nobody knows when the previous step ended.
            if self._tokens_at - launched > _WAITED_S:
                for chunk in plan.chunks:
                    chunk.request.mark_started(began, self._tokens_at)
        if self._in_flight is not None:
            self._in_flight.launched.sample()
        if previous is not None:
            # Only now may transfers write to blocks of the previous step.
            self._fetch(plan, handover)
        if self._in_flight is not None and not self._runner.runs_ahead:
            done, self._in_flight = self._in_flight, None
            updated += self._postprocess(done, handover)
        self.counters.step_s += self._clock() - since
        return updated

    def _is_pending(self, step: _InFlight | None, now: float) -> bool:
        return step is not None and not step.launched.is_done and now - step.at < _PATIENCE_S

    def _fetch(self, plan: StepPlan, handover: Handover | None) -> None:
        for fetch in plan.fetches:
            assert handover is not None, "a request with a fetch needs a connector"
            handover.fetch(fetch)

    def _run(self, chunks: list[Chunk], now: float) -> None:
        if not chunks:
            return
        self._in_flight = _InFlight(self._runner.launch(chunks), chunks, now)
        for chunk in chunks:
            self._count(chunk)
            chunk.request.mark_launched(chunk.start, now)
            self.scheduler.mark_launched(chunk)

    def _postprocess(self, step: _InFlight, handover: Handover | None) -> list[Request]:
        tokens, logprobs = step.launched.wait()
        since, now = max(step.at, self._tokens_at), self._clock()
        self._tokens_at = now
        self.counters.steps += 1
        if self.costs is not None and self.counters.steps % _PACE_EVERY == 0:
            self._keep_pace(step, (now - since) * 1e3, self.costs)
        if handover is not None:
            for chunk in step.chunks:
                if chunk.request.offered and chunk.request.finish is None:
                    handover.grow(chunk.request, chunk.start + chunk.count)
        if any(chunk.scored for chunk in step.chunks):
            for request, entries in step.launched.scores():
                request.prompt_logprobs += entries
        updated = []
        rows = zip(step.launched.requests, tokens, logprobs, strict=True)
        for request, request_rows in itertools.groupby(rows, key=lambda row: row[0]):
            _, sampled, row_logprobs = zip(*request_rows, strict=True)
            if request.finish is None:
                updated.append(request)
            count = self.scheduler.append_sampled(request, sampled, now)
            request.new_logprobs += [entry for entry in row_logprobs[:count] if entry is not None]
            self.counters.generated_tokens += count
        return updated

    def _keep_pace(self, step: _InFlight, took_ms: float, costs: StepCosts) -> None:
        self._pace.saw(took_ms, costs.step_ms((chunk.count, chunk.start) for chunk in step.chunks))
        pace = self._pace.factor
        self.scheduler.budget = replace(self.scheduler.budget, costs=costs.scaled(pace), pace=pace)

    def _count(self, chunk: Chunk) -> None:
        request = chunk.request
        if not request.num_counted:
            request.num_counted = request.cached_tokens or 0
            self.counters.cached_prompt_tokens += request.num_counted
        begin = max(chunk.start, request.num_counted)
        end = min(chunk.start + chunk.count, request.prompt_tokens)
        if end > begin:
            self.counters.prompt_tokens += end - begin
            request.num_counted = end


def broadcast_aside(ranks: Ranks, message: bytes) -> None:
    ranks.broadcast(_ASIDE + message)


def run_follower(
    config: EngineConfig,
    ranks: TorchRanks,
    device: torch.device,
    on_aside: Callable[[KVPool, bytes], None],
) -> None:
    """Compute what rank 0 computes until it ends; `on_aside` takes each aside. Raises PeerLost."""
    runner, adapters = _open_runner(config, checked_model(config, device.type), device, ranks)
    while message := ranks.receive():
        if message.startswith(ABOUT_ADAPTERS):
            assert adapters is not None
            adapters.follow(message)
        elif message.startswith(_ASIDE):
            on_aside(runner.pool, message[len(_ASIDE) :])
        else:
            runner.follow(message)
    runner.close()


def _open_runner(
    config: EngineConfig, model: ModelConfig, device: torch.device, ranks: Ranks
) -> tuple[Runner, Adapters | None]:
    alike = {name: str(getattr(config, name)) for name in _EQUAL_SETTINGS}
    ranks.require_equal(
        {"release of kvrelay": RELEASE, "model": str(replace(model, name="")), **alike}
    )
    given = read_given(config, model, ranks)
    runner = _loaded_runner(config, model, device, ranks)
    store = runner.adapters
    return runner, None if store is None else Adapters(config, model, ranks, store, given)


def _loaded_runner(
    config: EngineConfig, model: ModelConfig, device: torch.device, ranks: Ranks
) -> Runner:
    # On the host if ranks share tensors: a view of a share keeps its whole tensor.
    plain = ranks.size == 1 and model.quantization is None
    tensors = read_tensors(
        config.model, model, config.load_format, device if plain else torch.device("cpu")
    )
    if device.type == "cuda" and (
        config.batch_invariant or torch.cuda.get_device_capability(device) < (8, 9)
    ):
        # fp8 products depend on the batch's size; older GPUs have none.
        tensors, model = dequantized(tensors, model, getattr(torch, model.dtype))
    stored = split_fused(model, tensors)
    weights = shard_weights(stored, model, ranks.rank, ranks.size)
    model = shard_config(model, ranks.size)
    if device.type == "cpu":
        return CpuRunner(config, model, weights, ranks)
    from kvrelay.paged_engine.gpu_runner import GpuRunner

    return GpuRunner(config, model, weights, device, ranks)
