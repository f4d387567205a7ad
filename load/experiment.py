"""An experiment: one server, one or several rates, or the search of one; from settings to a result.

Owns the windows of a run: a warm-up that does not count, the time that counts, and a while after it in which requests
go on to come, so that the last ones that count are served under load, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from load.conductor import Outcome, conduct, processes_for
from load.config import BenchConfig
from load.endpoint import Server, ServerUnusable, ask_server
from load.measures import Window, client_of, measured
from load.records import Asking, Load, Progress
from load.results import Run, cdfs_of, row_of
from load.search import Found, RateSearch
from load.sessions import sessions
from wire.errors import KvrelayError

__all__ = ["Experiment", "Told"]

_MOST_AFTER_S, _SPARE_S = 10.0, 2.0


@dataclass(frozen=True, slots=True)
class Told:
    """How far a run is: what it is called, how long it takes if that is known, and what was sent and answered."""

    name: str
    total_s: float | None
    requests: int | None
    progress: Progress


class Experiment:
    """Of one server. `told` hears how far it is."""

    def __init__(self, config: BenchConfig, told: Callable[[Told], None] = lambda _: None) -> None:
        self._config, self._told = config, told
        self.server: Server | None = None
        self.runs: list[Run] = []
        self.found: Found | None = None

    async def run(self) -> None:
        """All of it. Raises ConfigError, ServerUnusable, KvrelayError."""
        await self.meet()
        if self._config.find_rate:
            await self._search()
            return
        for rate in self._config.rates or [0.0]:
            await self.probe(rate)

    async def meet(self) -> None:
        """Ask the server what it is. Raises ConfigError, ServerUnusable."""
        config = self._config
        next(sessions(config.work, config.arrival(1.0), "0"), None)  # a file that is none is told now
        text = config.endpoint == "chat"
        servers = [await ask_server(url, config.api_key, config.model, chat=text) for url in config.base_urls]
        models = {server.model for server in servers}
        if len(models) > 1:
            raise ServerUnusable(f"these servers serve {', '.join(sorted(models))}; name one with --model")
        self.server = servers[0]

    async def _search(self) -> None:
        config = self._config
        search = RateSearch(
            config.rates[0] if config.rates else float(config.gpus), config.attainment, config.precision
        )
        while (rate := search.next()) is not None:
            run = await self.probe(rate)
            search.tell(run.measures.attainment)
            if run.measures.client.bottleneck and run.measures.attainment < config.attainment:
                search.stop(f"at {rate:g} requests/s the client was too slow: {run.measures.client.bottleneck}")
        self.found = search.found()

    async def probe(self, rate: float) -> Run:
        """One rate, by those who have met the server; 0: no open loop. Raises KvrelayError."""
        config, server = self._config, self.server
        assert server is not None
        load, window = self._load(rate)
        asking = Asking(
            config.base_urls[0], config.api_key, server.model, config.endpoint == "chat", server.spelling,
            config.vocab_size, config.ignore_eos, config.usage_per_chunk, config.deadline_s, list(config.base_urls[1:]),
            config.headers,
        )  # fmt: skip
        name = (
            f"{rate:.4g} requests/s" if rate else f"{config.concurrency} clients" if config.concurrency else "the trace"
        )
        total_s = None if config.requests else load.sending_s
        count = config.requests * config.turns or None

        def told(progress: Progress) -> None:
            self._told(Told(name, total_s, count, progress))

        processes = processes_for(config.processes, config.concurrency)
        outcome = await conduct(asking, load, processes, told)
        if not outcome.records:
            raise KvrelayError(f"at {name} no request was sent; take a longer --duration-s")
        run = self._run(rate, outcome, window)
        self.runs.append(run)
        return run

    def _load(self, rate: float) -> tuple[Load, Window]:
        """Each run has prompts of its own: no cache knows them from the one before."""
        config = self._config
        seed = f"{config.seed} {len(self.runs)}"
        drawn, slo = config.arrival(rate), config.slo
        longest_s = (slo.ttft_ms + slo.tpot_ms * config.work.output) / 1e3
        if config.requests:
            return (
                Load(config.work, drawn, seed, config.concurrency, config.requests),
                Window(config.warm_up_s, float("inf")),
            )
        window = Window(config.warm_up_s, config.warm_up_s + config.duration_s)
        after_s = 0.0 if config.concurrency else min(_MOST_AFTER_S, longest_s)
        # Who is not answered by then has missed its targets; a search does not wait to see by how much.
        drain_s = longest_s + _SPARE_S if config.find_rate else config.deadline_s
        sending_s = window.end_s + after_s
        return Load(config.work, drawn, seed, config.concurrency, 0, sending_s, window.end_s, drain_s), window

    def _run(self, rate: float, outcome: Outcome, window: Window) -> Run:
        config, records = self._config, outcome.records
        last = max(max(record.due_s, record.last_s if config.requests else 0.0) for record in records)
        if config.requests or (config.arrivals == "trace" and last < window.end_s):
            window = Window(window.start_s, max(last, window.start_s) + 1e-6)  # all of them came before its end
        judged = [record for record in records if window.start_s <= record.due_s < window.end_s]
        if not judged:
            raise KvrelayError(f"no request came after the warm-up of {config.warm_up_s:g} s; ask for more, or longer")
        client = client_of(judged, outcome.cpu_shares, outcome.lags_s, open_loop=not config.concurrency)
        return Run(
            rate,
            config.concurrency,
            window.start_s,
            window.length_s,
            measured(records, window, config.slo, config.gpus, client),
            cdfs_of(judged),
            [row_of(record, config.slo) for record in judged],
        )
