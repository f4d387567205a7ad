"""The clients: each asks, reads its answer, compares it with the twin, and asks again.

Owns their connections.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tests.soak.chaos.asks import Ask
from tests.soak.chaos.streams import Answer, Heard, difference

__all__ = ["KEPT_S", "Crowd", "Seen"]

SALTED = 0.5
DEADLINE_S = 240.0
"""A request that takes longer hangs."""
# A refused client comes back so much later, and one that has lost its router.
_AGAIN_S = 1.0
_SLOW_READS = 50
KEPT_S = 2.0
"""A client's idle connection is closed after so long, up to twice that."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it."""

    number: int
    kind: str
    began: float
    id: str = ""
    """The router's."""
    end: str = ""
    """done; left: the client went away; refused: by its status; error: told in the stream; else a
    broken promise.
    """
    status: int = 0
    error: str = ""
    """What the client was told, or where the answer differs from its twin."""
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """When parts of a stream came."""
    slow: bool = False
    """The client read slowly, or has filled a node itself: its waits are its own."""
    past_router: bool = False

    def gaps(self) -> list[tuple[float, float]]:
        """From when until when the client waited between two parts, or for the end."""
        return list(itertools.pairwise([*self.times, self.ended])) if self.times else []


class Crowd:
    """All clients. `seen` are the requests that have ended, in this order."""

    def __init__(self, url: str, asks: Sequence[Ask], session: aiohttp.ClientSession) -> None:
        self.seen: list[Seen] = []
        self.asked = 0
        self.url, self.session, self.model = url, session, ""
        self._asks = asks
        self._slow = slow_session()
        self._fields: dict[int, dict[str, Any]] = {}
        self._twins: dict[int, Answer] = {}
        self._texts: dict[int, str] = {}

    async def close(self) -> None:
        await self._slow.close()

    async def ask_twins(self, at_once: int) -> None:
        """What is answered without any fault. Raises RuntimeError if that is not complete."""
        async with self.session.get(f"{self.url}/v1/models") as answer:
            self.model = (await answer.json())["data"][0]["id"]
        waiting = list(self._asks)
        free = asyncio.Semaphore(at_once)

        async def one(ask: Ask) -> None:
            if ask.after is not None:
                await known[ask.after]
            async with free:
                self._fields[ask.number] = self._built(ask)
                seen, heard = await self._ask(ask, {})
            if seen.end != "done":
                raise RuntimeError(f"undisturbed, and yet: {seen}")
            self._twins[ask.number], self._texts[ask.number] = heard.answer(), heard.text

        known = {ask.number: asyncio.ensure_future(one(ask)) for ask in waiting}
        await asyncio.gather(*known.values())

    async def keep_asking(self, rng: random.Random, going: Callable[[], bool]) -> None:
        """One client, for as long as it is `going`; the last answer is read to its end."""
        while going():
            seen = await self.ask_one(rng)
            if seen.end not in ("done", "left"):
                await asyncio.sleep(_AGAIN_S)

    async def ask_one(
        self,
        rng: random.Random,
        leave_s: float = float("inf"),
        slow_s: float = 0.0,
        kinds: Collection[str] = (),
        node: str = "",
    ) -> Seen:
        """One request of any kind, or of these. The client leaves after `leave_s`; a slow one waits
        `slow_s` before each of the first reads. `node`: the URL of one, to be asked past the
        router.
        """
        ask = rng.choice([ask for ask in self._asks if not kinds or ask.kind in kinds])
        salt = {"cache_salt": f"{rng.getrandbits(60):x}"} if rng.random() < SALTED else {}
        self.asked += 1
        seen, heard = await self._ask(ask, salt, leave_s, slow_s, node)
        if differs := difference(self._twins[ask.number], heard.answer(), ended=seen.end == "done"):
            seen.error = (
                differs if seen.end == "done" else f"{differs}; and then {seen.end}: {seen.error}"
            )
            seen.end = "unequal"
        self.seen.append(seen)
        return seen

    def _built(self, ask: Ask) -> dict[str, Any]:
        fields = ask.fields
        if ask.then is not None and ask.after is not None:
            fields = ask.then(self._fields[ask.after], self._texts[ask.after])
        return {**fields, "model": self.model}

    async def _ask(
        self,
        ask: Ask,
        more: dict[str, Any],
        leave_s: float = float("inf"),
        slow_s: float = 0.0,
        node: str = "",
    ) -> tuple[Seen, Heard]:
        fields = {**self._fields[ask.number], **more}
        seen = Seen(
            ask.number,
            ask.kind,
            time.monotonic(),
            slow=bool(slow_s or node),
            past_router=bool(node),
        )
        heard = Heard()
        try:
            async with asyncio.timeout(min(leave_s, DEADLINE_S)):
                await self._read(ask, fields, seen, heard, slow_s, node)
        except TimeoutError:
            if leave_s < DEADLINE_S:
                seen.end = "left"
            else:
                seen.end, seen.error = (
                    "hung",
                    f"no end within {DEADLINE_S:g} s, {heard.pieces} parts so far",
                )
        except (aiohttp.ClientError, OSError) as why:
            seen.end, seen.error = "broken", f"{type(why).__name__}: {why}"
        except (msgspec.DecodeError, KeyError, TypeError) as why:
            seen.end, seen.error = "wrong", f"malformed: {why!r}"
        seen.ended = time.monotonic()
        return seen, heard

    async def _read(
        self, ask: Ask, fields: dict[str, Any], seen: Seen, heard: Heard, slow_s: float, node: str
    ) -> None:
        headers = {"content-type": "application/json"}
        if node:  # else hundreds would be kept by one node
            headers["connection"] = "close"
        session = self._slow if slow_s else self.session
        url = (node or self.url) + ask.path
        async with session.post(url, data=msgspec.json.encode(fields), headers=headers) as answer:
            seen.status, seen.id = (
                answer.status,
                "" if node else answer.headers.get("x-request-id", ""),
            )
            if answer.status != 200:
                body = await answer.read()
                seen.error = msgspec.json.decode(body)["error"]["message"]
                seen.end = "refused"
                return
            await asyncio.sleep(slow_s)
            if not fields["stream"]:
                heard.whole(await answer.read())
            else:
                async for line in answer.content:
                    if heard.line(line):
                        seen.times.append(time.monotonic())
                        if slow_s and len(seen.times) < _SLOW_READS:
                            await asyncio.sleep(slow_s)
        end, _, wrong = heard.end.partition(": ")
        seen.end, seen.error = end or "silent", wrong or heard.error


def slow_session() -> aiohttp.ClientSession:
    """Of clients with little room for what they have not read: the router soon has to wait for
    them.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEPT_S, socket_factory=_small_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=1 << 16,
    )


def _small_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*info[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return made
