"""Life of a node: its parts, draining, changes of its role, and heartbeats to routers.

The engine process knows no roles. A change refuses new requests, waits until running ones have
ended and held KV is fetched, and then serves the other role.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from kvrelay.node.cache_client import CacheClient
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.metrics import NodeMetrics
from kvrelay.node.process import set_log_process
from kvrelay.node.request_stream import KvEvents, RequestStreams
from kvrelay.node.sandbox import Sandbox
from kvrelay.node.serving import Serving
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.tracing import Tracing
from kvrelay.wire.config import NodeConfig, Role
from kvrelay.wire.config_checks import udp_address
from kvrelay.wire.engine_messages import EngineStats
from kvrelay.wire.errors import Conflict, DeadlineExceeded, Draining, EngineDead, RequestError
from kvrelay.wire.heartbeat import HEARTBEAT_S, Heartbeat, NodeState, sealed
from kvrelay.wire.kv_events import CPU, GPU, STORAGE, CacheChanges

__all__ = ["DRAIN_DEADLINE_S", "FLIPPING", "Heartbeats", "Node"]

# Requests left by then are cut and go on elsewhere; decode nodes compute KV that is dropped.
DRAIN_DEADLINE_S = 30.0
FLIPPING = "flipping"
LOOK_UP_S = 1.0
# The engine process reports every half second; a largest chunk takes seconds on a slow machine.
SILENCE_LIMIT_S = 20.0
_POLL_S = 0.05
_STATS_DEADLINE_S = 5.0

log = logging.getLogger("kvrelay.node")


class Node:
    """A node's parts and state. `serving` and `metrics` are None until the engine is ready."""

    def __init__(
        self,
        config: NodeConfig,
        engine: EngineClient,
        created: int,
        *,
        serving: Serving | None = None,
        tracing: Tracing | None = None,
        sandbox: Sandbox | None = None,
        flip_deadline_s: float = DRAIN_DEADLINE_S,
    ) -> None:
        self.config, self.created = config, created
        self.cache = CacheClient(config, self._tell_below)
        self.serving, self.tracing = serving, tracing
        self.metrics: NodeMetrics | None = None
        self.kv_events = KvEvents() if config.engine.enable_prefix_caching else None
        self.use(engine)
        self.failure: str | None = None
        self.streams, self.sandbox = RequestStreams(self.kv_events), sandbox or Sandbox()
        self.on_change: Callable[[], None] = lambda: None
        self.draining = False
        self.role = config.role
        self.flips_to: Role | None = None
        self.flips = 0
        """Changes of the role. With any, a router believes the node and not its lists."""
        self._flip: asyncio.Task[None] | None = None
        self._flip_deadline_s = flip_deadline_s

    def use(self, engine: EngineClient) -> None:
        self.engine = engine
        engine.tier = lambda: self.cache.source
        engine.on_cache_changes = self._tell_changes

    def _tell_changes(self, changes: CacheChanges) -> None:
        self.cache.tell(changes)
        if self.kv_events is not None:
            self.kv_events.publish(replace(changes, used=[], pinned=[]))

    def _tell_below(self, changes: CacheChanges) -> None:
        self.engine.send(changes)
        if self.kv_events is not None:
            self.kv_events.publish(changes)

    def rungs(self, requests: Sequence[NodeRequest], since: float) -> Counter[str]:
        """Return the hit ladder of prompts that came at a time, as far as this node knows."""
        rungs: Counter[str] = Counter()
        for request in requests:
            blocks, found, tokens = request.blocks, request.found, request.writer.prompt_tokens
            if self.kv_events is not None and blocks is not None and found is not None:
                mine = [GPU, CPU, STORAGE]
                of = blocks.names, blocks.block_size, since, mine[: None if found.asked else 1]
                rungs.update(self.kv_events.history.ladder(tokens, found, *of, mine))
        return rungs

    def stats(self) -> EngineStats:
        stats, tiers = self.engine.stats, self.cache.stats
        if tiers is None:
            return stats
        return replace(stats, host=tiers.host, store=tiers.store)

    def check_open(self) -> None:
        if self.draining:
            raise Draining(
                "this node is draining: it ends what it has and takes no new requests; ask "
                "another one"
            )
        if self.flips_to is not None:
            raise Draining(
                f"this node changes its role from {self.role} to {self.flips_to}: it ends what it "
                f"has; ask another one"
            )

    def drain(self, *, draining: bool = True) -> None:
        if self.draining != draining:
            state = "draining" if draining else "draining no more"
            log.info("%s: %d requests under way", state, self.engine.queue_depth())
            self.draining = draining
            if draining:  # who changes its role is asked for cached KV all the time
                self.cancel_flip()
            self.on_change()

    async def wait_idle(self, deadline_s: float, *, lends: bool = False) -> bool:
        """Wait until no request runs and no KV is held; return False at the deadline.

        `lends`: cached KV may be held, which others may read without a pause.
        """
        with suppress(EngineDead, TimeoutError):
            async with asyncio.timeout(deadline_s):
                while (
                    self.engine.queue_depth()
                    or self.streams.running()
                    or await self._held_blocks(lends=lends)
                ):
                    await asyncio.sleep(_POLL_S)
            return True
        return self.engine.ended.is_set()

    async def _held_blocks(self, *, lends: bool) -> int:
        if self.engine.info is None:
            return 0
        try:
            stats = await self.engine.fresh_stats(_STATS_DEADLINE_S)
        except DeadlineExceeded:  # a long step: ask again
            return 1
        return stats.held_blocks - stats.lent_blocks * lends

    def change_role(self, wanted: Role) -> None:
        """Begin a change, or cancel one by asking for the present role.

        Raises RequestError, Conflict.
        """
        if Role.AGGREGATED in (self.role, wanted):
            raise RequestError(
                f"a node changes between prefill and decode; this one is {self.role}, and {wanted} "
                f"was asked for",
                param="role",
            )
        if wanted is self.role:
            self.cancel_flip()
            return
        if self.flips_to is not None:
            raise Conflict(
                f"this node is changing its role from {self.role} to {self.flips_to} already; wait "
                f"until GET /health says that it has, or ask for {self.role} to cancel it",
                code=FLIPPING,
            )
        if self.draining:
            raise Conflict(
                "this node drains; have it take requests again (POST /undrain) before its role "
                "changes"
            )
        requests = self.engine.queue_depth()
        log.info("flipping from %s to %s: %d requests under way", self.role, wanted, requests)
        self.flips_to = wanted
        self._flip = asyncio.create_task(self._run_flip(wanted))
        self.on_change()

    def cancel_flip(self) -> None:
        if self._flip is not None and self.flips_to is not None:
            self._flip.cancel()
            self._end_flip("cancelled")

    async def _run_flip(self, wanted: Role) -> None:
        began, old = time.monotonic(), self.role
        idle = await self.wait_idle(self._flip_deadline_s, lends=True)
        if self.engine.ended.is_set():
            self._end_flip("cancelled")
            return
        self.role, self.flips = wanted, self.flips + 1
        self._end_flip("done")
        took_s = time.monotonic() - began
        log.info("this %s node is a %s node now: flipped in %.3f s", old, wanted, took_s)
        if not idle:
            log.warning(
                "%d requests of the old role, or KV that it holds, are left and go on",
                self.engine.queue_depth(),
            )

    def _end_flip(self, outcome: str) -> None:
        if outcome == "cancelled":
            log.info("not flipping to %s: this is a %s node still", self.flips_to, self.role)
        self.flips_to = None
        if self.metrics is not None:
            self.metrics.count("kvrelay_node_flips", outcome)
            self.metrics.set_role(self.role)
        if outcome == "done":
            if self.serving is not None:
                self.serving.set_role(self.role)
            set_log_process(str(self.role))
        self.on_change()

    def ready(self) -> Serving:
        """Return the Serving. Raises EngineDead while the engine loads and once it has ended."""
        if self.engine.ended.is_set() or self.failure is not None:
            raise EngineDead(self.failure or "the engine process of this node has ended")
        if self.serving is not None and (silent_s := self.engine.silent_s()) > SILENCE_LIMIT_S:
            raise EngineDead(f"the engine process has said nothing for {silent_s:.0f} s")
        if (stopped_s := self.engine.stats.transfers.silent_s) > SILENCE_LIMIT_S:
            raise EngineDead(
                f"this node hands no KV over: a thread of its KV link has stood still for "
                f"{stopped_s:.0f} s"
            )
        if self.serving is None:
            raise EngineDead("the model is still being loaded; GET /health says when it is done")
        return self.serving

    def alive(self) -> bool:
        """Return False if only a new process can help."""
        try:
            self.ready()
        except EngineDead:
            return self.serving is None and not self.engine.ended.is_set() and self.failure is None
        return True


