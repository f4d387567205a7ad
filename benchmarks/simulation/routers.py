"""The routers of a simulation: the real pool, policies, rates and prefix index, and one that knows everything.

A Router is a replica: it knows its own leases at once, and else what reaches it. The omniscient one reckons with the
same costs, from the true state and the true speeds of all nodes.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Sequence

from benchmarks.simulation.decode_node import DecodeNode
from benchmarks.simulation.prefill_node import PrefillNode
from benchmarks.simulation.stream import Speeds, Stream
from router.nodes.measured import learn
from router.nodes.node import HealthReport, Lease, Node
from router.nodes.pool import Pool
from router.nodes.rates import NodeRates
from router.nodes.room import has_room
from router.policies.cost import decode_ms, prefill_ms
from router.policies.policy import Ask, NodeView
from router.prefix.index import Prefix
from router.prefix.text_tree import CHUNK_BYTES
from wire.config import Role
from wire.frames import Frame, FrameKind
from wire.outputs import Load
from wire.transfer import KvTransferParams

__all__ = ["Omniscient", "Router", "url_of"]

_MODEL = "simulated"
# With more decode nodes, looking at the room of each would take longer than all else.
_ROOM_LOOKED_AT = 64
# Of more nodes than these, the omniscient router reckons with those that have the least to do.
_MOST_RECKONED = 32


def url_of(role: Role, at: int) -> str:
    """The name of a node."""
    return f"http://{role}-{at}"


class Router:
    """One replica. `block_tokens` 0: it knows nothing of prefixes."""

    def __init__(
        self, policies: tuple[str, str], nodes: tuple[int, int], loads: tuple[Load, Load], seed: str, block_tokens: int
    ) -> None:
        roles = (Role.PREFILL, Role.DECODE)
        prefill, decode = ([url_of(role, at) for at in range(many)] for role, many in zip(roles, nodes, strict=True))
        self.pool = Pool(prefill, decode, random.Random(seed), dict(zip(roles, policies, strict=True)))
        for node in self.pool.nodes:
            load = loads[roles.index(node.role)]
            self.pool.report(node, HealthReport(node.role, _MODEL, load=load, generation="1"), 0.0, 0.0)
            if block_tokens:
                self.pool.prefixes.trust(node.url)
        self._block_tokens = block_tokens
        # No other policy reads the rates, and learning takes longer than all else.
        self._learns = "cost" in policies
        self.nodes = {role: self.pool.up(role) for role in roles}
        self._prefixes: dict[Stream, Prefix] = {}
        self._legs: dict[tuple[Stream, Role], Lease] = {}

    def prefill(self, stream: Stream) -> int:
        """The number of the prefill node for it, which is leased."""
        ask = Ask(Role.PREFILL, _MODEL, stream.prompt, session=stream.session, prefix=self._prefix(stream))
        return self._hold(stream, ask, self.nodes[Role.PREFILL])

    def decode(self, stream: Stream) -> int:
        """The number of the decode node for it, which is leased, when the prefill node has begun."""
        peer = self._legs[stream, Role.PREFILL].node.url
        prefix = self._prefixes.get(stream)
        if prefix is not None:
            self.pool.prefixes.learn(prefix)
        ask = Ask(Role.DECODE, _MODEL, kv_tokens=stream.prompt, session=stream.session, prefix=prefix, peer=peer)
        nodes = self.nodes[Role.DECODE]
        if len(nodes) <= _ROOM_LOOKED_AT:
            nodes = [node for node in nodes if has_room(node, ask)] or nodes
        return self._hold(stream, ask, nodes)

    def _hold(self, stream: Stream, ask: Ask, nodes: Sequence[Node]) -> int:
        lease = self._legs[stream, ask.role] = self.pool.hold(ask, nodes)
        return int(lease.node.url.rpartition("-")[2])

    def prefilled(self, stream: Stream, waited_ms: float, took_ms: float) -> None:
        """The prefill leg has ended, and says how long it took."""
        lease = self._legs.pop((stream, Role.PREFILL))
        if self._learns:
            params = KvTransferParams(prompt_token_ids=[0] * stream.prompt, cached_tokens=stream.cached)
            timing = {"queue": waited_ms, "prefill": took_ms}
            learn(lease, Frame(FrameKind.HANDOVER, params=params, timing=timing), 1, None)
        self.pool.give_back(lease)

    def fetched(self, stream: Stream) -> None:
        """The decode leg tells of its first token."""
        lease = self._legs[stream, Role.DECODE]
        lease.node.answered(lease, stream.prompt + 1)

    def ended(self, stream: Stream, decode_took_ms: float, exposed_ms: float, peer: int) -> None:
        """The decode leg has ended."""
        lease = self._legs.pop((stream, Role.DECODE))
        timing = {"exposed": exposed_ms, "decode": decode_took_ms}
        if self._learns:
            frame = Frame(FrameKind.END, timing=timing, usage=(stream.prompt, stream.output, 0))
            learn(lease, frame, stream.output, self.nodes[Role.PREFILL][peer])
        self.pool.give_back(lease)
        self._prefixes.pop(stream, None)

    def reported(self, role: Role, at: int, load: Load, now: float, *, polled: bool) -> None:
        """A node's report has arrived."""
        node = self.nodes[role][at]
        node.note_load(load)
        if polled and self._learns:
            node.rates.age(now / 1e3)

    def kv_events(self, role: Role, at: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        """A node's KV events have arrived."""
        url = url_of(role, at)
        self.pool.prefixes.stored(url, stored)
        self.pool.prefixes.removed(url, removed)

    def _prefix(self, stream: Stream) -> Prefix | None:
        """A block of tokens is a chunk of text. The first request with a text finds no keys of blocks for it."""
        if not self._block_tokens:
            return None
        chunks, text_bytes = array("q", (0, *stream.blocks)), stream.prompt * CHUNK_BYTES // self._block_tokens
        self._prefixes[stream] = Prefix(
            chunks, text_bytes, array("Q", stream.blocks), stream.prompt, self._block_tokens
        )
        return Prefix(chunks, text_bytes)


class _True(NodeRates):
    """The true speeds of one node, for the cost formulas; `now` and `output` belong to what is asked."""

    __slots__ = ("decode", "now", "output", "prefill", "speeds")

    def __init__(self, speeds: Speeds, prefill: PrefillNode | None, decode: DecodeNode | None) -> None:
        super().__init__()
        self.speeds, self.prefill, self.decode = speeds, prefill, decode
        self.now = self.output = 0.0

    def prefill_ms(self, tokens: float) -> float:
        return self.speeds.prompt_ms(int(tokens))

    def queue_ms(self, tokens: float, requests: int = 0) -> float:
        ends = 0.0 if self.prefill is None else max(0.0, self.prefill.busy_until - self.now)
        return ends + self.speeds.prefill_token * tokens

    def step_ms(self, running: float) -> float:
        assert self.decode is not None
        here = max(1, self.decode.requests)
        return self.speeds.step_ms(running, self.decode.context(self.now) * running / here)

    def transfer_ms(self, peer: str, tokens: float) -> float:
        return self.speeds.fetch_ms(min(int(tokens), self.speeds.step_tokens))

    def output_tokens(self, limit: int = 0) -> float:
        return self.output


class Omniscient:
    """Chooses with the formulas of the policy `cost`, and knows all, also how long an answer will be."""

    def __init__(self, speeds: Speeds, prefill: Sequence[PrefillNode], decode: Sequence[DecodeNode], seed: str) -> None:
        self._rng = random.Random(seed)
        self._prefill, self._decode = prefill, decode
        self._prefill_views = [_view(Role.PREFILL, at, _True(speeds, node, None)) for at, node in enumerate(prefill)]
        self._decode_views = [_view(Role.DECODE, at, _True(speeds, None, node)) for at, node in enumerate(decode)]

    def choose_prefill(self, stream: Stream, now: float) -> int:
        """The number of the cheapest prefill node."""
        todo = [node.tokens + (node.busy_until - now if node.busy_until > now else 0.0) * 48 for node in self._prefill]
        reckoned = self._least(todo)
        cached = {}
        for at in reckoned:
            node, (view, rates) = self._prefill[at], self._prefill_views[at]
            view.requests, view.tokens, view.kv_room = node.running + node.waiting, node.tokens, node.cache.free
            rates.now = now
            cached[view.url] = min(node.cache.cached(stream.blocks), stream.prompt - 1)
        ask = Ask(Role.PREFILL, tokens=stream.prompt, cached=cached)
        return self._cheapest([(prefill_ms(ask, self._prefill_views[at][0]), at) for at in reckoned])

    def choose_decode(self, stream: Stream, now: float) -> int:
        """The number of the cheapest decode node."""
        reckoned = self._least([node.requests for node in self._decode])
        cached = {}
        for at in reckoned:
            node, (view, rates) = self._decode[at], self._decode_views[at]
            view.requests, view.kv_room, view.context_tokens = node.requests, node.free(now), node.context(now)
            rates.now, rates.output = now, stream.output
            cached[view.url] = node.cache.cached(stream.blocks)
        ask = Ask(Role.DECODE, kv_tokens=stream.prompt, cached=cached)
        return self._cheapest([(decode_ms(ask, self._decode_views[at][0]), at) for at in reckoned])

    def _least(self, todo: Sequence[float]) -> Sequence[int]:
        if len(todo) <= _MOST_RECKONED:
            return range(len(todo))
        # Ties in another order each time.
        first = self._rng.randrange(len(todo))
        order = [*range(first, len(todo)), *range(first)]
        return heapq.nsmallest(_MOST_RECKONED, order, key=todo.__getitem__)

    def _cheapest(self, costs: list[tuple[float, int]]) -> int:
        least = min(costs)[0]
        return self._rng.choice([at for cost, at in costs if cost <= least * (1 + 1e-9)])


def _view(role: Role, at: int, rates: _True) -> tuple[NodeView, _True]:
    return NodeView(url_of(role, at), rates=rates), rates
