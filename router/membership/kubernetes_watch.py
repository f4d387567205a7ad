"""Follows the pods of a Kubernetes namespace and tells the pool. This file alone knows the `kubernetes` package.

List, watch from there on for 2 s, list again, and so on. A watch may lose a DELETE, or fall silent, and never say
so; so what counts is the list, and the watch makes it quick. The first list is read from where the truth is (and in
pages); later ones ask for what is not older than the newest version seen, which the API server answers from memory
(a page limit would have older ones read etcd), and without going back in time, as version 0 may after one server of
several has fallen behind. A list costs it our pods as JSON; they are those that the selector and the label of the role
match.

An API server that is away, slow or refuses takes no node down: what it said last stays, and each node's health decides.
The client is synchronous: it has a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from router.membership.kubernetes_pods import ROLE, ListedPods, Pod, Pods, Told, WatchEvent
from router.membership.members import Listener, Source
from wire.errors import ConfigError

__all__ = ["Pace", "discovering", "listed_gauge", "server_of"]

_PAGE = 500
_MAX_LIST_BYTES = 256 << 20
_MAX_EVENT_BYTES = 8 << 20
"""A pod has 1.5 MiB at most, which is what etcd stores."""
_LEAST_S = 0.25
"""Between two lists, whatever ends the watches."""
_COMPLAIN_S = 30.0
_STOP_S = 1.0
_GONE, _TOO_NEW = 410, 504
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_list: msgspec.json.Decoder[ListedPods] = msgspec.json.Decoder(ListedPods)
_event: msgspec.json.Decoder[WatchEvent] = msgspec.json.Decoder(WatchEvent)
_pod: msgspec.json.Decoder[Pod] = msgspec.json.Decoder(Pod)
_log = logging.getLogger("kvrelay.router")


@dataclass(frozen=True, slots=True)
class Pace:
    """How often and how long, in seconds.

    A pod whose DELETE was lost is named for relist_s, patience_s and as long as a list takes: below 5 s with lists of
    up to 2.5 s.
    """

    relist_s: float = 2.0
    patience_s: float = 0.5
    """How much longer than relist_s a watch may be silent: its server is to end it."""
    list_deadline_s: float = 10.0
    connect_s: float = 2.0
    most_back_off_s: float = 3.0


class _Status(msgspec.Struct, frozen=True):
    """The object of an ERROR event."""

    code: int = 0
    message: str = ""


class _Refused(Exception):
    """The API server says no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"it answers {status}: {message}")
        self.status = status


def listed_gauge(registry: CollectorRegistry) -> Gauge:
    """What is measured of it."""
    return Gauge(
        "kvrelay_router_kubernetes_listed_timestamp_seconds",
        "When the pods were last listed whole, as Unix time; 0: not yet.",
        registry=registry,
    )


@asynccontextmanager
async def discovering(
    pool: Listener, selector: str, namespace: str, registry: CollectorRegistry, pace: Pace | None = None
) -> AsyncIterator[None]:
    """Follow pods for the length of the block and tell the pool; with an empty selector do nothing.

    An empty namespace is the one that this process or its kubeconfig is in. Raises ConfigError.
    """
    if not selector:
        yield
        return
    api = await asyncio.to_thread(_Api, selector, namespace)
    follower = _Follower(api, pool, listed_gauge(registry), pace or Pace())
    _log.info("nodes are the pods of namespace %s that match %s", api.namespace, api.selector)
    follower.start()
    try:
        yield
    finally:
        follower.stop()
        await asyncio.to_thread(follower.join, _STOP_S)  # a daemon: what it still waits for holds nobody up


class _Api:
    """Pods of one namespace, through the official client: its configuration, credentials, TLS and connections."""

    def __init__(self, selector: str, namespace: str) -> None:
        """Raises ConfigError if there is no client, or nothing says where the API server is."""
        settings, self.namespace = server_of(namespace)
        import kubernetes.client

        self.selector = f"{selector},{ROLE}"
        self._list_pods = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(settings)).list_namespaced_pod
        self._response: Any = None
        self._interrupted = False

    def listed(self, version: str, more: str, pace: Pace) -> ListedPods:
        """The page that `more` asks for; else the pods not older than `version`, or without one as they are now."""
        until = time.monotonic() + pace.list_deadline_s
        if more:
            asked = {"limit": _PAGE, "_continue": more}
        elif version:
            asked = {"resource_version": version, "resource_version_match": "NotOlderThan"}
        else:
            asked = {"limit": _PAGE}
        body = bytearray()
        with self._answer(asked, (pace.connect_s, pace.list_deadline_s)) as response:
            for piece in response.stream(1 << 20):
                body += piece
                if time.monotonic() > until:
                    raise TimeoutError(f"a list takes longer than {pace.list_deadline_s:g} s")
                if len(body) > _MAX_LIST_BYTES:
                    raise _Refused(0, f"a list of more than {_MAX_LIST_BYTES} bytes; give a narrower selector")
        return _list.decode(body)

    def watched(self, version: str, pace: Pace) -> Generator[WatchEvent]:
        """What happens after `version`, until the server ends it or is silent for too long."""
        from urllib3.exceptions import ReadTimeoutError  # what the client is made of

        asked = {
            "watch": True,
            "resource_version": version,
            "allow_watch_bookmarks": True,
            "timeout_seconds": math.ceil(pace.relist_s),
        }
        with self._answer(asked, (pace.connect_s, pace.relist_s + pace.patience_s)) as response:
            rest = b""
            pieces = response.stream(None)
            while True:
                try:
                    piece = next(pieces, None)
                except ReadTimeoutError:
                    return
                if piece is None:
                    return
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _MAX_EVENT_BYTES:
                    raise _Refused(0, f"an event of more than {_MAX_EVENT_BYTES} bytes")
                yield from (_event.decode(line) for line in lines if line.strip())

    @contextlib.contextmanager
    def _answer(self, asked: dict[str, Any], timeouts: tuple[float, float]) -> Iterator[Any]:
        response = self._list_pods(
            self.namespace, label_selector=self.selector, _preload_content=False, _request_timeout=timeouts, **asked
        )
        self._response = response
        try:
            if self._interrupted:  # before interrupt() could see this answer
                raise InterruptedError("the router ends")
            yield response
        finally:
            self._response = None
            # One that was read to its end has given its connection back already.
            response.close()

    def interrupt(self) -> None:
        """End what another thread reads now, or would read next."""
        self._interrupted = True
        connection = getattr(self._response, "connection", None)
        if (read := getattr(connection, "sock", None)) is not None:
            with contextlib.suppress(OSError):
                read.shutdown(socket.SHUT_RDWR)


