"""A node announces itself to routers: every few seconds, at once when it changes, and once more when it ends.

Owns the sockets to the routers. Nothing waits for a router: what cannot be sent is left out, and the next one says it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from wire.heartbeat import HEARTBEAT_S, Heartbeat, NodeState, sealed

__all__ = ["Announcer"]

_LINGER_MS = 500
_WAITING = 2  # for a router that is not there: it shall not hear old news when it is
_LONGEST_RECONNECT_MS = 1000


class Announcer:
    """Announces to these routers (tcp://host:port). `facts` says what to tell; None: nothing yet.

    `sent_at` is filled in here, and the state of its last word.
    """

    def __init__(
        self, routers: Sequence[str], key: str, facts: Callable[[], Heartbeat | None], every_s: float = HEARTBEAT_S
    ) -> None:
        self._routers = routers
        self._key = key
        self._facts = facts
        self._every_s = every_s
        self._changed = asyncio.Event()
        self._told: Heartbeat | None = None

    def changed(self) -> None:
        """Tell at once."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; says goodbye then."""
        if not self._routers:
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = [self._connected(context, router) for router in self._routers]
        try:
            while True:
                self._changed.clear()
                if (facts := self._facts()) is not None:
                    self._tell(sockets, facts)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._every_s)
        finally:
            if self._told is not None:
                self._tell(sockets, msgspec.structs.replace(self._told, state=NodeState.LEAVING))
            for socket in sockets:
                socket.close()
            await asyncio.to_thread(context.term)  # waits for what is on its way, as long as sockets linger

    def _tell(self, sockets: Sequence[zmq.Socket[bytes]], facts: Heartbeat) -> None:
        self._told = facts
        message = sealed(msgspec.structs.replace(facts, sent_at=time.time()), self._key)
        for socket in sockets:
            with contextlib.suppress(zmq.Again):
                socket.send(message, zmq.NOBLOCK)

    @staticmethod
    def _connected(context: zmq.Context[zmq.Socket[bytes]], router: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, _WAITING)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
        if "[" in router:
            socket.setsockopt(zmq.IPV6, 1)
        socket.connect(router)
        return socket
