"""Nodes meet before a request needs them to: one block goes from each prefill node to each decode
node of its model.

The first hand-over of a pair dials, compares, connects the data plane and, with NIXL, sets up its
endpoints: 60 to 130 ms, which a client's answer would wait for. A meeting is a probe, as `kvrelay
doctor` makes them: a free block with a known pattern, under a ticket that the source has signed; so
it says at the same time whether the two can talk at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from kvrelay.router.nodes.node import NodeKind
from kvrelay.router.nodes.pairs import Meeting, Outcome, Pairs
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.transport.node_client import AttemptFailed, NodeClient, Refused
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import ProbeFetched, ProbeOffered, ProbeRefused
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.frames import MALFORMED

__all__ = ["meet_for_ever"]

_AT_ONCE = 4
"""Meetings under way, of all nodes; a node has one at a time."""
_LOOK_S = 0.5
"""While there is none to begin."""
_NO_SUCH_ROUTE = (404, 405, 501)

_offered: msgspec.json.Decoder[ProbeOffered | ProbeRefused] = msgspec.json.Decoder(
    ProbeOffered | ProbeRefused
)
_fetched: msgspec.json.Decoder[ProbeFetched | ProbeRefused] = msgspec.json.Decoder(
    ProbeFetched | ProbeRefused
)
_log = logging.getLogger("kvrelay.router")


async def meet_for_ever(
    pool: Pool, pairs: Pairs, legs: NodeClient, count: Callable[[str, Meeting], None]
) -> None:
    """Arrange meetings. `count` is told how each went: met, failed, busy or never."""
    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(_meet(pool, pairs, legs, count))


async def _meet(
    pool: Pool, pairs: Pairs, legs: NodeClient, count: Callable[[str, Meeting], None]
) -> None:
    """Have one meeting after the other."""
    while True:
        prefill, decode = (
            pool.up(role, kind=NodeKind.KVRELAY) for role in (Role.PREFILL, Role.DECODE)
        )
        meeting = pairs.begin(prefill, decode, time.monotonic())
        if meeting is None:
            await asyncio.sleep(_LOOK_S)
            continue
        outcome = await _meeting(meeting, legs)
        pairs.ended(meeting, outcome, time.monotonic())
        count(outcome.how, meeting)
        if outcome.how == "failed":
            _log.warning(
                "%s and %s cannot hand over: %s",
                meeting.prefill.url,
                meeting.decode.url,
                outcome.why,
            )


async def _meeting(meeting: Meeting, legs: NodeClient) -> Outcome:
    source, reader = meeting.prefill, meeting.decode
    ticket = None
    try:
        offer = _offered.decode(await legs.ask(source, "/kv/probe/offer", b'{"blocks": 1}'))
        if isinstance(offer, ProbeRefused):
            return _refused(offer)
        ticket = offer.ticket
        wish = msgspec.json.encode({"ticket": ticket, "seed": offer.seed})
        fetch = _fetched.decode(await legs.ask(reader, "/kv/probe/fetch", wish))
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
            # Its lease would end it, too, but the next meeting need not wait for that.
            await legs.tell_of_kv(source, "release", ticket.remote_request_id or "")


def _refused(answer: ProbeRefused) -> Outcome:
    return Outcome("busy" if answer.busy else "failed", answer.reason)