def server_of(namespace: str) -> tuple[Any, str]:
    """The client's settings, and the namespace; an empty one is our own. Raises ConfigError; asks nobody."""
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
            own = _OWN_NAMESPACE.read_text(encoding="utf-8").strip() if _OWN_NAMESPACE.exists() else ""
        else:
            file = os.environ.get("KUBECONFIG")  # the client's own default is read when it is imported
            kubernetes.config.load_kube_config(config_file=file, client_configuration=settings)
            own = kubernetes.config.list_kube_config_contexts(config_file=file)[1]["context"].get("namespace", "")
    except (kubernetes.config.ConfigException, OSError) as why:
        raise ConfigError(
            f"a Kubernetes API server is to be asked, and none is known: {why}; run the router in a pod with a "
            "service account, or set KUBECONFIG"
        ) from why
    settings.retries = False  # we do that
    return settings, namespace or own or "default"


class _Follower:
    """The thread, and what it knows."""

    def __init__(self, api: _Api, pool: Listener, listed: Gauge, pace: Pace) -> None:
        self._api, self._pool, self._listed, self._pace = api, pool, listed, pace
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="kubernetes", daemon=True)
        self._stopped = threading.Event()
        self._pods = Pods()
        self._version = ""
        """The newest that was seen; empty if there is none to go on from."""
        self._told = Told()
        self._failures = 0
        self._complained_at = float("-inf")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Tell nothing from now on."""
        self._stopped.set()
        self._api.interrupt()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, but not for longer."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._list()
                self._watch(time.monotonic() + self._pace.relist_s)
            except Exception as why:  # noqa: BLE001 - the edge of this thread: it must go on, whatever it was
                self._failed(why)
            else:
                if self._failures:
                    _log.info("the Kubernetes API server tells of its pods again")
                self._failures, self._complained_at = 0, float("-inf")
                self._stopped.wait(_LEAST_S - (time.monotonic() - began))

    def _list(self) -> None:
        pods: list[Pod] = []
        more = ""
        while True:
            page = self._api.listed(self._version, more, self._pace)
            pods += page.items or ()
            more = page.metadata.more or ""
            if not more:
                break
        self._version = page.metadata.resource_version
        self._pods.listed(pods)
        self._listed.set_to_current_time()
        self._tell()

    def _watch(self, until: float) -> None:
        with contextlib.closing(self._api.watched(self._version, self._pace)) as events:
            for event in events:
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    raise _Refused(status.code, status.message)
                pod = _pod.decode(event.object)
                if event.type == "DELETED":
                    self._pods.deleted(pod)
                elif event.type != "BOOKMARK":
                    self._pods.seen(pod)
                self._version = pod.metadata.resource_version or self._version
                self._tell()
                if self._stopped.is_set() or time.monotonic() >= until:
                    break

    def _tell(self) -> None:
        told = self._pods.told()
        for complaint in told.complaints:
            _log.warning("%s", complaint)
        if told.nodes != self._told.nodes or told.gone:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell_pool, told)
        self._told = told

    def _tell_pool(self, told: Told) -> None:
        if not self._stopped.is_set():
            self._pool.tell(Source.KUBERNETES, told.nodes, time.monotonic(), told.gone)

    def _failed(self, why: Exception) -> None:
        """Wait a while, longer each time and never for as long as others do."""
        if self._stopped.is_set():
            return
        self._failures += 1
        status = getattr(why, "status", 0)
        if status in (_GONE, _TOO_NEW):
            self._version = ""
        if status == _GONE and self._failures == 1:
            return
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            _log.warning(
                "the Kubernetes API server does not tell of its pods (%s); the %d nodes that it named stay, and their "
                "health decides; trying on",
                _said(why),
                len(self._told.nodes),
            )
        longest = min(self._pace.most_back_off_s, _LEAST_S * 2 ** min(self._failures, 10))
        self._stopped.wait(random.uniform(longest / 2, longest))


def _said(why: Exception) -> str:
    if (status := getattr(why, "status", 0)) in (401, 403):
        return f"it answers {status}; the service account must be allowed to get, list and watch pods"
    first = str(why).strip().partition("\n")[0][:300]
    return f"{type(why).__name__}: {first}"
