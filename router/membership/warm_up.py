"""Warms up pairs of nodes before a request needs them: one block goes from prefill to decode node.

The first hand-over of a pair dials, compares, connects the data plane and, with NIXL, sets up its
endpoints: 60 to 130 ms, which a client's answer would wait for. A warm-up is a probe, as `kvrelay
doctor` makes them: a free block with a known pattern, under a ticket that the source has signed; so
it shows at the same time whether the two can hand over at all.

A pair is of two processes: with another generation of either it is another pair. A large cluster
does not warm up all pairs: each node has so many partners, first those with the fewest, then the
busiest. Other pairs work as well; their first hand-over takes longer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.transport.node_client import AttemptFailed, NodeClient, Refused
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import ProbeFetched, ProbeOffered, ProbeRefused
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.frames import MALFORMED

__all__ = ["NO_PAIRS", "PARTNERS", "Outcome", "WarmPairs", "WarmUp", "WarmUps", "warm_up_for_ever"]

PARTNERS = 32
"""How many others a node is warmed up with at most."""
_RETRY_S = {"failed": 60.0, "busy": 1.0}
_AT_ONCE = 4  # of all nodes; a node has one at a time
_IDLE_S = 0.5
_NO_SUCH_ROUTE = (404, 405, 501)

_offered: msgspec.json.Decoder[ProbeOffered | ProbeRefused] = msgspec.json.Decoder(
    ProbeOffered | ProbeRefused
)
_fetched: msgspec.json.Decoder[ProbeFetched | ProbeRefused] = msgspec.json.Decoder(
    ProbeFetched | ProbeRefused
)
_log = logging.getLogger("kvrelay.router")

WarmPairs = tuple[int, list[tuple[str, str, str, float]]]
"""How many pairs are warm, and those that failed: both addresses, why, and when to try again."""
NO_PAIRS: WarmPairs = (0, [])
_Side = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An end of a warm-up. `busy`: try again soon; `never`: the nodes cannot be asked."""

    how: Literal["met", "failed", "busy", "never"]
    why: str = ""


@dataclass(eq=False, slots=True)
class WarmUp:
    """A probe between two nodes."""

    prefill: Node
    decode: Node
    outcome: Outcome | None = None
    """None while it is under way."""
    again_at: float = inf


class WarmUps:
    """A record of all pairs that are warm or being warmed up. Pure.

    Nodes without a generation have none: nobody would know when they start anew.
    """

    def __init__(self) -> None:
        self._by_pair: dict[tuple[_Side, _Side], WarmUp] = {}

    def begin(self, prefill: Sequence[Node], decode: Sequence[Node], now: float) -> WarmUp | None:
        """Return the next warm-up of these nodes, which are up, if any is due; `end` must follow."""
        sources, readers = ({_side(node) for node in nodes} for nodes in (prefill, decode))
        self._by_pair = {
            (source, reader): each
            for (source, reader), each in self._by_pair.items()
            if each.outcome is None
            or (now < each.again_at and source in sources and reader in readers)
        }
        partners: Counter[str] = Counter()
        busy: set[str] = set()
        for (source, reader), each in self._by_pair.items():
            urls = source[0], reader[0]
            partners.update(urls)
            if each.outcome is None:
                busy.update(urls)

        def in_turn(nodes: Sequence[Node]) -> list[Node]:
            free = [
                node
                for node in nodes
                if node.generation and node.url not in busy and partners[node.url] < PARTNERS
            ]
            return sorted(free, key=lambda node: (partners[node.url], -node.depth, node.url))

        free_sources = in_turn(prefill)
        for reader_node in in_turn(decode):
            for source_node in free_sources:
                key = _side(source_node), _side(reader_node)
                if source_node.model == reader_node.model and key not in self._by_pair:
                    warm_up = self._by_pair[key] = WarmUp(source_node, reader_node)
                    return warm_up
        return None

    def end(self, warm_up: WarmUp, outcome: Outcome, now: float) -> None:
        """Record how it went. A pair that has failed or was busy is tried again after a while."""
        warm_up.outcome = outcome
        warm_up.again_at = now + _RETRY_S.get(outcome.how, inf)

    def pairs(self) -> WarmPairs:
        """Return the pairs that are warm, and those that failed; busy ones are neither."""
        over = [(each, each.outcome) for each in self._by_pair.values() if each.outcome is not None]
        failed = [
            (each.prefill.url, each.decode.url, end.why, each.again_at)
            for each, end in over
            if end.how == "failed"
        ]
        return sum(end.how == "met" for _, end in over), failed


def _side(node: Node) -> _Side:
    return node.url, node.generation


async def warm_up_for_ever(
    pool: Pool, warm_ups: WarmUps, client: NodeClient, on_end: Callable[[WarmUp, Outcome], None]
) -> None:
    """Warm up pairs until cancelled; `on_end` is called after each."""
    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(_warm_up_one_by_one(pool, warm_ups, client, on_end))


async def _warm_up_one_by_one(
    pool: Pool, warm_ups: WarmUps, client: NodeClient, on_end: Callable[[WarmUp, Outcome], None]
) -> None:
    while True:
        prefill, decode = (
            pool.up(role, kind=NodeKind.KVRELAY) for role in (Role.PREFILL, Role.DECODE)
        )
        warm_up = warm_ups.begin(prefill, decode, time.monotonic())
        if warm_up is None:
            await asyncio.sleep(_IDLE_S)
            continue
        outcome = await _probe(warm_up.prefill, warm_up.decode, client)
        warm_ups.end(warm_up, outcome, time.monotonic())
        on_end(warm_up, outcome)
        if outcome.how == "failed":
            pair = warm_up.prefill.url, warm_up.decode.url
            _log.warning("%s and %s cannot hand over: %s", *pair, outcome.why)


async def _probe(source: Node, reader: Node, client: NodeClient) -> Outcome:
    ticket = None
    try:
        offer = _offered.decode(await client.ask(source, "/kv/probe/offer", b'{"blocks": 1}'))
        if isinstance(offer, ProbeRefused):
            return _refused(offer)
        ticket = offer.ticket
        body = msgspec.json.encode({"ticket": ticket, "seed": offer.seed})
        fetch = _fetched.decode(await client.ask(reader, "/kv/probe/fetch", body))
        if isinstance(fetch, ProbeFetched):
            ticket = None  # the reader has given it back
            if fetch.verified:
                return Outcome("met")
            return Outcome("failed", "the bytes that came are not those that were sent")
        return _refused(fetch)
    except Refused as why:
        return Outcome("never" if why.status in _NO_SUCH_ROUTE else "failed", why.message)
    except AttemptFailed as why:
        return Outcome("busy", why.detail)  # its health says more
    except KvrelayError as why:
        return Outcome("failed", why.message)
    except MALFORMED as why:
        return Outcome("never", f"a probe is answered like another version of kvrelay: {why}")
    finally:
        if ticket is not None:
            # Its lease would end it, too, but the next warm-up need not wait for that.
            await client.tell_of_kv(source, "release", ticket.remote_request_id or "")


def _refused(answer: ProbeRefused) -> Outcome:
    return Outcome("busy" if answer.busy else "failed", answer.reason)
