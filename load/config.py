"""The settings of `kvrelay bench`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from kvrelay.load.measures import Targets
from kvrelay.load.workloads import (
    FIRST_TOKEN,
    Agents,
    Arrival,
    ArrivalProcess,
    Lengths,
    Work,
    agents_of,
    lengths_of,
)
from kvrelay.wire.config_checks import Count, Some, SomeShare, base_url, check_fields, require

__all__ = ["BenchConfig"]

# Finite, too.
_Positive = Annotated[float, Meta(gt=0, lt=sys.float_info.max)]
_NotNegative = Annotated[float, Meta(ge=0, lt=sys.float_info.max)]


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """A measurement of a server: what is asked, how fast, and the targets."""

    url: str = "http://127.0.0.1:8000"
    """Address of the server; several, separated by commas, are used in turn."""
    api_key: str = field(default="", repr=False)
    """API key of the server."""
    model: str = ""
    """Model to ask; empty takes the server's first."""
    endpoint: Literal["completions", "chat"] = "completions"
    """completions sends token ids of exact length; chat sends messages, which --agents needs."""
    lengths: str = "chat"
    """Tokens of prompts and answers: chat (512:256), code (2048:64), summarise (8192:256),
    long-context (65536:256), reasoning (512:4096), or IN:OUT.
    """
    spread: _NotNegative = 0.0
    """Standard deviation of log-normal lengths, as a multiple of the mean; 0: all equal."""
    agents: str = ""
    """Sessions of agents, instead of lengths: fleet (tools, sub-agents, four system prompts) or
    llm-d (long system prompts), with changes, as in fleet,turns=4:20,gap_s=1:60.
    """
    trace: str = ""
    """A file in Mooncake's trace format, also .gz, instead of lengths."""
    rate: str = ""
    """Requests a second (open loop); several, separated by commas, run one by one. The first rate
    of --find-rate.
    """
    arrivals: ArrivalProcess = "poisson"
    """poisson, bursty, constant, or trace: the times of --trace, stretched to --rate if given."""
    variation: _Positive = 2.0
    """Standard deviation of bursty arrivals' gaps, as a multiple of the mean; 1 is poisson."""
    concurrency: Count = 0
    """Clients, each asking again once answered (closed loop); 1 with --requests alone."""
    requests: Count = 0
    """Sessions to measure after the warm-up, instead of --duration-s."""
    duration_s: _Positive = 60.0
    """Seconds to measure each rate."""
    warm_up_s: float = -1.0
    """Seconds before the measurement. Below 0: as long as a session may take within its targets, at
    least 5; 0 with --requests.
    """
    find_rate: bool = False
    """Find the highest rate at which --attainment of the requests meet their targets; with
    --agents, the most concurrent sessions.
    """
    attainment: SomeShare = 0.9
    """Share of requests that must meet their targets."""
    precision: _Positive = 0.05
    """Largest gap between the rate found and one that is too high, as a share."""
    ttft_ms: _NotNegative = 0.0
    """Target for the first token; 0 takes that of --lengths (chat 200, code 125), or 1000."""
    tpot_ms: _NotNegative = 0.0
    """Target for the mean time per later token; 0 takes that of --lengths (chat 15, code 20), or
    50.
    """
    tell_targets: bool = False
    """Send both targets with each request (x-slo-ttft-ms, x-slo-tpot-ms) for kvrelay's router."""
    gpus: Some = 1
    """All GPUs of the server: goodput is divided by them."""
    output: str = "bench.json"
    """File for the result, as JSON."""
    deadline_s: _Positive = 600.0
    """A request that takes longer has failed."""
    ignore_eos: bool = True
    """Ask for answers of full length. Not every server supports this."""
    vocab_size: int = 32_000
    """Prompts use token ids below this."""
    seed: int = 0
    """Seed of prompts and arrivals; 0 takes the clock, so no server has the prompts cached."""

    def __post_init__(self) -> None:
        _ = self.base_urls
        check_fields(self)
        require(
            math.isfinite(self.warm_up_s),
            f"warm_up_s must be a number of seconds, got {self.warm_up_s:g}",
        )
        require(
            self.vocab_size > FIRST_TOKEN,
            f"vocab_size must be above {FIRST_TOKEN}, got {self.vocab_size}",
        )
        _ = self.fixed, self.rates, self.fleet
        self._check_together()

    def _check_together(self) -> None:
        require(
            not (self.agents and self.trace),
            "agents make their own requests; leave trace out",
        )
        require(
            not (self.concurrency and self.rate),
            "rate and concurrency contradict each other: open or closed loop",
        )
        require(
            not (self.concurrency and self.find_rate) or bool(self.agents),
            "find_rate searches for a rate; leave concurrency out",
        )
        require(
            not (self.agents and self.find_rate and self.rate),
            "for agents, find_rate searches for concurrent sessions; give --concurrency, not --rate",
        )
        require(
            not (self.requests and self.find_rate),
            "each probe of find_rate takes --duration-s; leave requests out",
        )
        require(
            len(self.rates) < 2 or not self.find_rate,
            "find_rate starts from one rate; leave the others out",
        )
        require(self.arrivals != "trace" or bool(self.trace), "arrivals trace needs --trace FILE")
        require(
            not self.agents or self.endpoint == "chat",
            "agents need --endpoint chat: a turn holds the text of the answers",
        )
        require(
            bool(self.clients) or self._open_loop,
            "how fast? give --rate, --concurrency or --find-rate",
        )

    @property
    def _open_loop(self) -> bool:
        return bool(self.rates) or self.find_rate or self.arrivals == "trace"

    @property
    def clients(self) -> int:
        """Clients of a closed loop; 0: an open loop."""
        return self.concurrency or int(self.requests > 0 and not self._open_loop)

    @property
    def unit(self) -> str:
        return "sessions" if self.agents else "requests/s"

    @property
    def base_urls(self) -> list[str]:
        """The address of each server. Raises ConfigError."""
        return [base_url(each) for each in self.url.split(",")]

    @property
    def fixed(self) -> Lengths:
        """The lengths by name, or those of IN:OUT. Raises ConfigError."""
        return lengths_of(self.lengths)

    @property
    def fleet(self) -> Agents | None:
        """The agents, if any are asked for. Raises ConfigError."""
        return agents_of(self.agents) if self.agents else None

    @property
    def rates(self) -> list[float]:
        """Requests a second. Raises ConfigError."""
        try:
            rates = [float(each) for each in self.rate.split(",")] if self.rate else []
        except ValueError:
            rates = [math.nan]
        require(
            all(0 < each < math.inf for each in rates),
            f"rate must be a positive number, or several with commas between them, got "
            f"{self.rate!r}",
        )
        return rates

    @property
    def targets(self) -> Targets:
        default = Lengths(0, 0) if self.trace or self.agents else self.fixed
        return Targets(self.ttft_ms or default.ttft_ms, self.tpot_ms or default.tpot_ms)

    @property
    def headers(self) -> dict[str, str]:
        if not self.tell_targets:
            return {}
        told = self.targets
        return {"x-slo-ttft-ms": f"{told.ttft_ms:g}", "x-slo-tpot-ms": f"{told.tpot_ms:g}"}

    @property
    def work(self) -> Work:
        lengths = self.fixed
        return Work(
            lengths.prompt,
            lengths.output,
            self.spread,
            self.trace,
            self.fleet,
        )

    def arrival(self, rate: float) -> Arrival:
        return Arrival(self.arrivals, rate, self.variation)
