"""The router's client of its nodes: requests, health checks, small calls. Nothing is retried here.

Our nodes use the stream (node_stream.py), vLLM nodes HTTP.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import msgspec

from kvrelay.openai_api.tls import checked, load_chain
from kvrelay.router.nodes.node import HealthReport, Lease, Node, NodeKind
from kvrelay.router.transport.node_stream import (
    LOST,
    AttemptFailed,
    NodeStream,
    OnFrame,
    error_of_status,
    open_stream,
    parse_error,
)
from kvrelay.router.transport.vllm import deliver_answer, vllm_report
from kvrelay.wire.errors import DeadlineExceeded, EngineDead
from kvrelay.wire.frames import MALFORMED, FrameKind
from kvrelay.wire.router_config import RouterConfig

__all__ = ["NodeClient", "node_tls"]

_QUESTION_DEADLINE_S = 10.0  # enough to tokenize 16 MiB
_MAX_SHORT_BYTES = 1 << 20
_SILENT_CHECKS = 3  # so many missed cut a node's requests
# Below uvicorn's 5 s, so that nodes never close a kept connection under a request.
_KEEP_CONNECTION_S = 2.0


def node_tls(config: RouterConfig) -> ssl.SSLContext | bool:
    """Return the TLS context for nodes; True for the system's authorities. Raises ConfigError."""
    if not (config.ssl_ca_certs or config.node_ssl_certfile):
        return True

    def make() -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=config.ssl_ca_certs or None)
        if config.node_ssl_certfile:
            load_chain(context, config.node_ssl_certfile, config.node_ssl_keyfile)
        return context

    return checked(make, config, ["ssl_ca_certs", "node_ssl_certfile", "node_ssl_keyfile"])


class NodeClient:
    """A client of all nodes: HTTP connections, and a stream for each node."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._auth = (
            {"authorization": f"Bearer {config.node_api_key}"} if config.node_api_key else {}
        )
        self._json = {"content-type": "application/json", **self._auth}
        tls = node_tls(config)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_CONNECTION_S, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_deadline_s),
            auto_decompress=False,
        )
        self._tls = tls
        self._streams: dict[Node, NodeStream] = {}

    async def close(self) -> None:
        for node in list(self._streams):
            self.forget(node)
        await self._session.close()

    def forget(self, node: Node) -> None:
        """Close the stream of a node that is gone."""
        stream = self._streams.pop(node, None)
        if stream is not None:
            stream.give_up("the connection failed", "the node is gone")

    async def heard(self, node: Node, report: HealthReport) -> str | None:
        """Have a stream to the process that reported; return why there is none."""
        if report.leg_version is None:
            self.forget(node)
            return None
        stream = self._streams.get(node)
        if stream is not None and stream.generation != report.generation:
            stream.give_up(LOST)
        if stream is not None and not stream.broken:
            stream.ping(time.monotonic(), _SILENT_CHECKS * self._config.health_deadline_s)
            return None
        try:
            async with asyncio.timeout(self._config.connect_deadline_s):
                self._streams[node] = await open_stream(node, report, self._auth, self._tls)
        except OSError as why:
            return f"its request stream does not open: {why or type(why).__name__}"
        return None

    async def run(
        self,
        lease: Lease,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        on_frame: OnFrame,
        *,
        stream: bool = False,
    ) -> FrameKind:
        """Run a request to its HANDOVER or END frame. Raises AttemptFailed, Refused.

        Cancelling aborts the request on the node.
        """
        if lease.node.kind is NodeKind.VLLM:
            async with self._posted(lease, path, body, headers) as answer:
                return await deliver_answer(answer, lease.role, on_frame, stream=stream)
        opened = self._streams.get(lease.node)
        if opened is None or opened.broken:
            raise AttemptFailed("there is no connection to the node", lost=True, reached=False)
        return await opened.run(lease, path, body, headers, on_frame)

    @asynccontextmanager
    async def _posted(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a request to a vLLM node; yield its answer of 200. Raises AttemptFailed, Refused.

        The node aborts the request unless its answer is read to its end.
        """
        try:
            async with asyncio.timeout(None) as scope:
                lease.cut = lambda: scope.reschedule(0)
                async with self._session.post(
                    lease.node.url + path,
                    data=body,
                    headers={**self._json, **headers},
                    allow_redirects=False,
                ) as answer:
                    if answer.status != 200:
                        error, _ = parse_error(await _read(answer.content), answer.status)
                        after = answer.headers.get("retry-after", "")
                        plain = after.isascii() and after.isdigit()
                        raise error_of_status(answer.status, error, int(after) if plain else None)
                    yield answer
        except (aiohttp.ClientError, OSError) as why:
            if type(why) is TimeoutError:
                raise AttemptFailed(LOST, lost=True) from why
            name, reached = type(why).__name__, not isinstance(why, aiohttp.ClientConnectorError)
            raise AttemptFailed(
                f"the connection failed ({name})",
                detail=f"{name}: {why}",
                lost=True,
                reached=reached,
            ) from why
        finally:
            lease.cut = None

    async def health(self, node: Node) -> HealthReport | str:
        """Return the node's report, or the reason why it takes no requests.

        Raises EngineDead if the node says that its engine is; ClientError, OSError, TimeoutError.
        """
        timeout = aiohttp.ClientTimeout(total=self._config.health_deadline_s)
        status, body = await self._request("GET", node, "/health", timeout)
        if status == 200 and not body.strip():
            fetch = partial(self._request, "GET", node, timeout=timeout, headers=self._auth)
            return await vllm_report(node, fetch)
        try:
            report = msgspec.json.decode(body, type=HealthReport)
        except MALFORMED as why:
            if status == 200:
                return f"its health report is malformed: {why}"
        else:
            if status == 200 or report.draining:
                return await self.heard(node, report) or report
        error, _ = parse_error(body)
        if error.code == EngineDead.code:
            raise EngineDead(error.message)
        return f"its health check answers {status}"

    async def _request(
        self,
        method: str,
        node: Node,
        path: str,
        timeout: aiohttp.ClientTimeout,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        async with self._session.request(
            method,
            node.url + path,
            data=body,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
        ) as answer:
            return answer.status, await _read(answer.content)

    async def ask(self, node: Node, path: str, body: bytes) -> bytes:
        try:
            async with (
                asyncio.timeout(_QUESTION_DEADLINE_S),
                self._posted(Lease(node), path, body, {}) as answer,
            ):
                return await answer.read()
        except TimeoutError as why:
            raise DeadlineExceeded(
                f"a node did not answer within {_QUESTION_DEADLINE_S:g} s; ask for less"
            ) from why

    async def post(
        self, node: Node, path: str, body: bytes, deadline_s: float
    ) -> tuple[int, bytes]:
        """Post a small request; return status and answer, or 503 and why it was not reached."""
        timeout = aiohttp.ClientTimeout(total=deadline_s, connect=self._config.connect_deadline_s)
        try:
            return await self._request("POST", node, path, timeout, body, self._json)
        except (aiohttp.ClientError, OSError) as why:
            return 503, b'{"message":"it could not be reached: %b"}' % type(why).__name__.encode()


async def _read(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    while len(body) < _MAX_SHORT_BYTES and (chunk := await content.readany()):
        body += chunk
    return bytes(body)
