"""The prefix cache of a vLLM node, and the events that it tells, in the form of three versions.

The cache does what vLLM's block pool does: chains of hashes with a seed of its process, blocks that
are freed stay until others need their place, the longest unused goes first and the end of a chain
before its beginning, equal blocks may be there twice and are then told of twice. The sockets do
what its publisher's do; who speaks otherwise to them breaks a test.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from tests.router.vllm_doubles import Call, Script, ok

END = b"\xff" * 8
BLOCK = 16
Event = dict[str, Any]


def tokens_of(text: str) -> list[int]:
    """A tokenizer: four characters are a token."""
    return [zlib.crc32(text[at : at + 4].encode()) % 50_000 for at in range(0, len(text), 4)]


def prompt_of(body: dict[str, Any]) -> list[int]:
    """The tokens of a request, a template's before and behind its text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    return [1, *tokens_of(prompt if isinstance(prompt, str) else json.dumps(body["messages"])), 2]


async def counted(call: Call) -> web.StreamResponse:
    """Answer as `ok` does; a whole answer tells the length of its prompt."""
    answer = await ok(call)
    if isinstance(answer, web.Response) and answer.status == 200:
        assert isinstance(answer.body, bytes)
        told = json.loads(answer.body)
        told["usage"]["prompt_tokens"] = len(prompt_of(call.body))
        return web.json_response(told)
    return answer


