"""An experiment: one server, one or several rates, or the search of one; from settings to a result.

A run has a warm-up that does not count, the time that counts, and a while after it in which requests
go on to come, so that the last ones that count are served under load, too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvrelay.load.conductor import Outcome, conduct, processes_for
from kvrelay.load.config import BenchConfig
from kvrelay.load.measures import Slo, Window, client_of, measured, percentile
from kvrelay.load.records import Asking, Load, Progress
from kvrelay.load.results import Run, cdfs_of, row_of
from kvrelay.load.search import Found, RateSearch
from kvrelay.load.sessions import Arrival, Prompts, Session, Spelling, sessions
from kvrelay.wire.errors import KvrelayError

__all__ = ["Experiment", "Server", "ServerUnusable", "RunProgress", "ask_server", "usual_s"]

_DEADLINE = aiohttp.ClientTimeout(total=120.0, sock_connect=10.0)
_FEW, _MANY = 64, 320


class ServerUnusable(KvrelayError):
    """A server that cannot be reached, or refuses what it is asked before the measurement."""


class Server:
    """A server's model, its version, and how its tokenizer spells words."""

    def __init__(self, model: str, version: str, spelling: Spelling) -> None:
        self.model, self.version, self.spelling = model, version, spelling


async def ask_server(url: str, api_key: str, model: str, *, chat: bool) -> Server:
    """Ask a server for its model and version, and with `chat` how words become tokens.

    Raises ServerUnusable.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=_DEADLINE) as session:
            if not model:
                model = (await _json(session, "GET", f"{url}/v1/models"))["data"][0]["id"]
            version = await _version(session, url)
            spelling = await _spelling(session, url, model) if chat else Spelling()
    except (aiohttp.ClientError, TimeoutError, OSError) as why:
        raise ServerUnusable(f"{url} cannot be reached: {why or type(why).__name__}") from why
    except (KeyError, IndexError, TypeError, ValueError) as why:
        raise ServerUnusable(f"{url} does not answer as an OpenAI server does: {why!r}") from why
    return Server(model, version, spelling)


async def _json(
    session: aiohttp.ClientSession, method: str, url: str, said: dict[str, Any] | None = None
) -> Any:
    async with session.request(method, url, json=said) as answer:
        if answer.status != 200:
            raise ServerUnusable(f"{url} answers {answer.status}: {(await answer.text())[:300]}")
        return await answer.json(content_type=None)


async def _version(session: aiohttp.ClientSession, url: str) -> str:
    try:
        return str((await _json(session, "GET", f"{url}/version"))["version"])
    except (ServerUnusable, KeyError, TypeError, ValueError):
        return ""


async def _spelling(session: aiohttp.ClientSession, url: str, model: str) -> Spelling:
    prompts = Prompts("spelling", 1 << 15, Spelling())
    counts = []
    for words in (_FEW, _MANY):
        messages = [{"role": "user", "content": prompts.words(words)}]
        said = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = await _json(session, "POST", f"{url}/v1/chat/completions", said)
        counts.append(int(answer["usage"]["prompt_tokens"]))
    per_word = (counts[1] - counts[0]) / (_MANY - _FEW)
    if per_word <= 0:
        raise ServerUnusable(
            f"{url} says that {_FEW} words are {counts[0]} tokens and {_MANY} words {counts[1]}"
        )
    return Spelling(1 / per_word, max(0, round(counts[0] - per_word * _FEW)))


_SPARE_S, _LEAST_WARM_UP_S = 2.0, 5.0
_SOME, _USUAL = 1_000, 0.9
"""So many sessions tell how long sessions take; that share of them takes no longer."""
_FEWEST = 20
"""Fewer requests cannot say whether nine of ten meet their targets."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is; times and counts are None where they are unknown."""

    name: str
    total_s: float | None
    requests: int | None
    progress: Progress


def usual_s(asked: Sequence[Session], slo: Slo) -> tuple[float, float]:
    """Return how long an answer and a session take at their targets, at the 90th percentile."""
    each = [
        [slo.ttft_ms / 1e3 + slo.tpot_ms / 1e3 * turn.output for turn in session.turns]
        for session in asked
    ]
    thinking = [sum(turn.think_s for turn in session.turns) for session in asked]
    whole = [sum(answers) + think_s for answers, think_s in zip(each, thinking, strict=True)]
    return percentile([answer_s for answers in each for answer_s in answers], _USUAL), percentile(
        whole, _USUAL
    )


