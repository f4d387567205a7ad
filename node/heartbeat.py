"""A node announces itself to routers: every few seconds, at once when it changes, and once more
when it ends.

A beat is one datagram to every address that a router's name has then. Nothing waits for a router,
and none answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvrelay.wire.config_checks import udp_address
from kvrelay.wire.heartbeat import HEARTBEAT_S, Heartbeat, NodeState, sealed

__all__ = ["Announcer"]

LOOK_UP_S = 1.0
"""A beat waits so long for a name server; then it goes where the router was before."""


class Announcer:
    """Announces to these routers (udp://host:port). `facts` says what to tell; None: nothing yet.

    `sent_at` is filled in here, and the state of its last word.
    """

    def __init__(
        self,
        routers: Sequence[str],
        key: str,
        facts: Callable[[], Heartbeat | None],
        every_s: float = HEARTBEAT_S,
    ) -> None:
        self._routers = routers
        self._key = key
        self._facts = facts
        self._every_s = every_s
        self._changed = asyncio.Event()
        self._told: Heartbeat | None = None
        self._at: dict[str, list[tuple[int, Any]]] = {}
        """By router: the families and addresses that its name last had."""
        self._looking: dict[str, asyncio.Task[None]] = {}

    def changed(self) -> None:
        """Tell at once."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; says goodbye then."""
        if not self._routers:
            return
        try:
            while True:
                self._changed.clear()
                await self._look_up()
                if (facts := self._facts()) is not None:
                    self._tell(facts)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._every_s)
        finally:
            for looking in self._looking.values():
                looking.cancel()
            if self._told is not None:
                self._tell(msgspec.structs.replace(self._told, state=NodeState.LEAVING))

    def _tell(self, facts: Heartbeat) -> None:
        self._told = facts
        message = sealed(msgspec.structs.replace(facts, sent_at=time.time()), self._key)
        for family, address in [each for found in self._at.values() for each in found]:
            # A socket for each: one that stays open would be a port at which this node takes
            # datagrams.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as once:
                once.setblocking(False)
                once.sendto(message, address)

    async def _look_up(self) -> None:
        """Ask where the routers are now: they may have moved. One question at a time for each name."""
        for router in self._routers:
            if router not in self._looking:
                self._looking[router] = asyncio.create_task(self._found(router))
        await asyncio.wait(self._looking.values(), timeout=LOOK_UP_S)

    async def _found(self, router: str) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                *udp_address(router), type=socket.SOCK_DGRAM
            )
            self._at[router] = [(family, address) for family, _, _, _, address in found]
        except (OSError, UnicodeError):
            pass  # no such name yet, or no name server: what was known goes on
        finally:
            del self._looking[router]
