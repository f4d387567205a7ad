"""The clients: each asks, reads its answer, compares it with the twin, and asks again. Owns their connections.

The twins are asked before anything is struck. Half of the later asks have a cache salt of their own, so that nobody has
their KV: it must be computed and handed over again.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from benchmarks.chaos.asks import Ask
from benchmarks.chaos.streams import Answer, Heard, difference

__all__ = ["Crowd", "Seen"]

SALTED = 0.5
# A refused client comes back after as long as it is told to, or this.
_AGAIN_S = 1.0
_MODEL_DEADLINE_S = 10.0


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. Seconds on the monotonic clock."""

    number: int
    kind: str
    began: float
    id: str = ""
    """The router's."""
    end: str = ""
    """done; refused: by its status; error: told in the stream; else a broken promise."""
    status: int = 0
    error: str = ""
    """What the client was told, or where the answer differs from its twin."""
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """When parts of a stream came."""

    @property
    def honest(self) -> bool:
        """It failed, and said so."""
        return self.end in ("refused", "error")

    def gap(self) -> tuple[float, float]:
        """From when until when the client waited longest between two parts, or for the end."""
        moments = [*self.times, self.ended] if self.times else []
        pairs = list(itertools.pairwise(moments))
        return max(pairs, key=lambda pair: pair[1] - pair[0], default=(self.began, self.began))

    def gap_at(self, moment: float) -> float:
        """Seconds between the two parts around a moment; 0 if it was not between two."""
        after = bisect.bisect_left(self.times, moment)
        return self.times[after] - self.times[after - 1] if 0 < after < len(self.times) else 0.0


class Crowd:
    """All clients. `seen` are the requests that have ended, in this order."""

    def __init__(self, url: str, asks: Sequence[Ask], session: aiohttp.ClientSession, deadline_s: float) -> None:
        self.seen: list[Seen] = []
        self.asked = 0
        self._url, self._asks, self._session, self._deadline_s = url, asks, session, deadline_s
        self._fields: dict[int, dict[str, Any]] = {}
        self._twins: dict[int, Answer] = {}
        self._texts: dict[int, str] = {}

    async def ask_twins(self, at_once: int) -> None:
        """What is answered without any fault. Raises RuntimeError if that is not complete."""
        async with self._session.get(f"{self._url}/v1/models") as answer:
            self._model = (await answer.json())["data"][0]["id"]
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
            ask = rng.choice(self._asks)
            salt = {"cache_salt": f"{rng.getrandbits(60):x}"} if rng.random() < SALTED else {}
            self.asked += 1
            seen, heard = await self._ask(ask, salt)
            if seen.end == "done" and (differs := difference(self._twins[ask.number], heard.answer())):
                seen.end, seen.error = "unequal", differs
            self.seen.append(seen)
            if seen.end == "refused":
                await asyncio.sleep(_AGAIN_S)

    def body(self, number: int) -> dict[str, Any]:
        """What is asked, for who wants to ask it again."""
        return self._fields[number]

    def _built(self, ask: Ask) -> dict[str, Any]:
        fields = ask.fields
        if ask.then is not None and ask.after is not None:
            fields = ask.then(self._fields[ask.after], self._texts[ask.after])
        return {**fields, "model": self._model}

    async def _ask(self, ask: Ask, more: dict[str, Any]) -> tuple[Seen, Heard]:
        fields = {**self._fields[ask.number], **more}
        seen, heard = Seen(ask.number, ask.kind, time.monotonic()), Heard()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._read(ask, fields, seen, heard)
        except TimeoutError:
            seen.end, seen.error = "hung", f"no end within {self._deadline_s:g} s, {heard.pieces} parts so far"
        except (aiohttp.ClientError, OSError) as why:
            seen.end, seen.error = "broken", f"{type(why).__name__}: {why}"
        except (msgspec.DecodeError, KeyError, TypeError) as why:
            seen.end, seen.error = "wrong", f"malformed: {why!r}"
        seen.ended = time.monotonic()
        return seen, heard

    async def _read(self, ask: Ask, fields: dict[str, Any], seen: Seen, heard: Heard) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post(
            self._url + ask.path, data=msgspec.json.encode(fields), headers=headers
        ) as answer:
            seen.status, seen.id = answer.status, answer.headers.get("x-request-id", "")
            if answer.status != 200:
                body = await answer.read()
                seen.error = msgspec.json.decode(body)["error"]["message"]
                seen.end = "refused"
                return
            if not fields["stream"]:
                heard.whole(await answer.read())
            else:
                async for line in answer.content:
                    if heard.line(line):
                        seen.times.append(time.monotonic())
        end, _, wrong = heard.end.partition(": ")
        seen.end, seen.error = end or "silent", wrong or heard.error
