"""Engine process of a node: one loop over the engine, the connector and the HTTP process.

Takes its zmq endpoint as argument and the NodeConfig as JSON on stdin.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from typing import NoReturn

import msgspec
import zmq

from kvrelay.kv_transfer.connector import (
    CachedAsked,
    Completion,
    Fetched,
    FetchFailed,
    Granted,
    Released,
    Settled,
)
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.node.child import run_child
from kvrelay.node.compiling import GrammarCompiler
from kvrelay.node.engine_reports import (
    engine_ready,
    engine_stats,
    fingerprint_of,
    request_update,
)
from kvrelay.node.pulls import Pulls
from kvrelay.node.ranks import join_as_rank_0, meet_ranks, pool_region
from kvrelay.paged_engine.adapters import answer_load
from kvrelay.paged_engine.engine import AdapterNotLoaded, Engine
from kvrelay.paged_engine.request import Fetch, Request
from kvrelay.paged_engine.timed_steps import measure_steps
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.engine_messages import (
    AskStats,
    FromEngine,
    LoadAdapter,
    Order,
    RequestUpdate,
    StepOutputs,
    Submit,
    ToEngine,
)
from kvrelay.wire.errors import KvNotLoaded
from kvrelay.wire.kv_events import CacheChanges
from kvrelay.wire.outputs import Finish, PromptBlocks
from kvrelay.wire.transfer import Ticket

__all__ = ["EngineProcess", "main"]

log = logging.getLogger("kvrelay.engine")

STATS_INTERVAL_S = 0.5
# A message to every router, whose knowledge may be as old as this.
_CACHE_INTERVAL_S = 0.05
# Sleep while requests wait for blocks that only a transfer frees.
BLOCKED_WAIT_S = 0.02
# The end of a step wakes nobody, so it is polled for.
_STEP_POLL_S = 5e-5


class EngineProcess:
    def __init__(self, config: NodeConfig, socket: zmq.Socket[bytes]) -> None:
        began = time.monotonic()
        self._config = config
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._updates: list[RequestUpdate] = []
        self._stopping, self._stats_due = False, 0.0
        ranks = join_as_rank_0(config.engine)
        self.engine = Engine(config.engine, ranks)
        costs = measure_steps(self.engine, config.engine)
        self.engine.scheduler.pool.allow_pins(config.cache.kv_pin_share, config.cache.kv_pin_s)
        self._cache_due, self._tells_cache = 0.0, config.engine.enable_prefix_caching
        if self._tells_cache:  # KV below the pool needs uses, too
            self.engine.scheduler.pool.note_changes(use=config.cache.kv_host_memory > 0)
        engine_id = f"engine-{uuid.uuid4().hex[:12]}"
        self.connector = TransferEngine(
            engine_id=engine_id,
            fingerprint=fingerprint_of(self.engine, config.engine),
            region=pool_region(self.engine.pool),
            config=config.transfer,
            wake=self.wakeup,
            link=meet_ranks(ranks, config, self.engine.model.num_kv_heads, engine_id),
        )
        self._mismatched_kv = 0
        self._grammars = GrammarCompiler(config.engine.model, self.engine, self.wakeup)
        self._pulls = Pulls(self.engine, self.connector, config)
        load_s = time.monotonic() - began
        self._send(engine_ready(self.engine, self.connector, config, costs, load_s))

    def serve(self) -> None:
        progressed = False
        while not self._stopping:
            self._wait(progressed)
            self._handle_commands()
            self._handle_compiled()
            self._handle_transfer_events()
            progressed = self._step()
            self._pulls.answer()
            self._pulls.give_up(time.monotonic())
            self._free_adapters()
            self._report()
        self.connector.close()
        self.engine.close()

    def _free_adapters(self) -> None:
        if self.engine.adapters is not None:
            live = itertools.chain(self.engine.scheduler.live, self._grammars.waiting)
            self.engine.adapters.free_unused(live)

    def wakeup(self) -> None:
        """End the loop's wait, from any thread."""
        os.eventfd_write(self._wake, 1)

    def _wait(self, progressed: bool) -> None:
        timeout_s = STATS_INTERVAL_S
        if self.engine.idles:
            self._wait_for_step()
            timeout_s = 0.0
        elif self.engine.has_work:
            timeout_s = 0.0 if progressed else BLOCKED_WAIT_S
        if self._wake in dict(self._poller.poll(round(timeout_s * 1000))):
            os.eventfd_read(self._wake)

    def _wait_for_step(self) -> None:
        # Or for a message: a prompt that comes now is launched behind the running step.
        until = time.monotonic() + BLOCKED_WAIT_S
        while not (self.engine.is_done or self._poller.poll(0)) and time.monotonic() < until:
            time.sleep(_STEP_POLL_S)

    def _handle_commands(self) -> None:
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            match self._decoder.decode(message):
                case Submit() as submit:
                    self._submit(submit)
                case Order("abort", request_id):
                    self._abort(request_id)
                case Order("release", request_id):
                    for held in self.engine.scheduler.kept.held_for(request_id):
                        self.connector.release(held)
                case Order("renew", request_id):
                    self.connector.prolong(request_id)
                case LoadAdapter() as load:
                    self._send(answer_load(self.engine.adapters, load))
                case Order("unload", name):
                    if self.engine.adapters is not None:
                        self.engine.adapters.retire(name)
                case Order("reset", others):
                    self.engine.scheduler.reset_prefix_cache()
                    if others:
                        self._pulls.stay_alone(time.monotonic())
                    self._tell_cache(time.monotonic(), idle=True)
                case CacheChanges() as changes:
                    self._pulls.note_below(changes)
                case AskStats(number):
                    self._send_stats(number)
                case Order("shutdown"):
                    self._stopping = True

    def _submit(self, submit: Submit) -> None:
        self.engine.scheduler.legs += 1
        watched = False
        try:
            self.engine.check(submit)
            now = time.monotonic()
            request = self.engine.request(submit, min(submit.at or now, now))
            if submit.fetch is not None:
                self.connector.watch(submit.request_id, submit.fetch)
                watched = True
            reason = request.kv_mismatch()
            if reason is not None and not self._goes_on_without_kv(request, reason):
                return
            if submit.params.constraint is None:
                request.guide = self.engine.guide(submit.params)
                self._add(request)
            else:
                self._grammars.begin(request)
        except (ValueError, AdapterNotLoaded) as why:
            self._updates.append(
                RequestUpdate(
                    submit.request_id,
                    [],
                    finish=Finish.ERROR,
                    error=str(why),
                    lacks_adapter=isinstance(why, AdapterNotLoaded),
                )
            )
            if watched:
                self.connector.cancel(submit.request_id)

    def _add(self, request: Request) -> None:
        self.engine.scheduler.add(request)
        if request.sources:
            self._pulls.begin(request)

    def _goes_on_without_kv(self, request: Request, reason: str) -> bool:
        self._mismatched_kv += 1
        self.connector.cancel(request.request_id)
        log.warning("request %s: KV not fetched: %s", request.request_id, reason)
        request.fetch, request.fetch_error = None, f"Incompatible: {reason}"
        if self._config.transfer.kv_load_failure_policy == "fail":
            request.finish = Finish.ERROR
            self._update(request, error=KvNotLoaded.because("Incompatible", reason).message)
        return request.finish is None

    def _handle_compiled(self) -> None:
        for request, error in self._grammars.ready(time.monotonic()):
            try:
                if error is None and request.guide is not None and not request.guide.over:
                    self._add(request)
                    continue
            except ValueError as why:
                error = str(why)
            # Its grammar ended with tokens generated elsewhere, or cannot be followed.
            request.finish = Finish.STOP if error is None else Finish.ERROR
            self._update(request, error=error)
            if request.fetch is not None:
                self.connector.cancel(request.request_id)

    def _abort(self, request_id: str) -> None:
        request = self.engine.scheduler.abort(request_id) or self._grammars.drop(request_id)
        if request is None or request.offered:
            # It may have ended just now with its KV held, which nobody will fetch.
            self.connector.release(request_id)
        elif request.fetch is not None or request.asking:
            self.connector.cancel(request_id)

    def _handle_transfer_events(self) -> None:
        scheduler = self.engine.scheduler
        for event in self.connector.events():
            request = scheduler.get(event.request_id)
            match event:
                case Fetched():
                    if request is None:  # aborted after the last byte was in
                        scheduler.kept.settle(event.request_id)
                    else:
                        self._fetched(request, event)
                case FetchFailed():
                    if request is not None:
                        self._fetch_failed(request, event)
                case Settled(request_id):
                    scheduler.kept.settle(request_id)
                case Released(request_id, expired):
                    if expired:
                        log.warning(
                            "request %s: nobody fetched its KV before the lease ended", request_id
                        )
                    scheduler.kept.release(request_id)
                case CachedAsked() | Granted():
                    self._pulls.handle(event)

    def _fetched(self, request: Request, fetched: Fetched) -> None:
        request.fetched_s, request.fetched_bytes = time.monotonic(), fetched.num_bytes
        request.exposed_s = fetched.exposed_s
        request.told_at_s = request.arrival_s if fetched.told_at is None else fetched.told_at
        # The prefill node has sampled for the first choice only.
        completion = (fetched.completion if request.params.choice == 0 else None) or Completion([])
        if not request.output_tokens:
            request.new_logprobs += completion.logprobs
        self.engine.scheduler.finish_fetch(request.request_id, completion.generated)
        if request.pull_from is not None:
            self._pulls.over(request, fetched.num_bytes, fetched.exposed_s)
        if request.new_tokens:
            request.first_token_s = request.fetched_s
            self._update(request)

    def _fetch_failed(self, request: Request, failed: FetchFailed) -> None:
        request.fetched_s = time.monotonic()
        pulled = None if request.pull_from is None else request.fetch
        if self._config.transfer.kv_load_failure_policy == "fail" and pulled is None:
            self.engine.scheduler.end_failed_fetch(request.request_id, failed.reason)
            self._update(request, error=KvNotLoaded.because(failed.cause).message)
            then = "ending it with an error"
        else:
            self.engine.scheduler.fail_fetch(request.request_id, failed.reason, failed.verified)
            if pulled is not None:
                self._pulls.failed(request, failed.cause, pulled)
            then = f"computing from token {request.num_computed} of {len(request.token_ids)} on"
        log.warning("request %s: KV not fetched, %s: %s", request.request_id, then, failed.reason)

    def fetch(self, fetch: Fetch) -> None:
        request, blocks = fetch.request, (fetch.remote_blocks, fetch.local_blocks)
        self.connector.fetch(request.request_id, *blocks, request.pull_s)

    def offer(self, request: Request) -> None:
        ticket = self.connector.offer(
            request.request_id,
            request.blocks,
            request.prompt_tokens,
            ready=0,
            adapter=request.adapter_key,
        )
        update = RequestUpdate(
            request.request_id,
            [],
            held=ticket,
            cached_tokens=request.cached_tokens or 0,
            found=request.found,
            blocks=self._blocks(request, request.prompt_tokens),
        )
        # At once: a decode node makes room meanwhile. What was evicted for it is told before.
        self._tell_cache(time.monotonic(), idle=True)
        self._send(StepOutputs([update], self.engine.load(time.monotonic())))

    def grow(self, request: Request, tokens: int) -> None:
        self.connector.grow(request.request_id, tokens // self.engine.pool.block_size)

    def _step(self) -> bool:
        if not self.engine.has_work:
            return False
        before = self.engine.counters.steps
        for request in self.engine.step(self, wait=False):
            self._update(request)
        return self.engine.counters.steps != before or self.engine.in_flight

    def _update(self, request: Request, error: str | None = None) -> None:
        ended = request.finish is not None and request.offered
        ticket = self._complete_offer(request) if ended else None
        blocks = None
        if request.finish in (Finish.STOP, Finish.LENGTH) and not request.params.choice:
            blocks = self._blocks(request, len(request.token_ids) - 1)
        elif request.computes_prompt and request.new_tokens and not request.timings_told:
            blocks = self._blocks(request, request.prompt_tokens)
        self._updates.append(request_update(request, ticket, error, time.monotonic(), blocks))

    def _complete_offer(self, request: Request) -> Ticket | None:
        request_id, scheduler = request.request_id, self.engine.scheduler
        if scheduler.kept.held(request_id) is None:
            self.connector.release(request_id)
            return None
        ticket = self.connector.complete(
            request_id, Completion(request.new_tokens, request.new_logprobs)
        )
        if ticket is None:  # its lease ended while it grew
            scheduler.kept.release(request_id)
        return ticket

    def _report(self) -> None:
        now, idle = time.monotonic(), not self.engine.has_work
        self.engine.scheduler.pool.expire(now)
        if self._updates:
            self._send(StepOutputs(self._updates, self.engine.load(now)))
            self._updates = []
        self._tell_cache(now, idle=idle)
        if idle or now >= self._stats_due:
            self._stats_due = now + STATS_INTERVAL_S
            self._send_stats()

    def _tell_cache(self, now: float, *, idle: bool) -> None:
        pool = self.engine.scheduler.pool
        if pool.changed and (idle or now >= self._cache_due):
            self._cache_due, new = now + _CACHE_INTERVAL_S, pool.changes()
            stored, removed, used = map(list, (new.stored, new.removed, new.used))
            pinned = list(new.pinned.items())
            self._send(CacheChanges(stored, removed, new.cleared, used, pinned=pinned))

    def _blocks(self, request: Request, tokens: int) -> PromptBlocks | None:
        """Return the hashes by which a router finds a request's first tokens in KV events."""
        if not self._tells_cache:
            return None
        size = self.engine.pool.block_size
        return PromptBlocks(size, b"".join(request.block_hashes(size)[: tokens // size]))

    def _send_stats(self, asked: int = 0) -> None:
        now = time.monotonic()
        self.engine.scheduler.pull_prices = self._pulls.announced(now)
        parts = self.engine, self.connector, self._pulls
        self._send(engine_stats(*parts, self._mismatched_kv, now, asked))

    def _send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))


def main() -> NoReturn:
    run_child("engine", NodeConfig, lambda config, socket: EngineProcess(config, socket).serve())
