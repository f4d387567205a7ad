"""Prometheus metrics of a node: its engine's (node/engine_metrics.py), its processes', and those of
each leg here.

A request that is handed over is a leg on two nodes, and each counts its own part: sums over the
nodes of one role are sums over requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrelay.node.engine_metrics import EngineMetrics
from kvrelay.node.role_metrics import ByRole
from kvrelay.openai_api.fast_metrics import FastHistogram
from kvrelay.wire.config import NodeConfig, Role
from kvrelay.wire.engine_messages import EngineReady, EngineStats, Timing
from kvrelay.wire.outputs import Finish

__all__ = ["NodeMetrics"]

_TTFT_S = (
    *(
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        7.5,
        10.0,
        20.0,
        40.0,
        80.0,
    ),
    *(160.0, 640.0, 2560.0),
)
# vLLM's begin at 10 ms; a decode step of an H200 takes less.
_TOKEN_S = (
    *(
        0.001,
        0.0025,
        0.005,
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        7.5,
        10.0,
    ),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(
        0.1,
        0.3,
        0.5,
        0.8,
        1.0,
        1.5,
        2.0,
        2.5,
        5.0,
        10.0,
        15.0,
        20.0,
        30.0,
        40.0,
        50.0,
        60.0,
        120.0,
        240.0,
        480.0,
    ),
    *(960.0, 1920.0, 7680.0),
)
# From 100 us on, because a stage may be as short.
_STAGE_S = (
    *(
        0.0001,
        0.00025,
        0.0005,
        0.001,
        0.0025,
        0.005,
        0.01,
        0.02,
        0.04,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        7.5,
    ),
    *(10.0, 30.0, 60.0, 120.0),
)
_BYTES = tuple(float(2**power) for power in range(11, 36, 2))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class NodeMetrics:
    """One registry per node process."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        config: NodeConfig,
        info: EngineReady,
        model_name: str,
        engine_pid: Callable[[], int] = lambda: -1,
    ) -> None:
        """`model_name`: that clients use. `engine_pid`: the engine process; -1 while there is none."""
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "role": str(config.role)}
        self._names, self._values = list(self._labels), list(self._labels.values())
        self._registry.register(EngineMetrics(stats, self._labels, config, info))
        ProcessCollector(registry=self._registry)
        ProcessCollector(namespace="kvrelay_engine", pid=engine_pid, registry=self._registry)
        self._kv_bytes_per_token = info.kv_bytes_per_token
        self._make_latencies()
        self._make_stages()
        self._make_sizes(_one_two_five(info.max_model_len))
        self._success = self._counter(
            "vllm:request_success", "Requests by how they ended", "finished_reason"
        )
        for finish in Finish:
            self._success.labels(*self._values, finish.value)
        self._recomputed = self._counter(
            "kvrelay_recomputed_prompts",
            "Prompts computed on this decode node after a failed fetch, from the first missing "
            "block on",
        )
        self._not_loaded = self._counter(
            "kvrelay_requests_not_loaded",
            "Requests ended with an error after a failed fetch (kv_load_failure_policy fail)",
        )
        self._wanted = self._counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens whose KV another node was to give"
        )
        self._given = self._counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens whose KV another node gave"
        )
        self._flips = self._counter(
            "kvrelay_node_flips", "Changes of the node's role, by how they ended", "outcome"
        )
        for how in ("done", "cancelled"):
            self._flips.labels(*self._values, how)
        self._replays = self._counter(
            "kvrelay_kv_event_replays",
            "Replays of KV events that were asked for, by whether they could be",
            "outcome",
        )
        for outcome in ("ok", "malformed"):
            self._replays.labels(*self._values, outcome)
        self._by_role = ByRole(self._registry, model_name, config.role)

    def _counter(self, name: str, text: str, label: str = "") -> Counter:
        counter = Counter(
            name, text, [*self._names, *([label] if label else [])], registry=self._registry
        )
        if not label:
            counter.labels(*self._values)
        return counter

    def _spread(self, name: str, text: str, bounds: tuple[float, ...]) -> FastHistogram:
        return FastHistogram(name, text, bounds, self._registry, fixed=self._labels)

    def _make_latencies(self) -> None:
        spread = self._spread
        self._ttft = spread(
            "vllm:time_to_first_token_seconds", "From arrival here to the first token", _TTFT_S
        )
        self._inter_token = spread(
            "vllm:inter_token_latency_seconds", "Between tokens that follow each other", _TOKEN_S
        )
        older = "vllm:time_per_output_token_seconds"
        self._registry.register(
            _Renamed(self._inter_token, older, "vllm:inter_token_latency_seconds by its older name")
        )
        self._tpot = spread(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first, of a request",
            _TOKEN_S,
        )
        self._e2e = spread(
            "vllm:e2e_request_latency_seconds", "From arrival here to the end", _REQUEST_S
        )
        self._inference = spread(
            "vllm:request_inference_time_seconds",
            "Computing, from the first step to the last",
            _REQUEST_S,
        )

    def _make_stages(self) -> None:
        def stage(name: str, text: str) -> FastHistogram:
            return self._spread(name, text, _STAGE_S)

        self._queue = stage("vllm:request_queue_time_seconds", "Waiting for a seat or for blocks")
        self._prefill = stage("vllm:request_prefill_time_seconds", "Computing the prompt")
        self._decode = stage("vllm:request_decode_time_seconds", "From the first to the last token")
        self._transfer = stage(
            "kvrelay_transfer_seconds", "From a request's first wait for its KV to the last byte"
        )
        self._registry.register(
            _Renamed(
                self._transfer,
                "vllm:nixl_xfer_time_seconds",
                "kvrelay_transfer_seconds by vLLM's name",
            )
        )
        self._exposed = stage(
            "kvrelay_transfer_exposed_seconds",
            "The part of kvrelay_transfer_seconds after the prompt was computed",
        )
        self._decode_queue = stage(
            "kvrelay_decode_queue_seconds",
            "With KV from elsewhere: waiting for a seat and blocks, and for a step",
        )
        self._first_step = stage(
            "kvrelay_first_step_seconds", "The first decode step, from its launch to its token"
        )

    def _make_sizes(self, tokens: tuple[float, ...]) -> None:
        spread = self._spread
        self._prompt_tokens = spread(
            "vllm:request_prompt_tokens", "Tokens of a request's prompt", tokens
        )
        self._output_tokens = spread(
            "vllm:request_generation_tokens", "Tokens that a request generated here", tokens
        )
        self._max_tokens = spread(
            "vllm:request_max_num_generation_tokens",
            "Most tokens that a request may generate here",
            tokens,
        )
        self._registry.register(
            _Renamed(
                self._max_tokens,
                "vllm:request_params_max_tokens",
                "vllm:request_max_num_generation_tokens by its other name",
            )
        )
        self._choices = spread("vllm:request_params_n", "Choices of a request's answer", _CHOICES)
        self._bytes = spread(
            "vllm:nixl_bytes_transferred", "KV bytes of a fetch, over any connector", _BYTES
        )

    def replay_asked(self, outcome: str) -> None:
        """Somebody has asked for KV events again: ok or malformed."""
        self._replays.labels(*self._values, outcome).inc()

    def flip_ended(self, how: str) -> None:
        """A change of the role is done, or was cancelled."""
        self._flips.labels(*self._values, how).inc()

    def flipped(self, role: Role) -> None:
        """What is counted from now on is of this role."""
        self._by_role.turn(role)

    def first_token(self, seconds: float) -> None:
        """A request's first token left the engine, so long after its arrival."""
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """More tokens of a request, so long after those before."""
        self._inter_token.observe(seconds)

    def began(self, prompt_tokens: int, max_tokens: int, choices: int, *, fetches: bool) -> None:
        """A request was submitted. `fetches`: another node is to give the KV of its prompt."""
        self._prompt_tokens.observe(prompt_tokens)
        self._max_tokens.observe(max_tokens)
        self._choices.observe(choices)
        if fetches:
            self._wanted.labels(*self._values).inc(prompt_tokens)

    def ended(
        self,
        finish: Finish,
        total_s: float,
        tokens: int,
        timing: Timing | None,
        *,
        not_fetched: bool,
    ) -> None:
        """A request ended here, `tokens` having been generated here."""
        self._success.labels(*self._values, finish.value).inc()
        self._e2e.observe(total_s)
        self._output_tokens.observe(tokens)
        if not_fetched:
            counter = self._not_loaded if finish is Finish.ERROR else self._recomputed
            counter.labels(*self._values).inc()
        if timing is not None:
            self._spent(timing, tokens)

    def _spent(self, timing: Timing, tokens: int) -> None:
        self._queue.observe(timing.queue_s)
        self._prefill.observe(timing.prefill_s)
        self._decode.observe(timing.decode_s)
        self._inference.observe(timing.prefill_s + timing.decode_s)
        if timing.transfer_bytes:
            self._transfer.observe(timing.transfer_s)
            self._exposed.observe(timing.exposed_s)
            self._bytes.observe(timing.transfer_bytes)
            self._given.labels(*self._values).inc(
                timing.transfer_bytes // max(1, self._kv_bytes_per_token)
            )
        if timing.transfer_s:
            self._decode_queue.observe(timing.decode_queue_s)
        if timing.first_step_s:
            self._first_step.observe(timing.first_step_s)
        if tokens > 1:
            self._tpot.observe(timing.decode_s / (tokens - 1))

    @property
    def registry(self) -> CollectorRegistry:
        """All of them."""
        return self._registry

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._by_role)


class _Renamed(Collector):
    """A metric under a second name, because what reads it knows that one."""

    def __init__(self, of: Collector, name: str, about: str) -> None:
        self._of, self._name, self._about = of, name, about

    def collect(self) -> Iterator[Metric]:
        """For one scrape."""
        for family in self._of.collect():
            renamed = Metric(self._name, self._about, family.type)
            for sample in family.samples:
                renamed.add_sample(
                    sample.name.replace(family.name, self._name, 1), sample.labels, sample.value
                )
            yield renamed


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10 and so on, up to the largest number that is expected."""
    bounds, ten = [1.0], 1
    while bounds[-1] < largest:
        bounds += [float(ten * 2), float(ten * 5), float(ten * 10)]
        ten *= 10
    return tuple(bound for bound in bounds if bound <= largest) or (1.0,)
