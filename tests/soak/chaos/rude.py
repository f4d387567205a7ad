"""Clients that do not behave: they leave in the middle, read slowly, send what nobody should, or
ask for too much.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import aiohttp
import msgspec

from kvrelay.wire.outputs import Load
from tests.soak.chaos.crowd import Crowd, Seen
from tests.soak.chaos.processes import Cluster, Node
from tests.soak.chaos.verdict import Span, meets

__all__ = ["Rude", "Rudeness"]

_ANSWER_S = 20.0
_OVER_BYTES = 17 << 20
# Of a node's KV, what those who fill it ask for together; how many they are at most; and how long
# it is tried.
_OVERFULL, _MOST, _FILL_S = 1.4, 200, 60.0
_Body = Callable[[random.Random, str], bytes]


class Rudeness(NamedTuple):
    """What was answered wrongly, and when it was asked.

    No node that is up excuses a 503: what only a node could say of it is not known then.
    """

    asked: float
    told: str
    status: int = 0

    def excused(self, no_router: Iterable[Span], no_node: Iterable[Span]) -> bool:
        """Whether it is; spans may have begun or ended while it was waited for."""
        spans = [*no_router, *(no_node if self.status == 503 else ())]
        return meets(self.asked - 2, self.asked + _ANSWER_S + 1, spans)


class Rude:
    """All of them. `answers`: how often nonsense was answered how."""

    def __init__(self, cluster: Cluster, crowd: Crowd, longest: int) -> None:
        self._cluster, self._crowd, self._longest = cluster, crowd, longest
        self.answers: Counter[str] = Counter()
        self.preemptions = 0.0
        self.broken: list[Rudeness] = []

    async def do(self, kind: str, count: int, for_s: float, rng: random.Random) -> None:
        rngs = [random.Random(rng.getrandbits(32)) for _ in range(count)]
        if kind == "leavers":
            await asyncio.gather(
                *(self._crowd.ask_one(each, leave_s=each.expovariate(2.0)) for each in rngs)
            )
        elif kind == "slow readers":
            await asyncio.gather(*(self._crowd.ask_one(each, slow_s=for_s / 50) for each in rngs))
        elif kind == "crush":
            await asyncio.gather(
                *(self._crowd.ask_one(each, kinds=("long prompt", "long answer")) for each in rngs)
            )
        elif kind == "full KV":
            await self._fill(rng)
        elif kind == "oversized":
            await asyncio.gather(*(self._oversized(each) for each in rngs))
        else:
            await asyncio.gather(*(self._malformed(each) for each in rngs))

    async def _fill(self, rng: random.Random) -> None:
        until = time.monotonic() + _FILL_S
        while time.monotonic() < until:
            node = rng.choice([node for node in self._cluster.nodes if node.role == "decode"])
            told, before = await self._cluster.health(node), await self._preemptions(node)
            if told is not None:
                await self._ask_for_more(node, msgspec.convert(told["load"], Load), rng)
                if (more := await self._preemptions(node) - before) > 0:
                    self.preemptions += more
                    return
            await asyncio.sleep(1.0)

    async def _preemptions(self, node: Node) -> float:
        return (await self._cluster.metrics(node)).get("vllm:num_preemptions_total", 0.0)

    async def _ask_for_more(self, node: Node, load: Load, rng: random.Random) -> None:
        tokens = self._crowd.mean_tokens("long answer")
        count = min(_MOST, round(_OVERFULL * load.total_blocks * load.block_size / tokens))
        rngs = [random.Random(rng.getrandbits(32)) for _ in range(count)]
        await asyncio.gather(*(self._ask_node(node, each) for each in rngs))

    async def _ask_node(self, node: Node, rng: random.Random) -> Seen:
        seen = await self._crowd.ask_one(rng, kinds=("long answer",), node=node.url)
        if seen.end in ("broken", "refused", "error") and node.was_down(seen.began, seen.ended):
            seen.end = "left"
        return seen

    async def _oversized(self, rng: random.Random) -> None:
        model = self._crowd.model.encode()
        body, status = b'{"model": "%b", "prompt": "%b"}' % (model, b"a" * _OVER_BYTES), 413
        if rng.random() < 0.5:
            body, status = b'{"model": "%b", "prompt": "%b"}' % (model, b"a " * 5000), 400
        await self._post("/v1/completions", body, (status,), "oversized")

    async def _malformed(self, rng: random.Random) -> None:
        path = rng.choice(["/v1/completions", "/v1/chat/completions"])
        body = rng.choice(_BODIES)(rng, self._crowd.model)
        await self._post(path, body, (400, 404, 413, 422), f"malformed {body[:60]!r}")

    async def _post(self, path: str, body: bytes, allowed: tuple[int, ...], what: str) -> None:
        url, timeout = self._crowd.url + path, aiohttp.ClientTimeout(total=_ANSWER_S)
        headers = {"content-type": "application/json"}
        now = asyncio.get_running_loop().time()
        try:
            async with self._crowd.session.post(
                url, data=body, headers=headers, timeout=timeout
            ) as answer:
                told = (await answer.read())[:200]
            self.answers[str(answer.status)] += 1
            if answer.status not in (*allowed, 429):
                self.broken.append(
                    Rudeness(
                        now, f"{what} was answered with {answer.status}: {told!r}", answer.status
                    )
                )
        except (aiohttp.ClientError, OSError) as why:
            # A server may answer and close while a body too long is still being sent.
            self.answers[type(why).__name__] += 1
            if isinstance(why, TimeoutError):
                self.broken.append(Rudeness(now, f"{what} was not answered within {_ANSWER_S:g} s"))


def _with(**fields: object) -> _Body:
    return lambda _, model: json.dumps(
        {"model": model, "prompt": "tide", "messages": [], **fields}
    ).encode()


_BODIES: list[_Body] = [
    lambda rng, _: rng.randbytes(rng.randint(1, 4000)),
    lambda _, model: json.dumps({"model": model, "prompt": "tide"}).encode()[:-5],
    lambda rng, _: b"[" * rng.randint(100, 100_000),
    lambda _, __: b"null",
    _with(model="never heard of"),
    _with(prompt={"a": 1}, messages=5),
    _with(max_tokens=-1),
    _with(prompt=[2**70], messages=[{"role": 7, "content": "tide"}]),
    _with(stop=[["a"]], messages=[{"role": "user"}]),
]
