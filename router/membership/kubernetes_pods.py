"""Lists the pods of a Kubernetes namespace once a second and tells the pool which nodes they are.

If the API server is away or slow, its last list stays, and each node's health decides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry, Gauge

from kvrelay.router.background import running_task
from kvrelay.router.nodes.node import NodeSpec, Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, RequestError

__all__ = ["api_server", "follow_pods", "listed_gauge", "node_of", "nodes_of"]

_ROLE = "kvrelay/role"
_PORT = "http"  # the name of the container port

RELIST_S = 1.0
# To connect, and between two pieces of a list.
DEADLINES_S = 2.0, 5.0
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_log = logging.getLogger("kvrelay.router")
_Pod = dict[str, Any]


def node_of(pod: _Pod) -> NodeSpec | None:
    """Return the node that a pod is while it is Ready and not terminating.

    Raises RequestError if it cannot be one.
    """
    # Go writes null or leaves a field out.
    metadata, spec, status = (pod.get(part) or {} for part in ("metadata", "spec", "status"))
    ready = any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in status.get("conditions") or ()
    )
    ended = status.get("phase") in ("Succeeded", "Failed") or metadata.get("deletionTimestamp")
    if ended or not ready:
        return None
    role = (metadata.get("labels") or {}).get(_ROLE, "")
    if role not in (Role.PREFILL, Role.DECODE):
        raise RequestError(f"its label {_ROLE} must be prefill or decode, got {role!r}")
    host = status.get("podIP")
    if not host:
        raise RequestError("it has no address")
    ports = [
        port["containerPort"]
        for container in spec.get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("name") == _PORT
    ]
    if not ports:
        raise RequestError(f"it has no container port named {_PORT}")
    url = f"http://[{host}]:{ports[0]}" if ":" in host else f"http://{host}:{ports[0]}"
    return NodeSpec(url, Role(role), metadata["uid"])


def nodes_of(pods: Iterable[_Pod]) -> dict[str, NodeSpec]:
    nodes: dict[str, NodeSpec] = {}
    # An address is given away again when its pod has ended: the younger pod is there.
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or ""):
        try:
            if (node := node_of(pod)) is not None:
                nodes[node.url] = node
        except RequestError as why:
            _complain(pod["metadata"]["name"], why.message)
    return nodes


@lru_cache  # once is enough
def _complain(pod: str, why: str) -> None:
    _log.warning("pod %s cannot be a node: %s", pod, why)


def listed_gauge(registry: CollectorRegistry) -> Gauge:
    return Gauge(
        "kvrelay_router_kubernetes_listed_timestamp_seconds",
        "When all pods were last listed, as Unix time; 0: not yet.",
        registry=registry,
    )


def api_server(namespace: str) -> tuple[str, ssl.SSLContext]:
    """Return the address of a namespace's pods; an empty one is our own. Asks nobody.

    Raises ConfigError outside of a pod.
    """
    try:
        host, port = (os.environ[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
        namespace = namespace or (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        tls = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    except (KeyError, OSError) as why:
        raise ConfigError(
            f"kubernetes_selector asks a Kubernetes API server, and none is known ({why}); run the "
            "router in a pod with a service account"
        ) from why
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{port}/api/v1/namespaces/{namespace}/pods", tls


@asynccontextmanager
async def follow_pods(
    pool: Pool, selector: str, namespace: str, registry: CollectorRegistry
) -> AsyncIterator[None]:
    """Follow pods for the block; with an empty selector do nothing. Raises ConfigError."""
    if not selector:
        yield
        return
    url, tls = api_server(namespace)
    connect_s, read_s = DEADLINES_S
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls),
        timeout=aiohttp.ClientTimeout(connect=connect_s, sock_read=read_s),
        raise_for_status=True,
    )
    _log.info("nodes are the pods at %s that match %s", url, selector)
    async with session, running_task(_follow(pool, session, url, selector, listed_gauge(registry))):
        yield


async def _follow(
    pool: Pool, session: aiohttp.ClientSession, url: str, selector: str, listed: Gauge
) -> None:
    told = True
    while True:
        try:
            token = (ACCOUNT / "token").read_text(encoding="utf-8")  # renewed every hour
            async with session.get(
                url,
                params={"labelSelector": f"{selector},{_ROLE}"},
                headers={"authorization": f"Bearer {token.strip()}"},
                allow_redirects=False,
            ) as answer:
                found = nodes_of(msgspec.json.decode(await answer.read())["items"] or ())
            if found != pool.members[Source.KUBERNETES]:
                pool.set_members(Source.KUBERNETES, found.values(), time.monotonic())
            told = True
            listed.set_to_current_time()
        except Exception as why:  # noqa: BLE001 - the edge of this task: it must go on
            if told:  # once, and again after a list
                told = False
                _log.warning(
                    "the Kubernetes API server does not tell of its pods (%s: %.300s), which the "
                    "service account must be allowed to list; the %d nodes that it named stay, "
                    "and their health decides; trying on",
                    type(why).__name__,
                    why,
                    len(pool.members[Source.KUBERNETES]),
                )
        await asyncio.sleep(RELIST_S)
