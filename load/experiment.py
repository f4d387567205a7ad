"""An experiment: one server at one or several rates, or the search of a rate.

A run has a warm-up, the time that counts, and a while in which requests still come, to keep the
last ones under load.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp

from kvrelay.load.config import BenchConfig
from kvrelay.load.measures import Targets, Window, client_health, measures_of, percentile
from kvrelay.load.results import Run, row_of
from kvrelay.load.search import RateSearch, SearchResult
from kvrelay.load.sender import Load, Outcome, Progress, Server, send_load
from kvrelay.load.workloads import Prompts, Session, Spelling, Turn, sessions
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.json_object import JsonObject

__all__ = ["Experiment", "OnProgress", "inspect_server"]

_TIMEOUT = aiohttp.ClientTimeout(total=120.0, sock_connect=10.0)
_FEW_WORDS, _MANY_WORDS = 64, 320
_SEARCH_DRAIN_S, _MIN_WARM_UP_S = 2.0, 5.0
_SAMPLE_SESSIONS, _USUAL_SHARE = 1_000, 0.9
"""How many sessions tell how long sessions take, and the share of them that takes no longer."""
_MIN_REQUESTS = 20
"""Fewer requests cannot say whether nine of ten meet their targets."""


async def inspect_server(url: str, api_key: str, model: str, *, chat: bool) -> Server:
    """Ask a server for its model and version, and with `chat` how words become tokens.

    Raises KvrelayError.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=_TIMEOUT) as session:
            if not model:
                model = (await _json(session, "GET", f"{url}/v1/models"))["data"][0]["id"]
            version = await _version(session, url)
            spelling = await _spelling(session, url, model) if chat else Spelling()
    except (aiohttp.ClientError, TimeoutError, OSError) as why:
        raise KvrelayError(f"{url} cannot be reached: {why or type(why).__name__}") from why
    except (KeyError, IndexError, TypeError, ValueError) as why:
        raise KvrelayError(f"{url} does not answer as an OpenAI server does: {why!r}") from why
    return Server(model, version, spelling)


async def _json(
    session: aiohttp.ClientSession, method: str, url: str, body: JsonObject | None = None
) -> Any:
    async with session.request(method, url, json=body) as answer:
        if answer.status != 200:
            raise KvrelayError(f"{url} answers {answer.status}: {(await answer.text())[:300]}")
        return await answer.json(content_type=None)


async def _version(session: aiohttp.ClientSession, url: str) -> str:
    try:
        return str((await _json(session, "GET", f"{url}/version"))["version"])
    except (KvrelayError, KeyError, TypeError, ValueError):
        return ""


async def _spelling(session: aiohttp.ClientSession, url: str, model: str) -> Spelling:
    prompts = Prompts("spelling", 1 << 15, Spelling())
    counts = []
    for words in (_FEW_WORDS, _MANY_WORDS):
        content = prompts.text(Turn(1, ((words, words),)))
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = await _json(session, "POST", f"{url}/v1/chat/completions", body)
        counts.append(int(answer["usage"]["prompt_tokens"]))
    per_word = (counts[1] - counts[0]) / (_MANY_WORDS - _FEW_WORDS)
    if per_word <= 0:
        raise KvrelayError(
            f"{url} says that {_FEW_WORDS} words are {counts[0]} tokens and {_MANY_WORDS} words "
            f"{counts[1]}"
        )
    return Spelling(1 / per_word, max(0, round(counts[0] - per_word * _FEW_WORDS)))


def _usual_s(sample: Sequence[Session], targets: Targets) -> tuple[float, float]:
    answers: list[float] = []
    whole: list[float] = []
    for session in sample:
        turns = session.all_turns
        each = [(targets.ttft_ms + targets.tpot_ms * turn.output) / 1e3 for turn in turns]
        answers += each
        whole.append(sum(each) + sum(turn.think_s for turn in turns))
    return percentile(answers, _USUAL_SHARE), percentile(whole, _USUAL_SHARE)


OnProgress = Callable[[str, Progress], None]


