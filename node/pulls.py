"""KV of other nodes' prefix caches: what this node asks for, and what it leases them.

A request that waits for an answer is passed by others. Whatever does not come is computed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque

from kvrelay.kv_transfer.connector import CachedAsked, Granted, PeerKey
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request, State
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import TransferTimeout
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import Source, Ticket

__all__ = ["PullPrice", "Pulls"]

_SAMPLES = 8
_MOST_PRICES = 256
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

    def worth_ms(
        self, tokens: int, start: int, num_bytes: int, costs: StepCosts | None, now: float
    ) -> float:
        """Return the time to compute these tokens of a prompt; 0 if that is no longer than a pull."""
        computed_ms = 0.0 if costs is None else costs.chunk_ms(tokens, start)
        return computed_ms if computed_ms > self.pull_ms(num_bytes, now) else 0.0


def _median(samples: deque[tuple[float, float]], first: float, now: float) -> float:
    return statistics.median_low([first, *(ms for at, ms in samples if now < at + _REMEMBERED_S)])


class Pulls:
    def __init__(self, engine: Engine, connector: TransferEngine, config: NodeConfig) -> None:
        self._engine, self._connector, self._config = engine, connector, config.transfer
        self._block_bytes = engine.pool.block_bytes * config.engine.tensor_parallel_size
        self._prices: dict[tuple[PeerKey, bool], PullPrice] = {}
        """By source and whether it was met: what a first contact takes says nothing of the next."""
        self._leases: deque[tuple[int, str, list[int]]] = deque()
        """Steps that must have ended, and the blocks held for an ask."""
        self._granted: deque[tuple[float, Request]] = deque()
        """Until when a request may wait for a seat with its ticket."""
        self.tokens = 0
        self.failures: Counter[str] = Counter()
        """Pulls that were granted and whose KV did not come, by cause."""

    def begin(self, request: Request) -> None:
        """Ask the source with the most of a waiting request's prompt, if that may be quicker."""
        others = [s for s in request.sources if s.generation != self._connector.generation]
        if not others or request.fetch is not None or request.to_score(0, request.prompt_tokens):
            return
        source = sorted(others, key=lambda each: each.tokens)[-1]
        # One more ask if this fails: of what lies below the pool, which names no tokens.
        request.sources = [each for each in others if not each.tokens and each is not source][:1]
        scheduler, block_size = self._engine.scheduler, self._engine.pool.block_size
        most = (len(request.token_ids) - 1) // block_size
        first = scheduler.cached_tokens(request) // block_size
        told = source.tokens // block_size if source.tokens else most
        blocks, now = min(told, most) - first, time.monotonic()
        request.pull_price = self._price(source)
        limit_s = self._limit_s(request.pull_price, blocks, first, now)
        if blocks <= 0 or not limit_s:
            self.begin(request)
            return
        request.asking, request.asked_s = True, now
        request.pull_from, request.pull_s = first, limit_s
        peer = PeerKey(source.host, source.port, source.generation)
        hashes = request.block_hashes(block_size)[first:most]
        self._connector.ask(request.request_id, peer, hashes, first, limit_s, source.seal)

    def _price(self, source: Source) -> PullPrice:
        peer = PeerKey(source.host, source.port, source.generation)
        met = self._config.kv_pull == "auto" and self._connector.meet(peer, source.seal)
        price = self._prices[peer, met] = self._prices.pop((peer, met), PullPrice())
        if len(self._prices) > _MOST_PRICES:
            del self._prices[next(iter(self._prices))]  # the least recently used
        return price

    def _limit_s(self, price: PullPrice, blocks: int, first: int, now: float) -> float:
        if self._config.kv_pull != "auto":
            return self._config.transfer_deadline_s * (self._config.kv_pull == "always")
        block_size, costs = self._engine.pool.block_size, self._engine.scheduler.budget.costs
        part = blocks * block_size, first * block_size, blocks * self._block_bytes
        return price.worth_ms(*part, costs, now) / 1e3

    def announced_ms(self, now: float) -> tuple[float, float]:
        """Return the time of a pull as routers hear it, once and per token; 0: none is made."""
        if self._config.kv_pull != "auto":
            return 0.0, _ALWAYS_MS if self._config.kv_pull == "always" else 0.0
        token_bytes = self._block_bytes / self._engine.pool.block_size
        known = [price for (_, met), price in self._prices.items() if met] or [PullPrice()]
        ask_ms = statistics.median_low(price.ask_ms(now) for price in known)
        byte_ms = statistics.median_low(price.byte_ms(now) for price in known)
        return ask_ms, byte_ms * token_bytes

    def handle(self, event: Granted | CachedAsked) -> None:
        if isinstance(event, CachedAsked):
            self._hold(event)
            return
        request = self._engine.scheduler.get(event.request_id)
        if request is None or not request.asking:
            return  # aborted; the connector knows
        now, asked_at = time.monotonic(), request.asked_s
        if event.ticket is not None or event.reason.startswith(("NotHeld", "TransferTimeout")):
            request.pull_price.asked((now - asked_at) * 1e3, now)
        request.asking = False
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
        request.pull_price.read(num_bytes, read_s * 1e3, time.monotonic())

    def failed(self, request: Request, cause: str, ticket: Ticket) -> None:
        """Count a pull that was granted, and what it took at least."""
        self.tokens += request.pulled_tokens
        self.failures[cause] += 1
        if cause == TransferTimeout.__name__:
            num_bytes = len(ticket.remote_block_ids[0]) * self._block_bytes
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
            scheduler.kept.hold(asked.request_id, blocks)
        # Blocks are published when the step is launched that writes them.
        steps = self._engine.counters.steps + self._engine.in_flight
        self._leases.append((steps, asked.request_id, blocks))

    def answer(self) -> None:
        """Lease what is written."""
        while self._leases and self._leases[0][0] <= self._engine.counters.steps:
            _, request_id, blocks = self._leases.popleft()
            self._connector.answer_cached(request_id, blocks)
