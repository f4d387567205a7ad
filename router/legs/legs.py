"""One leg: post a body to a node, hand on its frames, say how it ended. Decides nothing about retries.

Over the node's leg stream (router/legs/leg_stream.py) if there is one, else as an HTTP request of its own; and what
else is asked of nodes over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec

from router.chores import Chores
from router.legs.leg_endings import LOST, LegFailed, Refused, ending, refusal
from router.legs.leg_stream import LegStreams, TakeFrame
from router.nodes.node import HealthReport, Lease, Node
from router.tls import trusted
from router.vllm.report import vllm_report
from wire.errors import DeadlineExceeded, EngineDead, ErrorBody, KvrelayError, NodeFailed
from wire.frames import FRAMES_MEDIA_TYPE, LOAD_HEADER, MALFORMED, FrameKind, FrameReader
from wire.outputs import Load
from wire.router_config import RouterConfig

__all__ = ["LegFailed", "Legs", "Refused", "TakeFrame", "message_of", "read_rest", "read_short"]

_DRAIN_DEADLINE_S = 1.0
_RELEASE_DEADLINE_S = 2.0
_QUESTION_DEADLINE_S = 10.0  # 16 MiB of text are tokenized in about as long
_MAX_ERROR_BYTES = 1 << 20
# Below uvicorn's 5 s: a node must never close a kept connection just as a leg is sent on it, which would look like a
# failure of the node.
_KEEP_CONNECTION_S = 2.0
# Others of the node would wait for it while it is on its way: it gets a connection of its own.
_LARGE_BODY_BYTES = 256 << 10

_log = logging.getLogger("kvrelay.router")


class _ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


class _Told(msgspec.Struct, frozen=True):
    message: str


class Legs:
    """The client side of the router: one pool of HTTP connections for all nodes, and a leg stream for each."""

    def __init__(self, config: RouterConfig, chores: Chores) -> None:
        self._config = config
        self._chores = chores
        self._auth = {"authorization": f"Bearer {config.node_api_key}"} if config.node_api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_CONNECTION_S, ssl=trusted(config)),
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_deadline_s),
            auto_decompress=False,
        )
        self._streams = LegStreams(self._auth, trusted(config), config.connect_deadline_s, config.health_deadline_s)

    async def close(self) -> None:
        """Close all connections."""
        self._streams.close()
        await self._session.close()

    def forget(self, node: Node) -> None:
        """No legs go there any more."""
        self._streams.forget(node)

    async def run(self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str], take: TakeFrame) -> FrameKind:
        """Run one leg on the leased node to its HANDOVER or END frame. Raises LegFailed, Refused.

        Cancelling aborts the request on the node.
        """
        stream = self._streams.ready(lease.node)
        if stream is not None and len(body) <= _LARGE_BODY_BYTES:
            return await stream.run(lease, path, body, headers, take)
        try:
            async with asyncio.timeout(None) as scope:
                lease.cut = lambda: scope.reschedule(0)
                return await self._exchange(lease, path, body, headers, take)
        except aiohttp.ClientError as why:
            name, reached = type(why).__name__, not isinstance(why, aiohttp.ClientConnectorError)
            detail = f"{name}: {why}"
            raise LegFailed(f"the connection failed ({name})", detail=detail, lost=True, reached=reached) from why
        except TimeoutError as why:
            raise LegFailed(LOST, lost=True) from why
        except OSError as why:
            raise LegFailed("the connection failed", detail=f"the connection failed: {why}", lost=True) from why
        finally:
            lease.cut = None

    async def health(self, node: Node) -> HealthReport | str:
        """The node's report, or why it answers that it takes no work.

        Raises EngineDead if the node says that its engine is; ClientError, OSError, TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=self._config.health_deadline_s)
        async with self._session.get(f"{node.url}/health", timeout=timeout, allow_redirects=False) as answer:
            body = await read_short(answer.content)
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
        error = _error_in(body)
        if error is not None and error.code == EngineDead.code:
            raise EngineDead(error.message)
        return f"its health check answers {answer.status}"

    async def _fetch(self, node: Node, path: str, timeout: aiohttp.ClientTimeout) -> tuple[int, bytes]:
        async with self._session.get(
            node.url + path, headers=self._auth, timeout=timeout, allow_redirects=False
        ) as answer:
            return answer.status, await read_short(answer.content)

    async def ask(self, node: Node, path: str, body: bytes) -> bytes:
        """The answer to a short question that runs no leg. Raises LegFailed, Refused, DeadlineExceeded."""
        try:
            async with self._session.post(
                node.url + path,
                data=body,
                headers={"content-type": "application/json", **self._auth},
                timeout=aiohttp.ClientTimeout(total=_QUESTION_DEADLINE_S),
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    raise _refusal(answer, await read_short(answer.content))
                return await answer.read()
        except TimeoutError as why:
            raise DeadlineExceeded(f"a node did not answer within {_QUESTION_DEADLINE_S:g} s; ask for less") from why
        except (aiohttp.ClientError, OSError) as why:
            raise LegFailed(f"a node did not answer ({type(why).__name__})", detail=f"{node.url}: {why}") from why

    async def release(self, node: Node, request_ids: Sequence[str]) -> bool:
        """Tell a prefill node that nobody will fetch these; False if it could not be told (its lease then ends it)."""
        return await self._tell_of_kv(node, "release", request_ids)

    async def renew(self, node: Node, request_ids: Sequence[str]) -> None:
        """Tell a prefill node that these will be fetched, as soon as there is room for them."""
        await self._tell_of_kv(node, "renew", request_ids)

    async def _tell_of_kv(self, node: Node, what: str, request_ids: Sequence[str]) -> bool:
        try:
            async with self._session.post(
                f"{node.url}/kv/{what}",
                json={"request_ids": list(request_ids)},
                headers=self._auth,
                timeout=aiohttp.ClientTimeout(total=_RELEASE_DEADLINE_S),
                allow_redirects=False,
            ) as answer:
                if answer.status < 300:
                    return True
                _log.warning("prefill node %s answered a %s with %d", node.url, what, answer.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            said = str(why) or f"no answer within {_RELEASE_DEADLINE_S:g} s"
            _log.warning("prefill node %s could not be told to %s %s: %s", node.url, what, request_ids[0], said)
        return False

    async def tell(self, node: Node, path: str, body: bytes, deadline_s: float) -> tuple[int, str]:
        """Post a small request to a node: its status, and its message or the error's. 503 if it cannot be reached."""
        status, said = await self.call("POST", node, path, body, deadline_s)
        return status, said if isinstance(said, str) else message_of(said)

    async def call(self, method: str, node: Node, path: str, body: bytes, deadline_s: float) -> tuple[int, bytes | str]:
        """Send a node a small request: the answer's status and body, or 503 and why it could not be reached."""
        try:
            async with self._session.request(
                method,
                node.url + path,
                data=body,
                headers={"content-type": "application/json", **self._auth},
                timeout=aiohttp.ClientTimeout(total=deadline_s, connect=self._config.connect_deadline_s),
                allow_redirects=False,
            ) as answer:
                return answer.status, await read_short(answer.content)
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            return 503, f"it could not be reached: {type(why).__name__}"

    async def _exchange(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str], take: TakeFrame
    ) -> FrameKind:
        answer = await self._session.post(
            lease.node.url + path,
            data=body,
            headers={"content-type": "application/json", "accept": FRAMES_MEDIA_TYPE, **self._auth, **headers},
            allow_redirects=False,
        )
        ended: FrameKind | None = None
        try:
            _note_load_header(lease, answer.headers.get(LOAD_HEADER))
            if answer.status != 200:
                raise _refusal(answer, await read_short(answer.content))
            if answer.content_type != FRAMES_MEDIA_TYPE:
                raise LegFailed(f"the node answered with {answer.content_type}, not with {FRAMES_MEDIA_TYPE}")
            ended = await _read_frames(lease, answer.content, take)
            return ended
        finally:
            if ended is None:
                answer.close()
            else:
                self._chores.spawn(read_rest(answer))


async def _read_frames(lease: Lease, content: aiohttp.StreamReader, take: TakeFrame) -> FrameKind:
    reader = FrameReader()
    while chunk := await content.readany():
        try:
            frames = reader.feed(chunk)
        except (NodeFailed, UnicodeDecodeError) as why:
            raise LegFailed(f"the node's answer is malformed: {why}") from why
        for frame in frames:
            if frame.load is not None:
                lease.note_load(frame.load)
            if frame.kind not in (FrameKind.TOKENS, FrameKind.TICKET):
                if frame.kind is not FrameKind.ERROR:
                    take(frame)
                return ending(frame)
            if (room := take(frame)) is not None:
                await room
    raise LegFailed(f"the answer was cut before its end, {reader.pending} bytes into a frame")


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> KvrelayError:
    """What an answer other than 200 means."""
    after = answer.headers.get("retry-after", "")
    return refusal(answer.status, _error_in(body), int(after) if after.isascii() and after.isdigit() else None)


def _error_in(body: bytes) -> ErrorBody | None:
    """The error of an OpenAI-shaped answer; None if it has none."""
    try:
        return msgspec.json.decode(body, type=_ErrorAnswer).error
    except MALFORMED:
        return None


def message_of(body: bytes) -> str:
    """What an answer says, whether it is an error or not."""
    error = _error_in(body)
    if error is not None:
        return error.message
    try:
        return msgspec.json.decode(body, type=_Told).message
    except MALFORMED:
        return "no message"


async def read_short(content: aiohttp.StreamReader) -> bytes:
    """A body that ought to be short; cut at _MAX_ERROR_BYTES."""
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


async def read_rest(answer: aiohttp.ClientResponse) -> None:
    """Read the few bytes behind the last frame, so that the connection can be used again."""
    try:
        async with asyncio.timeout(_DRAIN_DEADLINE_S):
            while await answer.content.readany():
                pass
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass
    finally:
        answer.close()