class Experiment:
    """Runs against one server, and what they found.

    `on_progress` is told a run's name and its progress.
    """

    def __init__(self, config: BenchConfig, on_progress: OnProgress = lambda *_: None) -> None:
        self._config, self._on_progress = config, on_progress
        self.server: Server | None = None
        self.runs: list[Run] = []
        self.found: SearchResult | None = None
        self._answer_s = self._warm_up_s = 0.0

    async def run(self) -> None:
        """Measure all rates, or search one. Raises ConfigError, KvrelayError."""
        await self._prepare()
        if self._config.find_rate:
            await self._search()
            return
        for rate in self._config.rates or [0.0]:
            await self._measure(rate, self._config.clients)

    async def _prepare(self) -> None:
        config = self._config
        drawn = sessions(config.work, config.arrival(1.0), "0")
        sample = list(itertools.islice(drawn, _SAMPLE_SESSIONS))
        self._answer_s, session_s = _usual_s(sample, config.targets)
        default_s = 0.0 if config.requests else max(_MIN_WARM_UP_S, session_s)
        self._warm_up_s = config.warm_up_s if config.warm_up_s >= 0 else default_s
        chat = config.endpoint == "chat"
        servers = [
            await inspect_server(url, config.api_key, config.model, chat=chat)
            for url in config.base_urls
        ]
        models = {server.model for server in servers}
        if len(models) > 1:
            raise KvrelayError(
                f"these servers serve {', '.join(sorted(models))}; name one with --model"
            )
        self.server = servers[0]

    async def _search(self) -> None:
        config = self._config
        search = RateSearch(
            config.rates[0] if config.rates else float(config.clients or config.gpus),
            config.attainment,
            config.precision,
            whole=bool(config.agents),
        )
        try:
            while (rate := search.rate) is not None:
                if why := await self._probe(search, rate):
                    why = f"at {rate:.3g} {config.unit} {why}"
                    if not self.runs:
                        raise KvrelayError(why)
                    search.stop(why)
        except asyncio.CancelledError:
            search.stop("the search was interrupted")
            raise
        finally:
            self.found = search.result()

    async def _probe(self, search: RateSearch, rate: float) -> str:
        config = self._config
        if not config.agents and (count := rate * config.duration_s) < _MIN_REQUESTS:
            return (
                f"{count:.2g} requests come in {config.duration_s:g} s, too few; take a longer "
                f"--duration-s"
            )
        try:
            run = await self._measure(*((0.0, int(rate)) if config.agents else (rate, 0)))
        except KvrelayError as why:
            if not self.runs:
                raise
            return str(why)
        if config.trace and (count := len(run.rows)) < _MIN_REQUESTS:
            return (
                f"{count} requests of the trace come after the warm-up, too few; take a longer "
                "trace or a shorter --warm-up-s"
            )
        client, attainment = run.measures.client, run.measures.attainment
        # A slow client sees answers late, never early: a rate that holds all the same does hold.
        if client.bottleneck and attainment < config.attainment:
            return f"the client was too slow: {client.bottleneck}"
        search.record(attainment)
        return ""

    async def _measure(self, rate: float, clients: int) -> Run:
        config, server = self._config, self.server
        assert server is not None
        load, window = self._load(rate, clients)
        name = f"{clients} clients" if clients else "the trace"
        if rate:
            name = f"{rate:.4g} requests/s"
        until = "" if config.requests else f" for {load.sending_s:.0f} s"
        told = partial(self._on_progress, f"{name}{until}")
        outcome = await send_load(config, server, load, told)
        if not outcome.records:
            raise KvrelayError(f"at {name} no request was sent; take a longer --duration-s")
        run = self._run(load, outcome, window)
        self.runs.append(run)
        return run

    def _load(self, rate: float, clients: int) -> tuple[Load, Window]:
        config, start_s = self._config, self._warm_up_s
        seed = f"{config.seed} {len(self.runs)}"
        load = Load(config.work, config.arrival(rate), seed, clients, config.requests)
        if config.requests:
            return replace(load, warm_up_s=start_s), Window(start_s, math.inf)
        window = Window(start_s, start_s + config.duration_s)
        sending_s = window.end_s + (0.0 if clients else self._answer_s)
        load = replace(load, sending_s=sending_s, judged_s=window.end_s, drain_s=config.deadline_s)
        if config.find_rate:
            # A request without an answer by then has missed its targets.
            first_s, token_s = config.targets.ttft_ms / 1e3, config.targets.tpot_ms / 1e3
            load = replace(load, drain_s=_SEARCH_DRAIN_S, first_s=first_s, token_s=token_s)
        return load, window

    def _run(self, load: Load, outcome: Outcome, window: Window) -> Run:
        config, records, clients = self._config, outcome.records, load.clients
        last_s = max(each.due_s for each in records)
        if config.requests:
            last_s = max(last_s, *(each.last_s for each in records))
        if config.requests or (config.trace and last_s < window.end_s):  # a trace has an end
            window = Window(window.start_s, max(last_s, window.start_s) + 1e-6)
        judged = [record for record in records if window.holds(record.due_s)]
        if not judged:
            raise KvrelayError(
                f"no request came after the warm-up of {window.start_s:.3g} s; ask for more, or "
                "longer, or take a shorter --warm-up-s"
            )
        client = client_health(judged, outcome.lags_s, open_loop=not clients)
        return Run(
            load.arrival.rate,
            clients,
            window.start_s,
            window.length_s,
            measures_of(records, window, config.targets, client),
            [row_of(record, config.targets) for record in judged],
        )
