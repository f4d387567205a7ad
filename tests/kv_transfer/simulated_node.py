"""A node of the simulated world: the real engine process, scheduler and transfer engine, and what is
watched of them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import zmq
from simulated_backend import SimulatedBackend, SimulatedBackendThread
from simulated_device import BLOCK_BYTES, BLOCK_TOKENS, EOS, MAX_MODEL_LEN, Device, chain
from simulated_world import CLOCK, SimulatedControl, Violation, World

from kvrelay.kv_transfer.connector import (
    Fetched,
    FetchFailed,
    LeaseId,
    PoolRegion,
    Read,
    Released,
    Settled,
)
from kvrelay.kv_transfer.messages import End, Ended, Message
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.node.engine_process import EngineProcess
from kvrelay.node.pulls import Pulls
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.engine import Counters, Engine
from kvrelay.paged_engine.request import Fetch, Request
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.wire.config import EngineConfig, NodeConfig, TransferConfig
from kvrelay.wire.engine_messages import FromEngine, StepOutputs, ToEngine
from kvrelay.wire.transfer import Fingerprint
from tests.paged_engine.invariants import check_scheduler

TRANSFER = TransferConfig(lease_s=1.5, heartbeat_s=0.4, transfer_deadline_s=3.5, kv_pull="always")
FINGERPRINT = Fingerprint(1, "simulated", "float32", BLOCK_TOKENS, 1, 1, 1, 0, 1, protocol_newest=2)
STEP_S = 0.02
# How late anything may be that is due: the way of a message, a turn of a thread, a step.
LATE_S = 0.25
NODE_CONFIG = NodeConfig(EngineConfig(model="simulated"), transfer=TRANSFER)


class _Engine(Engine):
    """The real one without a model."""

    def __init__(self, device: Device) -> None:
        self._clock = CLOCK.monotonic
        self._runner, self._weights = device, ""  # type: ignore[assignment]
        self.pool = device.pool
        self.max_model_len = MAX_MODEL_LEN
        self.model = SimpleNamespace(vocab_size=1000, eos_token_ids=(EOS,))  # type: ignore[assignment]
        self.scheduler = Scheduler(
            BlockPool(device.pool.num_blocks),
            block_size=BLOCK_TOKENS,
            max_num_batched_tokens=device.max_num_batched_tokens,
            max_num_seqs=device.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
        )
        self.counters = Counters()
        self._in_flight, self._idle_since, self.idles = None, 0.0, False
        self.adapters = self.costs = None
        self._tokens_at = 0.0


class _Inbox:
    """The engine's end of its socket."""

    def __init__(self) -> None:
        self.messages: deque[ToEngine] = deque()

    def recv(self, _: int) -> ToEngine:
        if not self.messages:
            raise zmq.Again
        return self.messages.popleft()

    def decode(self, message: ToEngine) -> ToEngine:
        return message


class SimulatedConnector(TransferEngine):
    """The real one, watched."""

    node: SimulatedNode

    def answer(self, sender: bytes, message: Message) -> Message | None:
        if not isinstance(message, End):
            return super().answer(sender, message)
        lease = message.lease
        offers = self._offers._offers
        offer = offers.get(lease.request_id)
        answer = super().answer(sender, message)
        assert isinstance(answer, Ended)
        if answer.held and (offer is None or offer.lease != lease):
            raise Violation(f"{self.node.name}: {lease} was taken for its successor, {offer}")
        replaced = offer is not None and offer.follower not in (None, sender)
        if answer.held and replaced and lease.request_id not in offers:
            raise Violation(f"{self.node.name}: a reader that was replaced has ended {lease}")
        if replaced:  # the other reader may not want it any more
            self.node.disturbed_for_a_lease()
        return answer