class VllmCache:
    """Blocks of BLOCK tokens. Hashes are bytes."""

    def __init__(self, blocks: int = 10_000, seed: bytes = b"0") -> None:
        self._seed = seed
        self._blocks = blocks
        self._free: OrderedDict[int, None] = OrderedDict((at, None) for at in range(blocks))
        self._hash_of: dict[int, bytes] = {}
        self._held: dict[bytes, dict[int, None]] = {}
        self.contents: dict[bytes, tuple[Any, ...]] = {}
        """By hash, what the block and all before it are made of."""
        self.events: list[Event] = []

    def run(
        self, tokens: Sequence[int], adapter: str = "", salt: str = "", *, reads: bool = True
    ) -> int:
        """Compute a prompt; how many of its tokens were cached.

        `reads` no cache if its log-probabilities are wanted."""
        count = len(tokens) // BLOCK
        hashes, extras, known = self._chain(tokens[: count * BLOCK], adapter, salt)
        cached = self.has(tokens, adapter, salt) // BLOCK if reads else 0
        mine = [next(iter(self._held[each])) for each in hashes[:cached]]
        for block in mine:
            self._free.pop(block, None)
        for each in hashes[cached:]:
            block, _ = self._free.popitem(last=False)
            self._evict(block)
            self._hash_of[block] = each
            self._held.setdefault(each, {})[block] = None
            self.contents[each] = known[each]
            mine.append(block)
        if count > cached:
            self.events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": hashes[cached:],
                    "parent_block_hash": hashes[cached - 1] if cached else None,
                    "token_ids": list(tokens[cached * BLOCK : count * BLOCK]),
                    "block_size": BLOCK,
                    "lora_id": 7 if adapter else None,
                    "medium": "GPU",
                    "lora_name": adapter or None,
                    "extra_keys": extras[cached:],
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )
        for block in reversed(mine):
            self._free[block] = None
        return cached * BLOCK

    def has(self, tokens: Sequence[int], adapter: str = "", salt: str = "") -> int:
        """How many tokens of a prompt are cached; of the last one the logits are wanted, so it
        never is.
        """
        hashes, _, _ = self._chain(tokens[: (len(tokens) - 1) // BLOCK * BLOCK], adapter, salt)
        cached = 0
        while cached < len(hashes) and hashes[cached] in self._held:
            cached += 1
        return cached * BLOCK

    def reset(self) -> None:
        """POST /reset_prefix_cache."""
        self._hash_of.clear()
        self._held.clear()
        self.events.append({"type": "AllBlocksCleared"})

    def held(self) -> set[tuple[Any, ...]]:
        """What the blocks are made of."""
        return {self.contents[each] for each in self._held}

    def _evict(self, block: int) -> None:
        each = self._hash_of.pop(block, None)
        if each is not None:
            del self._held[each][block]
            if not self._held[each]:
                del self._held[each]
            self.events.append(
                {"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU", "group_idx": 0}
            )

    def _chain(
        self, tokens: Sequence[int], adapter: str, salt: str
    ) -> tuple[list[bytes], list[list[str] | None], dict[bytes, tuple[Any, ...]]]:
        hashes: list[bytes] = []
        extras: list[list[str] | None] = []
        known: dict[bytes, tuple[Any, ...]] = {}
        before = self._seed
        for at in range(0, len(tokens), BLOCK):
            extra = [each for each in (adapter, "" if at else salt) if each] or None
            before = hashlib.sha256(
                repr((before, list(tokens[at : at + BLOCK]), extra)).encode()
            ).digest()
            hashes.append(before)
            extras.append(extra)
            known[before] = (tuple(tokens[: at + BLOCK]), adapter, salt)
        return hashes, extras, known


def _number(each: bytes | None) -> int | None:
    return None if each is None else int.from_bytes(each, "big") & 0xFFFF_FFFF_FFFF_FFFF


_FIRST_FIELDS = {"BlockStored": 5, "BlockRemoved": 1, "AllBlocksCleared": 0}
_LATER_FIELDS = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}


def packed(events: Iterable[Event], version: str, ts: float) -> bytes:
    """One batch, as a version writes it."""
    if version.startswith("0.25"):
        optional = ("extra_keys", "group_idx", "kv_cache_spec_kind")
        told = [
            {name: it for name, it in event.items() if it is not None or name not in optional}
            for event in events
        ]
        return msgspec.msgpack.encode({"ts": ts, "events": told, "data_parallel_rank": 0})
    fields, rows = _FIRST_FIELDS if version.startswith("0.9") else _LATER_FIELDS, []
    for event in events:
        kind, *values = event.values()
        if values:
            values[0] = [_number(each) for each in values[0]]
        if kind == "BlockStored":
            values[1] = _number(values[1])
        rows.append([kind, *values[: fields[kind]]])
    return msgspec.msgpack.encode([ts, rows, 0])


class VllmEvents:
    """A publisher: it tells what its cache has to tell."""

    def __init__(self, cache: VllmCache, version: str = "0.25.1", buffer: int = 10_000) -> None:
        self.cache = cache
        self.version = version
        self._numbers = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer)
        context = zmq.asyncio.Context.instance()
        self._pub = zmq.Context.instance().socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.replays = 0

    def publish(self) -> None:
        """A step has ended."""
        if not self.cache.events:
            return
        payload = packed(self.cache.events, self.version, time.time())
        self.cache.events = []
        number = self._numbers.to_bytes(8, "big")
        self._numbers += 1
        self._pub.send_multipart((b"", number, payload))
        self._buffer.append((number, payload))

    def restart(self) -> None:
        """Another process stands at this address."""
        self.cache.__init__(self.cache._blocks, b"another seed")  # type: ignore[misc]
        self._numbers = 0
        self._buffer.clear()

    async def _replay(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            assert len(frames) == 3, frames
            who, empty, start = frames
            assert (empty, len(start)) == (b"", 8)
            self.replays += 1
            for number, payload in list(self._buffer):
                if number >= start:
                    await self._router.send_multipart((who, b"", number, payload))
            await self._router.send_multipart((who, b"", END, b""))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[VllmEvents]:
        task = asyncio.create_task(self._replay())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._pub.close(0)
            self._router.close(0)

    def script(self) -> Script:
        """NodeClient that go through the cache, and say of it what the version says."""

        async def leg(call: Call) -> web.StreamResponse | None:
            tokens, salt = prompt_of(call.body), call.body.get("cache_salt") or ""
            adapter = "" if call.body["model"] not in call.node.adapters else call.body["model"]
            cached = self.cache.run(tokens, adapter, salt)
            self.publish()
            answer = await counted(call)
            if not isinstance(answer, web.Response) or answer.status != 200:
                return answer
            assert isinstance(answer.body, bytes)
            told = json.loads(answer.body)
            told["usage"] |= {"prompt_tokens_details": {"cached_tokens": cached}}
            if call.body.get("return_token_ids") and not self.version.startswith("0.9"):
                (told if call.chat else told["choices"][0])["prompt_token_ids"] = tokens
            return web.json_response(told)

        return leg