class Experiment:
    """Runs against one server; `told` hears how far they are."""

    def __init__(
        self, config: BenchConfig, told: Callable[[RunProgress], None] = lambda _: None
    ) -> None:
        self._config, self._told = config, told
        self.server: Server | None = None
        self.runs: list[Run] = []
        self.found: Found | None = None
        self._answer_s, self._warm_up_s, self._trace_requests = 0.0, 0.0, 0

    async def run(self) -> None:
        """Measure all rates, or search one. Raises ConfigError, ServerUnusable, KvrelayError."""
        await self.meet()
        if self._config.find_rate:
            await self._search()
            return
        for rate in self._config.rates or [0.0]:
            await self.probe(rate)

    async def meet(self) -> None:
        """Ask the server what it is. Raises ConfigError, ServerUnusable."""
        config = self._config
        # A file that is none is told now.
        asked = list(
            itertools.islice(
                sessions(config.work, config.arrival(1.0), "0"), None if config.trace else _SOME
            )
        )
        self._trace_requests = len(asked)
        self._answer_s, session_s = usual_s(asked, config.slo)
        default_s = 0.0 if config.requests else max(_LEAST_WARM_UP_S, session_s)
        self._warm_up_s = config.warm_up_s if config.warm_up_s >= 0 else default_s
        text = config.endpoint == "chat"
        servers = [
            await ask_server(url, config.api_key, config.model, chat=text)
            for url in config.base_urls
        ]
        models = {server.model for server in servers}
        if len(models) > 1:
            raise ServerUnusable(
                f"these servers serve {', '.join(sorted(models))}; name one with --model"
            )
        self.server = servers[0]

    async def _search(self) -> None:
        config = self._config
        search = RateSearch(
            config.rates[0] if config.rates else float(config.gpus),
            config.attainment,
            config.precision,
        )
        try:
            while (rate := search.next()) is not None:
                if why := await self._searched(search, rate):
                    why = f"at {rate:.3g} requests/s {why}"
                    if not self.runs:
                        raise KvrelayError(why)
                    search.stop(why)
        except asyncio.CancelledError:
            search.stop("the search was interrupted")
            raise
        finally:
            self.found = search.found()

    async def _searched(self, search: RateSearch, rate: float) -> str:
        config = self._config
        if (count := rate * config.duration_s) < _FEWEST:
            return (
                f"{count:.2g} requests come in {config.duration_s:g} s, too few; take a longer "
                f"--duration-s"
            )
        try:
            run = await self.probe(rate)
        except KvrelayError as why:
            if not self.runs:
                raise
            return str(why)
        client, attainment = run.measures.client, run.measures.attainment
        # Who is slow has seen no answer too early: what holds all the same does.
        if client.bottleneck and attainment < config.attainment:
            return f"the client was too slow: {client.bottleneck}"
        if run.short and config.turns > 1:
            return (
                f"only {run.offered:.3g} came: sessions take longer than the warm-up; take a "
                f"longer --warm-up-s"
            )
        search.tell(attainment)
        return ""

    async def probe(self, rate: float) -> Run:
        """Measure one rate; 0: no open loop. Raises KvrelayError."""
        config, server = self._config, self.server
        assert server is not None
        load, window, after_s = self._load(rate)
        asking = Asking(
            config.base_urls[0], config.api_key, server.model, config.endpoint == "chat", server.spelling,
            config.vocab_size, config.ignore_eos, config.usage_per_chunk, config.deadline_s, list(config.base_urls[1:]),
            config.headers,
        )  # fmt: skip
        name = (
            f"{rate:.4g} requests/s"
            if rate
            else f"{config.clients} clients"
            if config.clients
            else "the trace"
        )
        total_s = None if config.requests else load.sending_s
        count = config.requests * config.turns or None

        def told(progress: Progress) -> None:
            self._told(RunProgress(name, total_s, count, progress))

        processes = processes_for(config.processes, config.clients)
        outcome = await conduct(asking, load, processes, told)
        if not outcome.records:
            raise KvrelayError(f"at {name} no request was sent; take a longer --duration-s")
        run = self._run(rate, outcome, window, after_s)
        self.runs.append(run)
        return run

    def _load(self, rate: float) -> tuple[Load, Window, float]:
        config = self._config
        seed = f"{config.seed} {len(self.runs)}"
        drawn, slo, start_s = config.arrival(rate), config.slo, self._warm_up_s
        if config.requests:
            return (
                Load(config.work, drawn, seed, config.clients, config.requests, warm_up_s=start_s),
                Window(start_s, float("inf")),
                0.0,
            )
        window, after_s = Window(start_s, start_s + config.duration_s), self._answer_s
        if config.clients:
            after_s = 0.0
        elif config.trace and (ends := self._ends(drawn, seed, window)) is not None:
            window, after_s = ends, 0.0
        sending_s = window.end_s + after_s
        load = Load(
            config.work, drawn, seed, config.clients, 0, sending_s, window.end_s, config.deadline_s
        )
        if config.find_rate:
            # Who is not answered by then has missed its targets; a search does not wait to see by
            # how much.
            first_s, token_s = slo.ttft_ms / 1e3, slo.tpot_ms / 1e3
            load = msgspec.structs.replace(load, drain_s=_SPARE_S, first_s=first_s, token_s=token_s)
        return load, window, after_s

    def _ends(self, drawn: Arrival, seed: str, window: Window) -> Window | None:
        dues = [session.at for session in sessions(self._config.work, drawn, seed)]
        if (last := max(dues)) >= window.end_s:
            return None
        counting = sum(due >= window.start_s for due in dues)
        if counting < _FEWEST:
            raise KvrelayError(
                f"the {len(dues)} requests of the trace take {last:.3g} s, and {counting} come "
                f"after the warm-up of {window.start_s:.3g} s; take a lower --rate, a longer trace "
                "or a shorter --warm-up-s"
            )
        return _until(window, last)

    def _run(self, rate: float, outcome: Outcome, window: Window, after_s: float) -> Run:
        config, records = self._config, outcome.records
        if config.requests or (
            config.clients and len(records) == self._trace_requests and config.trace
        ):
            window = _until(
                window,
                max(max(each.due_s, each.last_s if config.requests else 0.0) for each in records),
            )
        judged = [record for record in records if window.start_s <= record.due_s < window.end_s]
        if not judged:
            raise KvrelayError(
                f"no request came after the warm-up of {window.start_s:.3g} s; ask for more, or "
                "longer, or take a shorter --warm-up-s"
            )
        client = client_of(judged, outcome.cpu_shares, outcome.lags_s, open_loop=not config.clients)
        return Run(
            rate,
            config.clients,
            window.start_s,
            window.length_s,
            measured(records, window, config.slo, config.gpus, client),
            cdfs_of(judged),
            [row_of(record, config.slo) for record in judged],
            after_s,
        )


def _until(window: Window, last_s: float) -> Window:
    return Window(window.start_s, max(last_s, window.start_s) + 1e-6)
