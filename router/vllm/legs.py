"""One leg over HTTP on a vLLM node: OpenAI's bytes, whole or as events. Decides nothing about retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp

from openai_api.sse import DONE
from router.chores import Chores
from router.legs.leg_endings import LOST
from router.legs.legs import LegFailed, Refused, read_rest, read_short
from router.nodes.node import Lease, Node
from router.tls import trusted
from router.vllm.bodies import error_in, told_error
from wire.errors import ErrorBody, KvrelayError, NodeFailed
from wire.router_config import RouterConfig

__all__ = ["NotReached", "PutEvents", "VllmLegs"]

PutEvents = Callable[[bytes], Awaitable[None]]
"""Given whole events in order; may wait until the client has room for more."""

_MAX_ANSWER_BYTES = 64 << 20
_END_OF_EVENT = b"\n\n"

_log = logging.getLogger("kvrelay.router")


class NotReached(LegFailed):
    """Nobody listens there: the node has not heard of the request."""


class VllmLegs:
    """The HTTP client side towards vLLM nodes."""

    def __init__(self, config: RouterConfig, chores: Chores) -> None:
        self._without_forced_tools: set[tuple[str, str]] = set()
        self._chores = chores
        self._auth = {"authorization": f"Bearer {config.node_api_key}"} if config.node_api_key else {}
        # vLLM's server closes kept connections after 5 s; see router/legs/legs.py.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0, ssl=trusted(config)),
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_deadline_s),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def forces_tools(self, node: Node) -> bool:
        """Whether a forced tool call of one token is not known to fail on this process of a prefill node."""
        return (node.url, node.generation) not in self._without_forced_tools

    def note_without_forced_tools(self, node: Node) -> None:
        """It has failed on one, as several versions do."""
        self._without_forced_tools.add((node.url, node.generation))

    async def whole(self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The body of a 200 answer. Raises NotReached, LegFailed, Refused.

        Cancelling closes the connection, which aborts the request on the node; so for `events`.
        """
        async with self._answer(lease, path, body, headers) as answer:
            held = bytearray()
            while chunk := await answer.content.readany():
                held += chunk
                if len(held) > _MAX_ANSWER_BYTES:
                    raise LegFailed(f"the node's answer is longer than {_MAX_ANSWER_BYTES} bytes")
            return bytes(held)

    async def events(self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str], put: PutEvents) -> None:
        """Pass on a stream's events, each whole, to its [DONE]. Raises NotReached, LegFailed, Refused.

        An event that tells of an error is raised, not passed on.
        """
        async with self._answer(lease, path, body, headers) as answer:
            if answer.content_type != "text/event-stream":
                raise LegFailed(f"the node answered a stream with {answer.content_type}")
            held = b""
            while chunk := await answer.content.readany():
                held += chunk
                end = held.rfind(_END_OF_EVENT) + len(_END_OF_EVENT)
                if end < len(_END_OF_EVENT):
                    if len(held) > _MAX_ANSWER_BYTES:
                        raise LegFailed(f"the node sent an event of more than {_MAX_ANSWER_BYTES} bytes")
                    continue
                events, held = held[:end], held[end:]
                if (broke := error_in(events)) is not None:
                    at, error, status = broke
                    if at:
                        await put(events[:at])
                    raise _meaning(status, error, None)
                await put(events)
                if events.endswith(DONE):
                    return
            raise LegFailed(f"the stream was cut before its end, {len(held)} bytes into an event")

    @asynccontextmanager
    async def _answer(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200 answer, its connection kept if the block ends well."""
        try:
            async with asyncio.timeout(None) as scope:
                lease.cut = lambda: scope.reschedule(0)
                answer = await self._session.post(
                    lease.node.url + path,
                    data=body,
                    headers={"content-type": "application/json", **self._auth, **headers},
                    allow_redirects=False,
                )
                well = False
                try:
                    if answer.status != 200:
                        raise _refusal(answer, await read_short(answer.content))
                    yield answer
                    well = True
                finally:
                    if well:
                        self._chores.spawn(read_rest(answer))
                    else:
                        answer.close()
        except aiohttp.ClientConnectorError as why:
            raise NotReached("the connection failed", detail=f"{type(why).__name__}: {why}") from why
        except aiohttp.ClientError as why:
            name = type(why).__name__
            raise LegFailed(f"the connection failed ({name})", detail=f"{name}: {why}", lost=True) from why
        except TimeoutError as why:
            raise LegFailed(LOST, lost=True) from why
        except OSError as why:
            raise LegFailed("the connection failed", detail=f"the connection failed: {why}", lost=True) from why
        finally:
            lease.cut = None


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> KvrelayError:
    """What an answer other than 200 means."""
    if answer.status in (401, 403):
        # The client's key is not the nodes' key: this is the operator's mistake, not the client's.
        _log.error("a node refused the router's key; give the router the nodes' key as node_api_key")
        return Refused(NodeFailed.status, ErrorBody("a node refused the router's key", NodeFailed.type), None)
    after = answer.headers.get("retry-after", "")
    error, _ = told_error(body, answer.status)
    return _meaning(answer.status, error, int(after) if after.isascii() and after.isdigit() else None)


def _meaning(status: int, error: ErrorBody, retry_after_s: int | None) -> KvrelayError:
    if 400 <= status < 500:
        return Refused(status, error, retry_after_s)
    return LegFailed(error.message, max(status, 500), retry_after_s)
