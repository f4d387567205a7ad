"""One leg: post a body to a node, hand on its frames, say how it ended. Decides nothing about
retries.

Over the node's leg stream (router/transport/node_stream.py) if there is one, else as an HTTP request of
its own; and what else is asked of nodes over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Literal

import aiohttp
import msgspec

from kvrelay.router.background import BackgroundTasks
from kvrelay.router.nodes.node import HealthReport, Lease, Node
from kvrelay.router.tls import trusted
from kvrelay.router.transport.node_errors import (
    LOST,
    AttemptFailed,
    Refused,
    TakeFrame,
    ending,
    message_of,
    refusal,
    told_error,
)
from kvrelay.router.transport.node_stream import NodeStreams
from kvrelay.router.transport.vllm_health import vllm_report
from kvrelay.wire.errors import DeadlineExceeded, EngineDead, KvrelayError, NodeFailed
from kvrelay.wire.frames import FRAMES_MEDIA_TYPE, LOAD_HEADER, MALFORMED, FrameKind, FrameReader
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import RouterConfig

__all__ = ["AttemptFailed", "NodeClient", "Refused"]

_DRAIN_DEADLINE_S = 1.0
_KV_DEADLINE_S = 2.0
_QUESTION_DEADLINE_S = 10.0  # 16 MiB of text are tokenized in about as long
_MAX_ERROR_BYTES = 1 << 20
# Below uvicorn's 5 s: a node must never close a kept connection just as a leg is sent on it, which
# would look like a failure of the node.
_KEEP_CONNECTION_S = 2.0
# Others of the node would wait for it while it is on its way: it gets a connection of its own.
_LARGE_BODY_BYTES = 256 << 10

_log = logging.getLogger("kvrelay.router")


class NodeClient:
    """The client side of the router: one pool of HTTP connections for all nodes, and a leg stream
    for each.
    """

    def __init__(self, config: RouterConfig, background: BackgroundTasks) -> None:
        self._config = config
        self._background = background
        self._auth = (
            {"authorization": f"Bearer {config.node_api_key}"} if config.node_api_key else {}
        )
        self._json = {"content-type": "application/json", **self._auth}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEP_CONNECTION_S, ssl=trusted(config)
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_deadline_s),
            auto_decompress=False,
        )
        self._streams = NodeStreams(
            self._auth, trusted(config), config.connect_deadline_s, config.health_deadline_s
        )

    async def close(self) -> None:
        """Close all connections."""
        self._streams.close()
        await self._session.close()

    def forget(self, node: Node) -> None:
        """No legs go there any more."""
        self._streams.forget(node)

    async def run(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str], take: TakeFrame
    ) -> FrameKind:
        """Run one leg on the leased node to its HANDOVER or END frame. Raises AttemptFailed, Refused.

        Cancelling aborts the request on the node.
        """
        stream = self._streams.ready(lease.node)
        if stream is not None and len(body) <= _LARGE_BODY_BYTES:
            return await stream.run(lease, path, body, headers, take)
        async with self.posted(
            lease, path, body, {"accept": FRAMES_MEDIA_TYPE, **headers}
        ) as answer:
            if answer.content_type != FRAMES_MEDIA_TYPE:
                raise AttemptFailed(
                    f"the node answered with {answer.content_type}, not with {FRAMES_MEDIA_TYPE}"
                )
            return await _read_frames(lease, answer.content, take)

    @asynccontextmanager
    async def posted(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Run one leg as an HTTP request of its own: a 200 answer. Raises AttemptFailed, Refused.

        The connection is kept if the block ends well. If it does not, the node aborts the request.
        """
        try:
            async with asyncio.timeout(None) as scope:
                lease.cut = lambda: scope.reschedule(0)
                answer = await self._session.post(
                    lease.node.url + path,
                    data=body,
                    headers={**self._json, **headers},
                    allow_redirects=False,
                )
                try:
                    _note_load_header(lease, answer.headers.get(LOAD_HEADER))
                    if answer.status != 200:
                        raise _refusal(answer, await _read_short(answer.content))
                    yield answer
                except BaseException:
                    answer.close()
                    raise
                self._background.spawn(_read_rest(answer))
        except aiohttp.ClientError as why:
            name, reached = type(why).__name__, not isinstance(why, aiohttp.ClientConnectorError)
            detail = f"{name}: {why}"
            raise AttemptFailed(
                f"the connection failed ({name})", detail=detail, lost=True, reached=reached
            ) from why
        except TimeoutError as why:
            raise AttemptFailed(LOST, lost=True) from why
        except OSError as why:
            raise AttemptFailed(
                "the connection failed", detail=f"the connection failed: {why}", lost=True
            ) from why
        finally:
            lease.cut = None

    async def health(self, node: Node) -> HealthReport | str:
        """Return the node's report, or why it answers that it takes no work.

        Raises EngineDead if the node says that its engine is; ClientError, OSError, TimeoutError.
        """
        timeout = aiohttp.ClientTimeout(total=self._config.health_deadline_s)
        async with self._session.get(
            f"{node.url}/health", timeout=timeout, allow_redirects=False
        ) as answer:
            body = await _read_short(answer.content)
        if answer.status == 200 and not body.strip():
            return await vllm_report(node, lambda path: self._fetch(node, path, timeout))
        try:
            report = msgspec.json.decode(body, type=HealthReport)
        except MALFORMED as why:
            if answer.status == 200:
                return f"its health report is malformed: {why}"
        else:
            if answer.status == 200 or report.draining:
                await self._streams.heard(node, report)
                return report
        error, _ = told_error(body)
        if error.code == EngineDead.code:
            raise EngineDead(error.message)
        return f"its health check answers {answer.status}"

    async def _fetch(
        self, node: Node, path: str, timeout: aiohttp.ClientTimeout
    ) -> tuple[int, bytes]:
        async with self._session.get(
            node.url + path, headers=self._auth, timeout=timeout, allow_redirects=False
        ) as answer:
            return answer.status, await _read_short(answer.content)

    async def ask(self, node: Node, path: str, body: bytes) -> bytes:
        """Return the answer to a short question that runs no leg. Raises AttemptFailed, Refused,
        DeadlineExceeded.
        """
        try:
            async with self._session.post(
                node.url + path,
                data=body,
                headers=self._json,
                timeout=aiohttp.ClientTimeout(total=_QUESTION_DEADLINE_S),
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    raise _refusal(answer, await _read_short(answer.content))
                return await answer.read()
        except TimeoutError as why:
            raise DeadlineExceeded(
                f"a node did not answer within {_QUESTION_DEADLINE_S:g} s; ask for less"
            ) from why
        except (aiohttp.ClientError, OSError) as why:
            raise AttemptFailed(
                f"a node did not answer ({type(why).__name__})", detail=f"{node.url}: {why}"
            ) from why

    async def tell_of_kv(
        self, node: Node, what: Literal["release", "renew"], request_id: str
    ) -> bool:
        """Tell a prefill node that nobody will fetch this KV, or that somebody will once there is
        room.

        Returns False if it could not be told: then the lease ends by itself.
        """
        body = msgspec.json.encode({"request_ids": [request_id]})
        status, said = await self.tell(node, f"/kv/{what}", body, _KV_DEADLINE_S)
        if status >= 300:
            _log.warning(
                "prefill node %s was not told to %s %s: %d, %s",
                node.url,
                what,
                request_id,
                status,
                said,
            )
        return status < 300

    async def tell(self, node: Node, path: str, body: bytes, deadline_s: float) -> tuple[int, str]:
        """Post a small request to a node, and return its status and message. 503 if it cannot be
        reached.
        """
        status, said = await self.call("POST", node, path, body, deadline_s)
        return status, said if isinstance(said, str) else message_of(said)

    async def call(
        self, method: str, node: Node, path: str, body: bytes, deadline_s: float
    ) -> tuple[int, bytes | str]:
        """Send a node a small request. Returns its status and body, or 503 and why it could not be
        reached.
        """
        try:
            async with self._session.request(
                method,
                node.url + path,
                data=body,
                headers=self._json,
                timeout=aiohttp.ClientTimeout(
                    total=deadline_s, connect=self._config.connect_deadline_s
                ),
                allow_redirects=False,
            ) as answer:
                return answer.status, await _read_short(answer.content)
        except (aiohttp.ClientError, OSError) as why:
            return 503, f"it could not be reached: {type(why).__name__}"


async def _read_frames(lease: Lease, content: aiohttp.StreamReader, take: TakeFrame) -> FrameKind:
    reader = FrameReader()
    while chunk := await content.readany():
        try:
            frames = reader.feed(chunk)
        except (NodeFailed, UnicodeDecodeError) as why:
            raise AttemptFailed(f"the node's answer is malformed: {why}") from why
        for frame in frames:
            if frame.load is not None:
                lease.note_load(frame.load)
            if frame.kind not in (FrameKind.TOKENS, FrameKind.TICKET):
                return ending(frame, take)
            if (room := take(frame)) is not None:
                await room
    raise AttemptFailed(f"the answer was cut before its end, {reader.pending} bytes into a frame")


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> KvrelayError:
    """Return what an answer other than 200 means."""
    after = answer.headers.get("retry-after", "")
    error, _ = told_error(body, answer.status)
    return refusal(
        answer.status, error, int(after) if after.isascii() and after.isdigit() else None
    )


async def _read_short(content: aiohttp.StreamReader) -> bytes:
    """Read a body that ought to be short; cut at _MAX_ERROR_BYTES."""
    body = bytearray()
    while len(body) < _MAX_ERROR_BYTES and (chunk := await content.readany()):
        body += chunk
    return bytes(body)


def _note_load_header(lease: Lease, value: str | None) -> None:
    if value is None:
        return
    try:
        lease.note_load(Load.parse(value))
    except MALFORMED:
        _log.warning("node %s reports a malformed load: %.80r", lease.node.url, value)


async def _read_rest(answer: aiohttp.ClientResponse) -> None:
    """Read the few bytes behind the last frame, so that the connection can be used again."""
    try:
        with suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(_DRAIN_DEADLINE_S):
                while await answer.content.readany():
                    pass
    finally:
        answer.close()