class SimulatedNode(EngineProcess):
    """One process. A restarted one is another, at the same address."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world, self.name, self.host = world, name, host
        self.alive, self.stopped_until = True, 0.0
        self.stopped_at, self.woke_at = float("inf"), world.now
        self.offset_s = world.rng.random() * 1e5
        self.control: SimulatedControl
        self.backend_thread: SimulatedBackendThread
        self.backend = SimulatedBackend(self)
        self.asked: set[str] = set()  # fetches that are not over
        self.unsettled: set[str] = set()
        self.expired: set[LeaseId] = set()
        self.tell: Callable[[StepOutputs], None] = lambda outputs: None
        self._turn_at = float("inf")
        self.index = len(world.nodes)
        self.device = Device(self, world.rng.choice([15, 17, 24]), world.rng)
        # What EngineProcess has of its own, without sockets.
        self._config = NODE_CONFIG
        self._socket = self._decoder = self._inbox = _Inbox()  # type: ignore[assignment]
        self._updates, self._stopping, self._stats_due = [], False, 0.0
        self.engine = _Engine(self.device)
        no_grammars = SimpleNamespace(ready=lambda now: [], drop=lambda request_id: None)
        self._grammars = no_grammars  # type: ignore[assignment]
        self._mismatched_kv = 0
        self._cache_due, self._tells_cache = 0.0, False
        with self.at_work():
            region = PoolRegion(0, self.device.pool.num_blocks, BLOCK_BYTES, "cpu")
            config = replace(TRANSFER, kv_host=host, kv_port=1, kv_checksums=world.checksums)
            self.connector: SimulatedConnector = SimulatedConnector(
                name, FINGERPRINT, region, config, self.wakeup, {"simulated": self.backend}
            )
            self.connector.node = self
            self._pulls = Pulls(self.engine, self.connector, NODE_CONFIG)
        if not world.shares_words:
            self.connector._words.close()
        self._watch_expiry()
        world.nodes.append(self)

    @property
    def running(self) -> bool:
        return self.alive and self.world.now >= self.stopped_until

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Code of this node runs."""
        before, self.world.here = self.world.here, self
        try:
            yield
        finally:
            self.world.here = before

    def _watch_expiry(self) -> None:
        table = self.connector._offers
        close = table._close

        def closed(request_id: str, *, expired: bool) -> None:
            if expired:
                self.expired.add(table._offers[request_id].lease)
            close(request_id, expired=expired)

        table._close = closed  # type: ignore[method-assign]

    # What happens to a node.

    def kill(self) -> None:
        self.alive = False
        world = self.world
        if world.listening.get(self.control.address) is self:
            del world.listening[self.control.address]
        for link in world.links:
            if link.source is self and link.up and not link.hung_up:
                link.end()

    def stop(self, for_s: float) -> None:
        world = self.world
        self.stopped_at = min(self.stopped_at, world.now)
        self.stopped_until = max(self.stopped_until, world.now + for_s)
        world.after(self.stopped_until - world.now, self.go_on)

    def go_on(self) -> None:
        if not self.running:
            return
        self.stopped_at, self.woke_at, self._turn_at = float("inf"), self.world.now, float("inf")
        for wake in self.world.rng.sample(
            [self.control.wake, self.backend_thread.wake, self.wakeup], 3
        ):
            wake()

    # The loop.

    def give(self, message: ToEngine) -> None:
        """From the HTTP process of this node."""
        self._inbox.messages.append(message)
        self.wakeup()

    def wakeup(self) -> None:
        self._turn_in(self.world.rng.random() * 0.002)

    def _turn_in(self, delay_s: float) -> None:
        at = self.world.now + delay_s
        if at < self._turn_at:
            self._turn_at = at
            self.world.after(delay_s, self.turn)

    def turn(self) -> None:
        if not self.running or self.world.now < self._turn_at:
            return
        self._turn_at = float("inf")
        with self.at_work():
            self._handle_commands()
            self._handle_transfer_events()
            progressed = self._step()
            self._pulls.answer()
            self._pulls.give_up(self.world.now + self.offset_s)
            self._report()
        self.check()
        if self.engine.has_work:
            # A step loop that is blocked looks every 20 ms; what it would see then wakes it here.
            self._turn_in(STEP_S * (0.5 + self.world.rng.random()) if progressed else 0.1)

    def _send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self.tell(message)

    # What is watched.

    def _handle_transfer_events(self) -> None:
        for event in [*self.connector._offers.events, *self.connector._fetches.events]:
            self._see(event)
        super()._handle_transfer_events()

    def _see(self, event: object) -> None:
        self.world.say(f"{self.name} {event}")
        match event:
            case Fetched(request_id) | FetchFailed(request_id):
                if request_id not in self.asked:
                    raise Violation(f"{self.name}: {event} of a fetch that is over, or was none")
                self.asked.discard(request_id)
                if isinstance(event, FetchFailed):
                    if event.cause == "KvCorrupted":
                        raise Violation(f"{self.name}: nothing spoils KV here, but {event}")
                    self.unsettled.add(request_id)
                    if event.cause == "PeerLost":  # its source, if alive, cannot be told
                        self.disturbed_for_a_lease()
            case Settled(request_id):
                if request_id in self.unsettled:
                    self.unsettled.discard(request_id)
                elif request_id in self.asked:
                    self.asked.discard(request_id)
                else:
                    raise Violation(f"{self.name}: {event} of a fetch that is over, or was none")
            case Released():
                pass

    def disturbed_for_a_lease(self) -> None:
        self.world.disturbed_until(self.world.now + TRANSFER.lease_s + LATE_S)

    @property
    def pulled(self) -> int:
        """Tokens from the caches of others."""
        return self._pulls.tokens

    def _fetched(self, request: Request, fetched: Fetched) -> None:
        blocks, count = list(request.blocks), request.fetch.num_tokens if request.fetch else 0
        self.device.check(request, blocks, chain(request.token_ids), count)
        super()._fetched(request, fetched)

    def fetch(self, fetch: Fetch) -> None:
        """See Handover."""
        self.world.say(f"{self.name} fetches {fetch.request.request_id} into {fetch.local_blocks}")
        self.asked.add(fetch.request.request_id)
        super().fetch(fetch)

    def read_begins(self, read: Read) -> None:
        """The entry fence: no READ begins towards a source that may have given the blocks to
        somebody else by time.
        """
        world = self.world
        source = world.listening.get((read.peer.host, read.peer.port))
        if source is None or source.connector.generation != read.peer.generation:
            return
        fetch = next(
            f for f in self.connector._fetches._fetches.values() if f.read_id == read.read_id
        )
        offer = source.connector._offers._offers.get(fetch.lease.request_id)
        expires_at = float("inf") if offer is None else offer.expires_at
        silent_s = world.now - source.stopped_at
        if (
            expires_at < world.now + source.offset_s
            or silent_s > TRANSFER.lease_s
            or fetch.lease in source.expired
        ):
            raise Violation(f"{self.name}: a READ begins under {fetch.lease}, whose time is over")

    def written_to(self, block: int) -> None:
        """Bytes of a READ land here now."""
        if not self.engine.scheduler.pool._references[block]:
            raise Violation(f"{self.name}: a READ writes to block {block}, which is free")

    def check(self) -> None:
        """No block that a READ may write to is free; now and then, all of the scheduler's and the
        tables' own rules.
        """
        free = set().union(*self.engine.scheduler.pool._lines.values())
        for block in self.backend.touches():
            if block in free:
                raise Violation(f"{self.name}: a READ may write to block {block}, which is free")
        now, limit_s = self.world.now + self.offset_s, TRANSFER.transfer_deadline_s + LATE_S
        for fetch in self.connector._fetches._fetches.values():
            waits = fetch.complete and fetch.state.name not in ("WATCHED", "ABANDONED")
            late = waits and fetch.exposed_at + limit_s < now
            if late and self.world.now > self.woke_at + LATE_S:
                raise Violation(f"{self.name}: the fetch of {fetch.request_id} is not over")
        if self.world.rng.random() < 0.05:
            self.check_all()

    def check_all(self) -> None:
        try:
            check_scheduler(self.engine.scheduler)
            self.connector._offers.check()
            self.connector._fetches.check()
        except AssertionError as why:
            raise Violation(f"{self.name}: an invariant is broken: {why}") from why

    def idle(self) -> str:
        """What this node still has of requests that are over; nothing is an empty word."""
        connector, pool = self.connector, self.engine.scheduler.pool
        what = {
            "used blocks": pool.total - pool.free,
            "quarantined blocks": self.engine.scheduler.kept.quarantined,
            "offers": len(connector._offers),
            "fetches": len(connector._fetches._fetches),
            "asks": len(connector._asks._asks),
            "asks of others": len(connector._callers_asks._asked),
            "requests": len(self.engine.scheduler._requests),
        }
        return ", ".join(f"{count} {name}" for name, count in what.items() if count)
