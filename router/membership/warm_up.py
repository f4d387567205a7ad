"""Warms up pairs of nodes before a request needs them: one block goes from prefill to decode node.

The first hand-over of a pair dials, compares and connects: 60 to 130 ms, which a client would wait
for. A warm-up is a probe, as `kvrelay doctor` makes them, and shows whether the two can hand over.

A pair is of two processes: with another generation of either it is another pair. In a large cluster
each node has so many partners, first those with the fewest.
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

__all__ = ["NO_PAIRS", "PARTNERS", "How", "WarmPairs", "WarmUp", "WarmUps", "warm_up_for_ever"]

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
How = Literal["met", "failed", "busy", "never"]
"""How a warm-up ended; `busy`: try again soon, `never`: the nodes cannot be asked."""
_Pair = tuple[tuple[str, str], tuple[str, str]]


@dataclass(eq=False, slots=True)
class WarmUp:
    """A probe between two nodes; `how` is None while it is under way."""

    prefill: Node
    decode: Node
    how: How | None = None
    why: str = ""
    again_at: float = inf


class WarmUps:
    """A record of all pairs that are warm or being warmed up. Pure.

    Nodes without a generation have none: nobody would know when they start anew.
    """

    def __init__(self) -> None:
        self._by_pair: dict[_Pair, WarmUp] = {}

    def begin(self, prefill: Sequence[Node], decode: Sequence[Node], now: float) -> WarmUp | None:
        """Return the next warm-up of these nodes, which are up, if any is due; `end` must follow."""
        there = {(node.url, node.generation) for node in (*prefill, *decode)}
        self._by_pair = {
            pair: each
            for pair, each in self._by_pair.items()
            if each.how is None or (now < each.again_at and there.issuperset(pair))
        }
        partners = Counter(url for pair in self._by_pair for url, _ in pair)
        busy = {url for pair, each in self._by_pair.items() if each.how is None for url, _ in pair}

        def in_turn(nodes: Sequence[Node]) -> list[Node]:
            free = [
                node
                for node in nodes
                if node.generation and node.url not in busy and partners[node.url] < PARTNERS
            ]
            return sorted(free, key=lambda node: (partners[node.url], node.url))

        sources = in_turn(prefill)
        for reader in in_turn(decode):
            for source in sources:
                pair = (source.url, source.generation), (reader.url, reader.generation)
                if source.model == reader.model and pair not in self._by_pair:
                    self._by_pair[pair] = WarmUp(source, reader)
                    return self._by_pair[pair]
        return None

    def end(self, warm_up: WarmUp, how: How, why: str, now: float) -> None:
        warm_up.how, warm_up.why = how, why
        warm_up.again_at = now + _RETRY_S.get(how, inf)

    def pairs(self) -> WarmPairs:
        """Return the pairs that are warm, and those that failed; busy ones are neither."""
        failed = [
            (each.prefill.url, each.decode.url, each.why, each.again_at)
            for each in self._by_pair.values()
            if each.how == "failed"
        ]
        return sum(each.how == "met" for each in self._by_pair.values()), failed


async def warm_up_for_ever(
    pool: Pool, warm_ups: WarmUps, client: NodeClient, on_end: Callable[[WarmUp], None]
) -> None:
    async def one_by_one() -> None:
        while True:
            prefill, decode = (
                pool.up(role, kind=NodeKind.KVRELAY) for role in (Role.PREFILL, Role.DECODE)
            )
            warm_up = warm_ups.begin(prefill, decode, time.monotonic())
            if warm_up is None:
                await asyncio.sleep(_IDLE_S)
                continue
            how, why = await _probe(warm_up.prefill, warm_up.decode, client)
            warm_ups.end(warm_up, how, why, time.monotonic())
            on_end(warm_up)
            if how == "failed":
                pair = warm_up.prefill.url, warm_up.decode.url
                _log.warning("%s and %s cannot hand over: %s", *pair, why)

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(one_by_one())


async def _probe(source: Node, reader: Node, client: NodeClient) -> tuple[How, str]:
    ticket = None
    try:
        offer = _offered.decode(await client.ask(source, "/kv/probe/offer", b'{"blocks": 1}'))
        if isinstance(offer, ProbeRefused):
            return _refused(offer)
        ticket = offer.ticket
        body = msgspec.json.encode({"ticket": ticket, "seed": offer.seed})
        fetch = _fetched.decode(await client.ask(reader, "/kv/probe/fetch", body))
        if isinstance(fetch, ProbeRefused):
            return _refused(fetch)
        ticket = None  # the reader has given it back
        if fetch.verified:
            return "met", ""
        return "failed", "the bytes that came are not those that were sent"
    except Refused as why:
        return "never" if why.status in _NO_SUCH_ROUTE else "failed", why.message
    except AttemptFailed as why:
        return "busy", why.detail  # its health says more
    except KvrelayError as why:
        return "failed", why.message
    except MALFORMED as why:
        return "never", f"a probe is answered like another version of kvrelay: {why}"
    finally:
        if ticket is not None:
            # Its lease would end it, too, but the next warm-up need not wait for that.
            await client.tell_of_kv(source, "release", ticket.remote_request_id or "")


def _refused(answer: ProbeRefused) -> tuple[How, str]:
    return "busy" if answer.busy else "failed", answer.reason
