"""KV of a prompt's beginning that lies elsewhere: below this node's pool, or in other nodes' caches.

A request that waits for an answer is passed by others. Whatever does not come is computed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from itertools import takewhile
from operator import itemgetter

from kvrelay.kv_transfer.cached import NOT_HELD
from kvrelay.kv_transfer.connector import CachedAsked, Granted, PeerKey, peer_of
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request, State
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import TransferTimeout
from kvrelay.wire.kv_events import ANY, CPU, STORAGE, BlockHash, CacheChanges
from kvrelay.wire.transfer import Source, Ticket

__all__ = ["PullPrice", "Pulls"]

_SAMPLES = 8
_MOST_PRICES = 256
_RESET_S = 35.0  # by then a router has reset all nodes, or failed to
_REMEMBERED_S = 60.0
_ALWAYS_MS = 1e-9
# Before anything is measured: 10 GB/s, because what is thought too slow is never tried.
_ASK_MS, _BYTE_MS = 2.0, 1e-7


class PullPrice:
    """A price of pulls from a source, by the medians of what the newest ones took. Pure.

    One sample decides nothing, and after a minute a slow link is tried again.
    """

    def __init__(self) -> None:
        self._asks: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._bytes: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def asked(self, ms: float, now: float) -> None:
        self._asks.append((now, ms))

    def read(self, num_bytes: int, ms: float, now: float) -> None:
        if num_bytes:
            self._bytes.append((now, ms / num_bytes))

    def pull_ms(self, num_bytes: int, now: float) -> float:
        """Return the time from an ask until so many bytes are here."""
        return self.ask_ms(now) + num_bytes * self.byte_ms(now)

    def ask_ms(self, now: float) -> float:
        return _median(self._asks, _ASK_MS, now)

    def byte_ms(self, now: float) -> float:
        return _median(self._bytes, _BYTE_MS, now)


def _median(samples: deque[tuple[float, float]], first: float, now: float) -> float:
    return statistics.median_low([first, *(ms for at, ms in samples if now < at + _REMEMBERED_S)])


class Pulls:
    def __init__(self, engine: Engine, connector: TransferEngine, config: NodeConfig) -> None:
        self._engine, self._connector, self._config = engine, connector, config.transfer
        self._block_bytes = engine.pool.block_bytes * config.engine.tensor_parallel_size
        self._prices: dict[tuple[PeerKey, bool, bool], PullPrice] = {}
        """Prices by source, by whether it lies below this node's pool, and by whether it was met: a
        first contact's time says nothing of the next."""
        self._files = PullPrice()
        self._below: dict[str, set[BlockHash]] = {CPU: set(), STORAGE: set()}
        self._leases: deque[tuple[int, str, list[int]]] = deque()
        """Steps that must have ended, and the blocks held for an ask."""
        self._granted: deque[tuple[float, Request]] = deque()
        """Until when a request may wait for a seat with its ticket."""
        self._alone_until = -math.inf
        self.tokens = 0
        self.failures: Counter[str] = Counter()
        """Pulls that were granted and whose KV did not come, by cause."""

    def note_below(self, changes: CacheChanges) -> None:
        changes.follow(self._below[changes.medium])

    def stay_alone(self, now: float) -> None:
        """Take nothing from other nodes, which are reset like this one, and might not yet be."""
        self._alone_until = now + _RESET_S

    def begin(self, request: Request) -> None:
        """Ask for what saves a waiting request the most time, if anything does."""
        if request.fetch is not None or request.to_score(0, request.prompt_tokens):
            return
        block_size, now = self._engine.pool.block_size, time.monotonic()
        most = (len(request.token_ids) - 1) // block_size
        first = self._engine.scheduler.cached_tokens(request) // block_size
        hashes = request.block_hashes(block_size)[first:most]
        in_host = len([*takewhile(self._below[CPU].__contains__, hashes)])
        stored, rest = self._below[STORAGE], hashes[in_host:]
        in_files = len([*takewhile(lambda name: ANY in stored or name in stored, rest)])
        could = []
        for source in request.sources:
            told = min(source.tokens // block_size - first, len(hashes))
            if not source.tokens:
                could += [(source, in_host, 0), (source, in_host + in_files, in_files)]
            elif source.generation != self._connector.generation and now >= self._alone_until:
                could.append((source, told, 0))
        saved = [(self._saved_ms(*each, first, now), each) for each in could if each[1] > 0]
        pulls = [pull for ms, pull in sorted(saved, key=itemgetter(0)) if ms > 0]
        request.sources = []
        if not pulls:
            return
        source, blocks, request.pull_stored = pulls.pop()
        # One more ask if this fails.
        request.sources = [other for other, *_ in pulls if other != source][-1:]
        request.asking, request.asked_s, request.pull_from = True, now, first
        request.pull_price, request.pull_s = self._price(source), self._limit_s(blocks, first)
        request.asked = (first + blocks) * block_size
        request.read_from = (first + blocks - request.pull_stored) * block_size
        request.from_peer = source.tokens > 0
        # A peer may have more than it is known for.
        hashes = hashes if source.tokens else hashes[:blocks]
        self._connector.ask(request.request_id, source, hashes, first, request.pull_s)

    def _price(self, source: Source) -> PullPrice:
        met = self._config.kv_pull == "auto" and self._connector.meet(source)
        of = peer_of(source), not source.tokens, met
        price = self._prices[of] = self._prices.pop(of, PullPrice())
        if len(self._prices) > _MOST_PRICES:
            del self._prices[next(iter(self._prices))]  # the least recently used
        return price

    def _limit_s(self, blocks: int, first: int) -> float:
        size, costs = self._engine.pool.block_size, self._engine.scheduler.budget.costs
        if self._config.kv_pull != "auto":
            return self._config.transfer_deadline_s
        return 0.0 if costs is None else costs.chunk_ms(blocks * size, first * size) / 1e3

    def _saved_ms(self, source: Source, blocks: int, stored: int, first: int, now: float) -> float:
        if self._config.kv_pull != "auto":
            return float(blocks * (self._config.kv_pull == "always"))
        pull_ms = self._price(source).pull_ms(blocks * self._block_bytes, now)
        pull_ms += stored * self._block_bytes * self._files.byte_ms(now)
        return self._limit_s(blocks, first) * 1e3 - pull_ms

    def announced(self, now: float) -> dict[str, float]:
        """Return what routers hear of the prices, by the names of Load."""
        if self._config.kv_pull != "auto":
            each = _ALWAYS_MS if self._config.kv_pull == "always" else 0.0
            return {"pull_token_ms": each, "host_token_ms": each}
        told = {"store_token_ms": self._files.byte_ms(now)}
        for name, own in ("pull", False), ("host", True):
            known = [price for (_, *of), price in self._prices.items() if of == [own, True]]
            known = known or [PullPrice()]
            told[f"{name}_ms"] = statistics.median_low(each.ask_ms(now) for each in known)
            told[f"{name}_token_ms"] = statistics.median_low(each.byte_ms(now) for each in known)
        token_bytes = self._block_bytes / self._engine.pool.block_size
        return {name: ms * (token_bytes if "token" in name else 1) for name, ms in told.items()}

    def handle(self, event: Granted | CachedAsked) -> None:
        if isinstance(event, CachedAsked):
            self._hold(event)
            return
        request = self._engine.scheduler.get(event.request_id)
        if request is None or not request.asking:
            return  # aborted; the connector knows
        now = time.monotonic()
        ms, price = (now - request.asked_s) * 1e3, request.pull_price
        if request.pull_stored:  # the answer waits for files
            ms = max(0.0, ms - price.ask_ms(now))
            self._files.read(request.pull_stored * self._block_bytes, ms, now)
        elif event.ticket is not None or event.reason.startswith((NOT_HELD, "TransferTimeout")):
            price.asked(ms, now)
        request.asking = False
        if event.ticket is not None:
            request.promised = event.ticket.num_tokens
        elif not event.reason.startswith(NOT_HELD):
            request.promised = max(request.promised, request.asked)
        if event.ticket is not None:
            self._connector.watch(event.request_id, event.ticket)
            self._granted.append((now + self._config.transfer_deadline_s, request))
        else:
            self.begin(request)
        if not request.asking:
            self._engine.scheduler.end_ask(request, event.ticket)

    def over(self, request: Request, num_bytes: int, read_s: float) -> None:
        """Count a pull whose fetch is over."""
        self.tokens += request.pulled_tokens
        if not num_bytes:  # a block before the first one was evicted meanwhile
            request.promised = 0
        request.pull_price.read(num_bytes, read_s * 1e3, time.monotonic())

    def failed(self, request: Request, cause: str, ticket: Ticket) -> None:
        """Count a pull that was granted, and what it took at least."""
        self.tokens += request.pulled_tokens
        self.failures[cause] += 1
        if cause == TransferTimeout.__name__:
            num_bytes = len(ticket.blocks) * self._block_bytes
            request.pull_price.read(num_bytes, request.pull_s * 1e3, time.monotonic())

    def give_up(self, now: float) -> None:
        """Compute what has waited for a seat too long: two nodes might wait for each other's blocks."""
        while self._granted and self._granted[0][0] <= now:
            _, request = self._granted.popleft()
            if request.fetch is not None and request.state is State.WAITING:
                self._connector.cancel(request.request_id)
                self._engine.scheduler.end_ask(request, None)
                self.failures["NoSeat"] += 1

    def _hold(self, asked: CachedAsked) -> None:
        scheduler = self._engine.scheduler
        blocks = scheduler.pool.lookup(asked.hashes)
        if blocks:
            scheduler.pool.share(blocks)
            scheduler.kept.lend(asked.request_id, blocks)
        # Blocks are published when the step is launched that writes them.
        steps = self._engine.counters.steps + self._engine.in_flight
        self._leases.append((steps, asked.request_id, blocks))

    def answer(self) -> None:
        """Lease what is written."""
        while self._leases and self._leases[0][0] <= self._engine.counters.steps:
            _, request_id, blocks = self._leases.popleft()
            self._connector.answer_cached(request_id, blocks)
