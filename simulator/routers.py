"""The routers of a simulation: the real pool, policies, rates, prefix index and queue for room, and one that knows all.

A Router is a replica: it knows its own leases at once, and else what reaches it. The omniscient one reckons with the
same costs, from the true state and the true speeds of all nodes.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from router.membership.members import NodeSpec, Source
from router.nodes.measured import learn
from router.nodes.node import HealthReport, Lease, Node
from router.nodes.pool import Pool
from router.nodes.rates import NodeRates
from router.nodes.room import RoomQueue, Waiter, with_room
from router.policies.cost import decode_ms, prefill_ms
from router.policies.policy import Ask, NodeView
from router.prefix.index import Prefix
from router.prefix.text_tree import CHUNK_BYTES
from router.walk.conditional import decide
from simulator.engine import Engine
from simulator.speeds import Speeds
from simulator.stream import Stream
from wire.config import Role
from wire.frames import Frame, FrameKind
from wire.outputs import Load
from wire.transfer import Fingerprint, KvFacts, KvTransferParams

__all__ = ["Omniscient", "Router", "Way", "url_of"]

_MODEL = "simulated"
_KV = KvFacts(Fingerprint(1, "simulated", "bfloat16", 1, kv_heads=1, head_dim=1, layers=1, window=0, tp_size=1))
# With more decode nodes, asking each whether it was measured would take longer than all else: the chosen one is asked.
_ASKED = 64
# Of more nodes than these, the omniscient router reckons with those that have the least to do.
_MOST_RECKONED = 32
_TYPICAL_TOKENS = 1_024


def url_of(at: int) -> str:
    """The name of a node."""
    return f"http://node-{at}"


@dataclass(frozen=True, slots=True)
class Way:
    """How a router chooses. `policy` is one of router/policies/by_name.py, for both roles."""

    policy: str
    conditional: bool
    block_size: int
    """Of named blocks; 0: it knows nothing of prefixes."""
    ttft_ms: float = 0.0
    """What all requests want of their tokens' times; 0: nothing."""
    tpot_ms: float = 0.0


