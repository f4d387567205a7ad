"""The data planes of a rank other than 0: over its own pool, and led by rank 0's desk, which says
when each is opened.

Owns the planes' threads of this process; decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from kvrelay.kv_transfer.checksums import ChecksumThread
from kvrelay.kv_transfer.commands import PeerKey
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.planes import DataPlane, PlaneThread, why_not
from kvrelay.kv_transfer.rank_link import LinkEnd
from kvrelay.kv_transfer.rank_messages import (
    AddPeer,
    Broke,
    Close,
    DropPeer,
    Joined,
    Meeting,
    Open,
    Opened,
    PeerGone,
    Post,
    Prepared,
    ReadEnded,
    ReadFailed,
    Serve,
    Stop,
    Sum,
    Summed,
    ToRank,
)
from kvrelay.wire.errors import ConfigError, KvrelayError

__all__ = ["LedPlanes"]

log = logging.getLogger(__name__)

JOIN_S = 0.4


class LedPlanes:
    """See the module."""

    def __init__(
        self,
        rank: int,
        region: PoolRegion,
        planes: Mapping[str, DataPlane],
        meeting: Meeting,
        lost: Callable[[str], None],
    ) -> None:
        """Prepares the planes and tells rank 0. `lost` is called, from another thread, if rank 0
        is.
        """
        self._threads: dict[str, PlaneThread] = {}
        self.serving = False
        """Whether peers may be reading from this engine."""
        missing = {}
        for kind, plane in planes.items():
            thread = PlaneThread(plane, _Voice(self, kind))
            try:
                thread.start()
            except ConfigError as error:
                log.info("no KV by %s on rank %d: %s", kind, rank, error.message)
                missing[kind] = error.message
            else:
                self._threads[kind] = thread
        self._checksums: ChecksumThread | None = None
        if meeting.terms.summed_heads:
            self._checksums = ChecksumThread(region, meeting.terms.summed_heads, self.broke)
            self._checksums.open()
        self.link = LinkEnd(meeting, self._hear, lost)
        self.link.say(Prepared(rank, region, missing))

    def close(self) -> None:
        """End all threads."""
        self.link.close(JOIN_S)
        self._end()

    def _end(self) -> None:
        for thread in self._threads.values():
            thread.stop()
        for thread in self._threads.values():
            thread.close(JOIN_S)
        if self._checksums is not None:
            self._checksums.close(JOIN_S)

    def broke(self, error: Exception) -> None:
        """A thread of this process has ended by an error of ours: rank 0 must hear of it."""
        self.link.say(Broke(f"{type(error).__name__}: {error}"))

    def _opened(self, kind: str, card: bytes | Exception) -> None:
        if isinstance(card, Exception):
            self.link.say(Opened(kind, None, why_not(card)))
        else:
            self.link.say(Opened(kind, card))

    def _hear(self, message: ToRank) -> None:
        match message:
            case Open(kind):
                self._threads[kind].open(partial(self._opened, kind))
            case Stop(kind):
                thread = self._threads.pop(kind, None)
                if thread is not None:
                    thread.stop()
            case Post(kind, read):
                self._threads[kind].read(read)
            case AddPeer(kind, peer, source):
                self._threads[kind].add_peer(peer, source)
            case PeerGone(kind, peer):
                self._threads[kind].peer_gone(peer)
            case DropPeer(kind, peer):
                self._threads[kind].drop_peer(peer)
            case Sum(number, blocks):
                assert self._checksums is not None
                self._checksums.ask(blocks, lambda sums: self.link.say(Summed(number, sums)))
            case Serve(on):
                self.serving = on
                for thread in self._threads.values():
                    thread.nudge()
            case Close():
                self._end()


class _Voice:
    """What a plane's thread tells, on its way to rank 0."""

    def __init__(self, planes: LedPlanes, kind: str) -> None:
        self._planes, self._kind = planes, kind

    def joined(self, peer: PeerKey, error: KvrelayError | None) -> None:
        said = None if error is None else _said(error)
        self._planes.link.say(Joined(self._kind, peer, said))

    def read_ended(self, peer: PeerKey, read_id: int) -> None:
        self._planes.link.say(ReadEnded(self._kind, peer, read_id))

    def read_failed(
        self, peer: PeerKey, read_id: int, error: KvrelayError, *, in_flight: bool
    ) -> None:
        self._planes.link.say(ReadFailed(self._kind, peer, read_id, _said(error), in_flight))

    def serving(self) -> bool:
        return self._planes.serving

    def broke(self, error: Exception) -> None:
        self._planes.broke(error)


def _said(error: KvrelayError) -> tuple[str, str]:
    return type(error).__name__, error.message
