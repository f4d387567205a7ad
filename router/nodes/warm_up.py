"""Nodes meet before a request needs them to: one block goes from each prefill node to each decode node of its model.

The first hand-over of a pair dials, compares, connects the data plane and, with NIXL, sets up its endpoints: 60 to 130
ms, which a client's answer would wait for. A meeting is a probe, as `kvrelay doctor` makes them: a free block with a
known pattern, under a ticket that the source has signed; so it says at the same time whether the two can talk at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from router.legs.legs import LegFailed, Legs, Refused
from router.nodes.node import NodeKind
from router.nodes.pairs import Meeting, Outcome, Pairs
from router.nodes.pool import Pool
from wire.config import Role
from wire.engine_messages import ProbeFetched, ProbeOffered, ProbeRefused
from wire.errors import KvrelayError
from wire.frames import MALFORMED

__all__ = ["warming"]

_TICK_S = 0.1
_LOOK_S = 1.0
"""For what is tried again."""
_NO_SUCH_ROUTE = (404, 405, 501)

_offered: msgspec.json.Decoder[ProbeOffered | ProbeRefused] = msgspec.json.Decoder(ProbeOffered | ProbeRefused)
_fetched: msgspec.json.Decoder[ProbeFetched | ProbeRefused] = msgspec.json.Decoder(ProbeFetched | ProbeRefused)
_log = logging.getLogger("kvrelay.router")


@asynccontextmanager
async def warming(pool: Pool, pairs: Pairs, legs: Legs, count: Callable[[str, Meeting], None]) -> AsyncIterator[None]:
    """Arrange meetings for the length of the block. `count` is told how each went: met, failed, busy or never."""
    task = asyncio.create_task(_arrange(pool, pairs, legs, count))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _arrange(pool: Pool, pairs: Pairs, legs: Legs, count: Callable[[str, Meeting], None]) -> None:
    stirred = asyncio.Event()

    async def meet(meeting: Meeting) -> None:
        outcome = Outcome("cut off", busy=True)
        try:
            outcome = await _meeting(meeting, legs)
        finally:
            pairs.ended(meeting, outcome, time.monotonic())
            stirred.set()
        how = "met" if not outcome.why else "busy" if outcome.busy else "never" if outcome.never else "failed"
        count(how, meeting)
        if outcome.why and not (outcome.busy or outcome.never):
            _log.warning("%s and %s cannot hand over: %s", meeting.prefill.url, meeting.decode.url, outcome.why)

    looked_at = float("-inf")
    here: list[tuple[str, str]] = []
    async with asyncio.TaskGroup() as group:
        while True:
            now = time.monotonic()
            prefill, decode = (pool.up(role, kind=NodeKind.KVRELAY) for role in (Role.PREFILL, Role.DECODE))
            were, here = here, [(node.url, node.generation) for node in (*prefill, *decode)]
            if here != were or stirred.is_set() or now - looked_at >= _LOOK_S:
                looked_at = now
                stirred.clear()
                for meeting in pairs.due(prefill, decode, now):
                    group.create_task(meet(meeting))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stirred.wait(), _TICK_S)


async def _meeting(meeting: Meeting, legs: Legs) -> Outcome:
    source, reader = meeting.prefill, meeting.decode
    ticket = None
    try:
        offer = _offered.decode(await legs.ask(source, "/kv/probe/offer", b'{"blocks": 1}'))
        if isinstance(offer, ProbeRefused):
            return Outcome(offer.reason, busy=offer.busy)
        ticket = offer.ticket
        wish = msgspec.json.encode({"ticket": ticket, "seed": offer.seed})
        fetch = _fetched.decode(await legs.ask(reader, "/kv/probe/fetch", wish))
        if isinstance(fetch, ProbeFetched):
            ticket = None  # the reader has given it back
            return Outcome() if fetch.verified else Outcome("the bytes that came are not those that were sent")
        return Outcome(fetch.reason, busy=fetch.busy)
    except Refused as why:
        return Outcome(why.message, never=why.status in _NO_SUCH_ROUTE)
    except LegFailed as why:
        return Outcome(why.detail, busy=True)  # its health says more
    except KvrelayError as why:
        return Outcome(why.message)
    except MALFORMED as why:
        return Outcome(f"a probe is answered like another version of kvrelay: {why}", never=True)
    finally:
        if ticket is not None:
            # Its lease would end it, too, but the next meeting need not wait for that.
            await legs.release(source, [ticket.remote_request_id or ""])