class Router:
    """One replica. Nodes are called by their numbers: `roles` and `loads` are those that there are at first."""

    def __init__(self, way: Way, roles: Sequence[Role], loads: Sequence[Load], seed: str) -> None:
        named: dict[Role, list[str]] = {Role.PREFILL: [], Role.DECODE: []}
        for at, role in enumerate(roles):
            named[role].append(url_of(at))
        policies = dict.fromkeys(named, way.policy)
        self.pool = Pool(named[Role.PREFILL], named[Role.DECODE], random.Random(seed), policies)
        self.local: Counter[str] = Counter()
        """Prompts that decode nodes compute, by reason."""
        self._way = way
        # No other policy reads the rates, and learning takes longer than all else.
        self._learns = way.policy == "cost" or way.conditional
        self._numbers = {url_of(at): at for at in range(len(roles))}
        self._prefixes: dict[Stream, Prefix] = {}
        self._legs: dict[tuple[Stream, Role], Lease] = {}
        self._room = RoomQueue()
        self._waiters: dict[Stream, Waiter] = {}
        self._nodes: list[Node] = []
        for at, load in enumerate(loads):
            self._nodes.append(self._found(at))
            self.polled(at, load, "1", 0.0)

    # --- where to ------------------------------------------------------------------------------------------------

    def source(self, stream: Stream) -> int | None:
        """The number of the prefill node for it, which is leased; None: its prompt is computed where it decodes."""
        nodes = self.pool.up(Role.PREFILL)
        if not nodes:
            self.local["no_prefill_node"] += 1
            return None
        tokens = stream.prompt + stream.done
        ask = Ask(
            Role.PREFILL,
            _MODEL,
            tokens,
            session=stream.session,
            prefix=self._prefix(stream),
            ttft_ms=self._way.ttft_ms,
            tpot_ms=self._way.tpot_ms,
        )
        if self._way.conditional:
            node, ask = self.pool.choose(ask, nodes)
            if self._is_local(ask, node):
                return None
            nodes = [node]
        return self._hold(stream, ask, nodes)

    def _is_local(self, ask: Ask, source: Node) -> bool:
        """As router/walk/binding.py asks."""
        nodes = self.pool.up(Role.DECODE)
        if not nodes:
            return False
        its = msgspec.structs.replace(ask, role=Role.DECODE)
        if len(nodes) <= _ASKED:
            nodes = [node for node in nodes if node.rates.measured]
        if not nodes:
            return False
        node = self.pool.choose(its, nodes)[0]
        if not node.rates.measured:
            return False
        decision = decide(ask, source, node)
        if decision.local:
            self.local[decision.reason] += 1
        return decision.local

    def place(self, stream: Stream, peer: int | None, placed: Callable[[int], None]) -> None:
        """Lease a decode node for it as soon as there is one with room. `peer` has its KV, or will have it; None: the
        decode node computes it."""
        prefix = self._prefixes.get(stream)
        if prefix is not None:
            self.pool.prefixes.learn(prefix)
        elif peer is None:
            prefix = self._prefix(stream)
        ask = Ask(
            Role.DECODE,
            _MODEL,
            stream.prompt + stream.done if peer is None else 0,
            kv_tokens=stream.prompt + stream.done,
            priority=stream.priority,
            session=stream.session,
            prefix=prefix,
            peer="" if peer is None else url_of(peer),
        )
        nodes = () if self._room else with_room(ask, self.pool.up(Role.DECODE), self.pool.choose)
        if nodes:
            placed(self._hold(stream, ask, nodes))
            return

        def grant(roomy: Sequence[Node]) -> None:
            del self._waiters[stream]
            placed(self._hold(stream, ask, roomy))

        waiter = self._waiters[stream] = Waiter(ask, lambda: self.pool.up(Role.DECODE), grant)
        self._room.add(waiter)

    @property
    def waiting_for_room(self) -> int:
        """Legs that no decode node has room for."""
        return len(self._room)

    def turn(self) -> None:
        """There may be room."""
        if self._room:
            self._room.turn(self.pool.up(Role.DECODE))

    def waits(self, stream: Stream) -> bool:
        """Whether it waits for room."""
        return stream in self._waiters

    def give_up(self, stream: Stream) -> None:
        """It waits for room no more."""
        self._room.drop(self._waiters.pop(stream))

    def _hold(self, stream: Stream, ask: Ask, nodes: Sequence[Node]) -> int:
        lease = self._legs[stream, ask.role] = self.pool.hold(ask, nodes)
        return self._numbers[lease.node.url]

    # --- what legs tell ------------------------------------------------------------------------------------------

    def prefilled(self, stream: Stream, waited_ms: float, took_ms: float) -> None:
        """The prefill leg has ended, and says how long it took."""
        lease = self._legs.pop((stream, Role.PREFILL))
        if self._learns:
            params = KvTransferParams(num_tokens=stream.prompt, cached_tokens=stream.cached)
            timing = {"queue": waited_ms, "prefill": took_ms}
            learn(lease, Frame(FrameKind.HANDOVER, params=params, timing=timing), 1, None)
        self.pool.give_back(lease)

    def answered(self, stream: Stream) -> None:
        """The decode leg tells of a token."""
        lease = self._legs[stream, Role.DECODE]
        lease.node.answered(lease, stream.prompt + stream.done)

    def ended(self, stream: Stream, timing: dict[str, float], generated: int, peer: int | None) -> None:
        """The decode leg has ended, and says how long it took for so many tokens."""
        lease = self._legs.pop((stream, Role.DECODE))
        if self._learns:
            cached = stream.cached if peer is None else 0
            frame = Frame(FrameKind.END, timing=timing, usage=(stream.prompt, stream.output, cached))
            learn(lease, frame, generated, None if peer is None else self._nodes[peer])
        self.pool.give_back(lease)
        self._prefixes.pop(stream, None)
        self.turn()

    def broken(self, stream: Stream, role: Role) -> None:
        """A leg has ended otherwise."""
        lease = self._legs.pop((stream, role), None)
        if lease is not None:
            self.pool.give_back(lease)

    # --- what nodes tell -----------------------------------------------------------------------------------------

    def reported(self, at: int, load: Load) -> None:
        """A node has told of its load beside a leg."""
        self._nodes[at].note_load(load)

    def polled(self, at: int, load: Load, generation: str, now: float) -> None:
        """A node has answered its health check. Milliseconds."""
        node = self._nodes[at]
        if node.up:
            node.note_load(load)
            if self._learns:
                node.rates.age(now / 1e3)
            return
        report = HealthReport(node.role, _MODEL, load=load, generation=generation, kv=_KV)
        self.pool.report(node, report, now / 1e3, now / 1e3)
        if self._way.block_size:
            self.pool.prefixes.trust(node.url)
        self.turn()

    def lost(self, at: int, now: float) -> None:
        """A node refuses connections."""
        self.pool.blame(self._nodes[at], "it is lost", now / 1e3)

    def drains(self, at: int, now: float) -> None:
        """A node is to take no new legs."""
        self.pool.drain(self._nodes[at], now / 1e3)

    def returns(self, at: int, now: float) -> None:
        """A node takes legs again from its next health check on. Milliseconds."""
        self.pool.undrain(self._nodes[at], now / 1e3)

    def becomes(self, at: int, role: Role, load: Load, generation: str, now: float) -> None:
        """A node announces another role. Milliseconds."""
        self.pool.remove(url_of(at), [Source.STATIC], now / 1e3)
        self.pool.add(NodeSpec(url_of(at), role), Source.STATIC, now / 1e3)
        self._nodes[at] = self._found(at)
        self.polled(at, load, generation, now)

    def kv_events(self, at: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        """A node's KV events have arrived."""
        url = url_of(at)
        self.pool.prefixes.stored(url, stored)
        self.pool.prefixes.removed(url, removed)

    def _found(self, at: int) -> Node:
        node = self.pool.find(url_of(at))
        assert node is not None
        return node

    def _prefix(self, stream: Stream) -> Prefix | None:
        """A block of tokens is a chunk of text. The first request with a text finds no keys of blocks for it."""
        block_size = self._way.block_size
        if not block_size:
            return None
        chunks, text_bytes = array("q", (0, *stream.blocks)), max(1, stream.prompt * CHUNK_BYTES // block_size)
        self._prefixes[stream] = Prefix(chunks, text_bytes, array("Q", stream.blocks), stream.prompt, block_size)
        return Prefix(chunks, text_bytes)


class _True(NodeRates):
    """The true speeds of one node, for the cost formulas; `now` and `output` belong to what is asked."""

    __slots__ = ("node", "now", "output", "speeds", "token_ms")

    def __init__(self, speeds: Speeds, node: Engine) -> None:
        super().__init__()
        self.speeds, self.node = speeds, node
        self.now = self.output = 0.0
        self.token_ms = speeds.prompt_ms(_TYPICAL_TOKENS) / _TYPICAL_TOKENS

    def prefill_ms(self, tokens: float) -> float:
        return self.speeds.prompt_ms(int(tokens))

    def prompts_ms(self, tokens: float) -> float:
        return max(0.0, self.node.busy_until - self.now) + self.token_ms * tokens

    def queue_ms(self, tokens: float, requests: int) -> float:
        return self.prompts_ms(tokens)

    def step_ms(self, running: float) -> float:
        here = max(1, self.node.requests)
        return self.speeds.step_ms(running, self.node.context(self.now) * running / here)

    def transfer_ms(self, peer: str, tokens: float) -> float:
        return self.speeds.fetch_ms(min(int(tokens), self.speeds.step_tokens))

    def output_tokens(self, limit: int = 0) -> float:
        return self.output


class Omniscient:
    """Chooses with the formulas of the policy `cost`, and knows all, also how long an answer will be."""

    def __init__(self, nodes: Sequence[Engine], seed: str) -> None:
        self._rng = random.Random(seed)
        self._nodes = nodes
        self._views = [NodeView(url_of(at), rates=_True(node.speeds, node)) for at, node in enumerate(nodes)]

    def choose_prefill(self, stream: Stream, among: Sequence[int], now: float) -> int:
        """The number of the cheapest of these prefill nodes."""
        nodes = self._nodes

        def todo(at: int) -> float:
            node = nodes[at]
            return node.tokens + max(0.0, node.busy_until - now) * 48

        reckoned = self._least(among, todo)
        cached = {}
        for at in reckoned:
            node, view = nodes[at], self._view(at, now)
            view.tokens, view.kv_room = node.tokens, node.cache.free
            cached[view.url] = min(node.cache.cached(stream.blocks), stream.prompt - 1)
        ask = Ask(Role.PREFILL, tokens=stream.prompt, cached=cached)
        return self._cheapest([(prefill_ms(ask, self._views[at]), at) for at in reckoned])

    def choose_decode(self, stream: Stream, among: Sequence[int], now: float, *, whole: bool) -> int:
        """The number of the cheapest of these nodes; `whole`: it computes the prompt, too."""
        reckoned = self._least(among, lambda at: self._nodes[at].requests)
        cached = {}
        for at in reckoned:
            node, view = self._nodes[at], self._view(at, now, stream.output)
            view.kv_room, view.context_tokens, view.tokens = node.free(now), node.context(now), node.tokens
            cached[view.url] = node.cache.cached(stream.blocks)
        ask = Ask(Role.DECODE, tokens=stream.prompt if whole else 0, kv_tokens=stream.prompt, cached=cached)
        return self._cheapest([(decode_ms(ask, self._views[at]), at) for at in reckoned])

    def _view(self, at: int, now: float, output: float = 0.0) -> NodeView:
        view = self._views[at]
        view.requests = self._nodes[at].requests
        rates = view.rates
        assert isinstance(rates, _True)
        rates.now, rates.output = now, output
        return view

    def _least(self, among: Sequence[int], todo: Callable[[int], float]) -> Sequence[int]:
        if len(among) <= _MOST_RECKONED:
            return among
        # Ties in another order each time.
        first = self._rng.randrange(len(among))
        return heapq.nsmallest(_MOST_RECKONED, [*among[first:], *among[:first]], key=todo)

    def _cheapest(self, costs: list[tuple[float, int]]) -> int:
        least = min(costs)[0]
        return self._rng.choice([at for cost, at in costs if cost <= least * (1 + 1e-9)])
