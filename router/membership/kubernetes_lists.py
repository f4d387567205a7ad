"""Follows the pods of a Kubernetes namespace and tells the pool. This file alone knows the
`kubernetes` package.

Pods are listed once a second. The first list is read from where the truth is (and in pages); later
ones ask for what is not older than the newest version seen, which the API server answers from
memory (a page limit would have older ones read etcd), and without going back in time, as version 0
may after one server of several has fallen behind. A list costs it our pods as JSON; they are those
that the selector and the label of the role match.

An API server that is away, slow or refuses takes no node down: what it said last stays, and each
node's health decides. The client is synchronous: it has a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from kvrelay.router.membership.kubernetes_pods import ROLE, ListedPods, Pod, Pods, Told
from kvrelay.router.nodes.members import Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.errors import ConfigError

__all__ = ["Pace", "discovering", "listed_gauge", "server_of"]

_PAGE = 500
_MAX_LIST_BYTES = 256 << 20
_LEAST_BACK_OFF_S = 0.25
_COMPLAIN_S = 30.0
_STOP_S = 1.0
_GONE, _TOO_NEW = 410, 504
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_list: msgspec.json.Decoder[ListedPods] = msgspec.json.Decoder(ListedPods)
_log = logging.getLogger("kvrelay.router")


@dataclass(frozen=True, slots=True)
class Pace:
    """A pace: how often and how long, in seconds.

    A pod that is gone is named for relist_s and as long as two lists take: below 5 s with lists of
    up to 2 s.
    """

    relist_s: float = 1.0
    """Between two lists."""
    list_deadline_s: float = 10.0
    connect_s: float = 2.0
    most_back_off_s: float = 3.0


def listed_gauge(registry: CollectorRegistry) -> Gauge:
    """Return what is measured of it."""
    return Gauge(
        "kvrelay_router_kubernetes_listed_timestamp_seconds",
        "When the pods were last listed whole, as Unix time; 0: not yet.",
        registry=registry,
    )


@asynccontextmanager
async def discovering(
    pool: Pool, selector: str, namespace: str, registry: CollectorRegistry, pace: Pace | None = None
) -> AsyncIterator[None]:
    """Follow pods for the length of the block and tell the pool; with an empty selector do nothing.

    An empty namespace is the one that this process or its kubeconfig is in. Raises ConfigError.
    """
    if not selector:
        yield
        return
    api = await asyncio.to_thread(_Api, selector, namespace, pace or Pace())
    follower = _Follower(api, pool, listed_gauge(registry))
    thread = threading.Thread(target=follower.run, name="kubernetes", daemon=True)
    _log.info("nodes are the pods of namespace %s that match %s", api.namespace, api.selector)
    thread.start()
    try:
        yield
    finally:
        follower.stopped.set()
        await asyncio.to_thread(
            thread.join, _STOP_S
        )  # a daemon: what it still waits for holds nobody up


class _Api:
    """A way to the pods of a namespace by the official client: its configuration, credentials, TLS
    and connections.
    """

    def __init__(self, selector: str, namespace: str, pace: Pace) -> None:
        """Raises ConfigError if there is no client, or nothing says where the API server is."""
        settings, self.namespace = server_of(namespace)
        import kubernetes.client

        self.selector = f"{selector},{ROLE}"
        self.pace = pace
        self._list_pods = kubernetes.client.CoreV1Api(
            kubernetes.client.ApiClient(settings)
        ).list_namespaced_pod

    def listed(self, version: str) -> tuple[list[Pod], str]:
        """Return the pods, not older than `version`, or without one as they are now; and the
        version of the list.
        """
        if version:
            page = self._page(resource_version=version, resource_version_match="NotOlderThan")
        else:
            page = self._page(limit=_PAGE)
        pods = list(page.items or ())
        while page.metadata.more:
            page = self._page(limit=_PAGE, _continue=page.metadata.more)
            pods += page.items or ()
        return pods, page.metadata.resource_version

    def _page(self, **asked: Any) -> ListedPods:
        until = time.monotonic() + self.pace.list_deadline_s
        body = bytearray()
        response = self._list_pods(
            self.namespace,
            label_selector=self.selector,
            _preload_content=False,
            _request_timeout=(self.pace.connect_s, self.pace.list_deadline_s),
            **asked,
        )
        with contextlib.closing(
            response
        ):  # one that was read to its end has given its connection back already
            for piece in response.stream(1 << 20):
                body += piece
                if time.monotonic() > until:
                    raise TimeoutError(f"a list takes longer than {self.pace.list_deadline_s:g} s")
                if len(body) > _MAX_LIST_BYTES:
                    raise ValueError(
                        f"a list of more than {_MAX_LIST_BYTES} bytes; give a narrower selector"
                    )
        return _list.decode(body)


def server_of(namespace: str) -> tuple[Any, str]:
    """Return the client's settings, and the namespace; an empty one is our own. Raises ConfigError;
    asks nobody.
    """
    try:
        import kubernetes.client
        import kubernetes.config
    except ImportError as why:
        raise ConfigError(
            f"asking a Kubernetes API server takes the package kubernetes ({why}); run: "
            "pip install 'kvrelay[kubernetes]'"
        ) from why
    settings = kubernetes.client.Configuration()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            kubernetes.config.load_incluster_config(client_configuration=settings)
            own = (
                _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
                if _OWN_NAMESPACE.exists()
                else ""
            )
        else:
            file = os.environ.get(
                "KUBECONFIG"
            )  # the client's own default is read when it is imported
            kubernetes.config.load_kube_config(config_file=file, client_configuration=settings)
            own = kubernetes.config.list_kube_config_contexts(config_file=file)[1]["context"].get(
                "namespace", ""
            )
    except (kubernetes.config.ConfigException, OSError) as why:
        raise ConfigError(
            f"a Kubernetes API server is to be asked, and none is known: {why}; run the router in "
            f"a pod with a "
            "service account, or set KUBECONFIG"
        ) from why
    settings.retries = False  # we do that
    return settings, namespace or own or "default"


class _Follower:
    """A thread's work, and what it knows."""

    def __init__(self, api: _Api, pool: Pool, listed: Gauge) -> None:
        self.stopped = threading.Event()
        """Tell nothing from now on."""
        self._api, self._pool, self._listed = api, pool, listed
        self._loop = asyncio.get_running_loop()
        self._pods = Pods()
        self._version = ""
        """The newest that was seen; empty if there is none to go on from."""
        self._told = Told()
        self._failures = 0
        self._complained_at = float("-inf")

    def run(self) -> None:
        """List again and again."""
        wait_s = 0.0
        while not self.stopped.wait(wait_s):
            try:
                pods, self._version = self._api.listed(self._version)
                told = self._pods.listed(pods)
            except Exception as why:  # noqa: BLE001 - the edge of this thread: it must go on, whatever it was
                wait_s = self._failed(why)
                continue
            if self._failures:
                _log.info("the Kubernetes API server tells of its pods again")
            self._failures, self._complained_at = 0, float("-inf")
            self._listed.set_to_current_time()
            self._tell(told)
            wait_s = self._api.pace.relist_s

    def _tell(self, told: Told) -> None:
        for complaint in told.complaints:
            _log.warning("%s", complaint)
        if told.nodes != self._told.nodes or told.gone:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell_pool, told)
        self._told = told

    def _tell_pool(self, told: Told) -> None:
        if not self.stopped.is_set():
            self._pool.set_members(Source.KUBERNETES, told.nodes, time.monotonic(), told.gone)

    def _failed(self, why: Exception) -> float:
        """Return how long to wait: longer each time, and never for as long as others do."""
        self._failures += 1
        if getattr(why, "status", 0) in (_GONE, _TOO_NEW):
            self._version = ""
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            _log.warning(
                "the Kubernetes API server does not tell of its pods (%s); the %d nodes that it "
                "named stay, and their "
                "health decides; trying on",
                _said(why),
                len(self._told.nodes),
            )
        longest = min(
            self._api.pace.most_back_off_s, _LEAST_BACK_OFF_S * 2 ** min(self._failures, 10)
        )
        return random.uniform(longest / 2, longest)


def _said(why: Exception) -> str:
    if (status := getattr(why, "status", 0)) in (401, 403):
        return f"it answers {status}; the service account must be allowed to list pods"
    first = str(why).strip().partition("\n")[0][:300]
    return f"{type(why).__name__}: {first}"