class Heartbeats:
    """A sender of heartbeats to routers (udp://host:port), which never answer.

    `read` returns what to send, or None while the node is not ready.
    """

    def __init__(
        self,
        routers: Sequence[str],
        key: str,
        read: Callable[[], Heartbeat | None],
        interval_s: float = HEARTBEAT_S,
    ) -> None:
        self._routers, self._key, self._read, self._interval_s = routers, key, read, interval_s
        self._wakeup = asyncio.Event()
        self._last: Heartbeat | None = None
        self._addresses: dict[str, list[tuple[int, Any]]] = {}
        self._lookups: dict[str, asyncio.Task[None]] = {}

    def send_now(self) -> None:
        self._wakeup.set()

    async def run(self) -> None:
        """Send until cancelled, and then once more that the node leaves."""
        if not self._routers:
            return
        try:
            while True:
                self._wakeup.clear()
                await self._look_up()
                if (heartbeat := self._read()) is not None:
                    self._send(heartbeat)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wakeup.wait(), self._interval_s)
        finally:
            for lookup in self._lookups.values():
                lookup.cancel()
            if self._last is not None:
                self._send(replace(self._last, state=NodeState.LEAVING))

    def _send(self, heartbeat: Heartbeat) -> None:
        self._last = heartbeat
        message = sealed(replace(heartbeat, sent_at=time.time()), self._key)
        for family, address in [each for found in self._addresses.values() for each in found]:
            # An open socket would be a port for strangers' datagrams.
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as once:
                once.setblocking(False)
                once.sendto(message, address)

    async def _look_up(self) -> None:
        for router in self._routers:
            if router not in self._lookups:
                self._lookups[router] = asyncio.create_task(self._resolve(router))
        await asyncio.wait(self._lookups.values(), timeout=LOOK_UP_S)

    async def _resolve(self, router: str) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                *udp_address(router), type=socket.SOCK_DGRAM
            )
            self._addresses[router] = [(family, address) for family, _, _, _, address in found]
        except (OSError, UnicodeError):
            pass  # no such name, or no name server: the last addresses stay
        finally:
            del self._lookups[router]
