"""Pairs: a reader and a source that move slices of blocks through staging memory.

The next slice begins as soon as a stage is free: its time on the wire hides the host's work. Each
pair has a thread, because meeting the other rank blocks.

Nothing lands after an abort, even if a stopped peer wakes up: bytes from outside go to the pair's
staging, and the copy into the pool holds a lock that `abort` takes. No transfer needs a
quarantine.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import ClassVar, NamedTuple

import msgspec
import torch

from kvrelay.kv_transfer.backend import wake_in_time
from kvrelay.kv_transfer.connector import BlockIds, Tagged
from kvrelay.kv_transfer.nccl_library import (
    RECEIVES,
    SENDS,
    NcclCommunicator,
    NcclLibrary,
    Work,
)
from kvrelay.kv_transfer.shares import Share
from kvrelay.kv_transfer.sockets import Codec
from kvrelay.kv_transfer.staging import Budget, Lane, Places, StagedPool, cut
from kvrelay.wire.errors import KvrelayError, PeerLost, TransferError

__all__ = [
    "Move",
    "Pair",
    "ReaderPair",
    "SourcePair",
    "Terms",
    "Transfer",
    "within",
]

log = logging.getLogger(__name__)


# An Ask names up to 200,000 blocks.
MAX_PAIR_MESSAGE_BYTES = 1 << 20


class Address(msgspec.Struct, frozen=True):
    """An NCCL backend's metadata: its control socket and CURVE key."""

    host: str
    port: int
    key: bytes


class Meet(Tagged, frozen=True):
    """A reader's first message: make a new pair's communicator with me."""

    pair: bytes
    slice_bytes: int
    """The most bytes of a slice on both sides; it holds a block's part."""
    facts: bytes
    """The unique id of an NCCL communicator."""


class Ask(Tagged, frozen=True):
    """A reader's request to send this part of these blocks, in order."""

    pair: bytes
    blocks: list[int]
    start: int
    num_bytes: int


class Part(Tagged, frozen=True):
    """A farewell of either side: nothing more is sent."""

    pair: bytes
    reason: str
    idle: bool = False
    """All that this end heard of was sent; the rest may go to another pair."""


PairMessage = Meet | Ask | Part

codec: Codec[PairMessage] = Codec(PairMessage, MAX_PAIR_MESSAGE_BYTES)
encode, decode = codec.encode, codec.decode


# The reader closes an idle pair; the source waits twice as long.
IDLE_S = 60.0
# One slice on the wire, one behind it, one being copied.
STAGES = 3
# An undisturbed copy takes less than 100 us.
SETTLE_S, POLL_S = 0.1, 20e-6
# How long a reader waits for the source's reason after a break.
HEAR_S = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """A process's terms: a pair is met in `meet_s`, and moves a slice every `patience_s`."""

    pool: StagedPool
    nccl: NcclLibrary
    budget: Budget
    slice_bytes: int
    meet_s: float
    patience_s: float

    def cost(self, slice_bytes: int) -> int:
        return STAGES * slice_bytes + self.nccl.communicator_bytes


@dataclass(slots=True, eq=False)
class Transfer:
    """A read, as the backend's handle. Either `done` or `error` is set, once."""

    remote_blocks: BlockIds
    local_blocks: BlockIds
    part: Share
    """The parts of each block that are moved; a source knows its own end alone."""
    done: bool = False
    error: TransferError | None = None


class Move(NamedTuple):
    """A slice of a transfer: `rows` of its blocks."""

    transfer: Transfer
    places: Places
    rows: range

    @property
    def is_last(self) -> bool:
        return self.rows.stop == len(self.places.blocks)


class Pair(abc.ABC):
    """An end of a pair. Methods may be called from any thread, and return at once."""

    _rank: ClassVar[int]

    def __init__(
        self,
        name: bytes,
        slice_bytes: int,
        terms: Terms,
        say: Callable[[PairMessage], None],
        ended: Callable[[Pair], None],
    ) -> None:
        """`say` sends to the other end; `ended`: all memory is given back."""
        self.name = name
        self.slice_bytes = slice_bytes
        self.idle_since: float | None = None
        self.over: TransferError | None = None
        """Why this pair touches the pool no more."""
        self._terms = terms
        self._say = say
        self._ended = ended
        self._deadline = time.monotonic() + terms.meet_s
        self._communicator: NcclCommunicator | None = None
        self._lane: Lane | None = None
        self._jobs: collections.deque[Transfer] = collections.deque()  # not ended
        self._begun = 0  # of these
        self._unwanted = False  # unless there is something to do
        self._changed = threading.Condition()  # guards all of the above, and the pool
        self._ending = threading.Lock()  # transfers left go where the first to end it says
        self.thread = threading.Thread(target=self._run, name="kv-pair", daemon=True)

    def make_room(self) -> None:
        with self._changed:
            self._unwanted = True
            self._changed.notify_all()

    def abort(self, error: TransferError) -> None:
        """End at once; afterwards the pool is not touched any more.

        (If a GPU cannot copy for `SETTLE_S`: not before the transfers have an error.)
        """
        for transfer in self.end(error):
            transfer.error = self.over

    def end(self, error: TransferError) -> list[Transfer]:
        """End at once, as `abort`; return transfers for another pair."""
        with self._ending:
            with self._changed:
                first, self.over = self.over is None, self.over or error
                communicator, lane = self._communicator, self._lane
                self._changed.notify_all()
            if first:
                self._say(Part(self.name, error.message))
            self._terms.budget.nudge()
            if first and communicator is not None:
                communicator.interrupt()
            if lane is None or within(SETTLE_S, lane.settled):
                with self._changed:
                    left = list(self._jobs)
                    self._jobs.clear()
                return left
            # The pair's own thread, with the communicator closed.
            return []

    def _run(self) -> None:
        wake_in_time()
        try:
            self._live()
        except KvrelayError as error:
            if self._rank == RECEIVES:  # the source's reason may be on its way
                with self._changed:
                    self._changed.wait_for(self._given_up, HEAR_S)
            self.abort(error if isinstance(error, PeerLost) else PeerLost(error.message))
        except Exception as error:
            # The edge of this thread: an error of ours or of the device ends this pair.
            log.exception("a pair ended")
            self.abort(PeerLost(f"a pair ended by {type(error).__name__}: {error}"))
        finally:
            self._ended(self)

    def _live(self) -> None:
        terms = self._terms
        try:
            with (
                terms.budget.share(terms.cost(self.slice_bytes), self._deadline, self._given_up),
                terms.pool.lane() as lane,
            ):
                communicator = self._meet()
                try:
                    stages = [lane.staging(self.slice_bytes) for _ in range(STAGES)]
                    with self._touching():
                        self._communicator, self._lane = communicator, lane
                    self._convey(communicator, lane, stages)
                finally:
                    communicator.close()
        finally:
            with self._changed:  # not before all copies have ended
                self._communicator = self._lane = None

    def _convey(
        self, communicator: NcclCommunicator, lane: Lane, stages: list[torch.Tensor]
    ) -> None:
        under_way: collections.deque[tuple[Move, torch.Tensor, Work]] = collections.deque()
        moves: Iterator[Move] = iter(())
        for stage in cycle(stages):
            while (move := next(moves, None)) is None:
                job = self._next(wait=not under_way)
                if job is not None:
                    moves = self._moves(job, lane)
                elif under_way:
                    self._end(*under_way.popleft(), lane)
                else:
                    return
            if len(under_way) == STAGES:
                self._end(*under_way.popleft(), lane)
            stage = stage[: len(move.rows) * move.places.row_bytes]
            work = self._begin(move, stage, communicator, lane)
            under_way.append((move, stage, work))

    def _moves(self, job: Transfer, lane: Lane) -> Iterator[Move]:
        part = job.part
        if self._rank == SENDS:
            blocks, start = job.remote_blocks, part.remote_start
        else:
            blocks, start = job.local_blocks, part.local_start
        places = lane.places(blocks, start, part.num_bytes)
        slices = cut(len(blocks), places.row_bytes, self.slice_bytes)
        return (Move(job, places, rows) for rows in slices)

    @abc.abstractmethod
    def _begin(
        self, move: Move, stage: torch.Tensor, communicator: NcclCommunicator, lane: Lane
    ) -> Work: ...

    @abc.abstractmethod
    def _end(self, move: Move, stage: torch.Tensor, work: Work, lane: Lane) -> None: ...

    @abc.abstractmethod
    def _meet(self) -> NcclCommunicator: ...

    def _given_up(self) -> bool:
        return self.over is not None

    def _next(self, *, wait: bool) -> Transfer | None:
        with self._changed:
            self._check()
            if wait and not self._jobs:
                self._idle()
            if self._begun == len(self._jobs):
                return None
            self._begun += 1
            return self._jobs[self._begun - 1]

    def _idle(self) -> None:
        self.idle_since = time.monotonic()
        # Idle pairs give their memory to who waits.
        self._unwanted = self._terms.budget.waiting > 0
        self._changed.wait_for(
            lambda: self._jobs or self.over or self._unwanted,
            IDLE_S if self._rank == RECEIVES else 2 * IDLE_S,
        )
        self.idle_since = None
        self._check()
        if self._jobs:
            return
        self.over = PeerLost("the pair was idle and has been closed")
        self._say(Part(self.name, self.over.message, idle=True))

    def _done(self, job: Transfer) -> None:
        with self._touching():
            self._jobs.popleft()
            self._begun -= 1
            job.done = True

    @contextlib.contextmanager
    def _touching(self) -> Iterator[None]:
        with self._changed:
            self._check()
            yield

    def _check(self) -> None:
        if self.over is not None:
            raise self.over


def within(limit_s: float, true: Callable[[], bool]) -> bool:
    """Wait until it is true; return False after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


# Transfers asked for before the first is through.
MAX_ASKS = 4096


class SourcePair(Pair):
    _rank = SENDS

    def __init__(
        self,
        meet: Meet,
        terms: Terms,
        say: Callable[[PairMessage], None],
        ended: Callable[[Pair], None],
    ) -> None:
        super().__init__(meet.pair, meet.slice_bytes, terms, say, ended)
        self._facts = meet.facts

    def serve(self, ask: Ask) -> None:
        """Send these blocks in turn. Raises ValueError for a wrong request."""
        blocks, start, num_bytes = ask.blocks, ask.start, ask.num_bytes
        with self._changed:
            if len(self._jobs) >= MAX_ASKS:
                raise ValueError(f"more than {MAX_ASKS} transfers asked for at once")
            num_blocks = self._terms.pool.num_blocks
            if not blocks or not all(0 <= block < num_blocks for block in blocks):
                raise ValueError(
                    f"asked for none, or for some outside a pool of {num_blocks} blocks"
                )
            block_bytes = self._terms.pool.block_bytes
            if not 0 <= start < start + num_bytes <= block_bytes or num_bytes > self.slice_bytes:
                raise ValueError(
                    f"asked for {num_bytes} bytes from {start} on of {block_bytes}, in slices of "
                    f"{self.slice_bytes}"
                )
            self._jobs.append(Transfer(blocks, (), Share(start, 0, num_bytes)))
            self._changed.notify_all()

    def _meet(self) -> NcclCommunicator:
        return self._terms.nccl.open(SENDS, self._facts, self._given_up, self._deadline)

    def _begin(
        self, move: Move, stage: torch.Tensor, communicator: NcclCommunicator, lane: Lane
    ) -> Work:
        with self._touching():
            lane.copy(move.places, move.rows, stage, into_pool=False)
        return communicator.send(stage)

    def _end(self, move: Move, stage: torch.Tensor, work: Work, lane: Lane) -> None:
        work()
        if move.is_last:
            lane.forget(move.places)
            self._done(move.transfer)


class ReaderPair(Pair):
    """A pair's end that asks, and receives in that order."""

    _rank = RECEIVES
    _introduced = False

    def read(self, transfer: Transfer) -> bool:
        """Read; return False if this pair has ended: another is needed."""
        with self._changed:
            if self.over is not None:
                return False
            self._jobs.append(transfer)
            if self._introduced:
                self._ask(transfer)
            self._changed.notify_all()
        return True

    def _ask(self, transfer: Transfer) -> None:
        part = transfer.part
        self._say(Ask(self.name, list(transfer.remote_blocks), part.remote_start, part.num_bytes))

    def _meet(self) -> NcclCommunicator:
        nccl = self._terms.nccl
        facts = nccl.facts()
        with self._touching():
            self._say(Meet(self.name, self.slice_bytes, facts))
            for transfer in self._jobs:
                self._ask(transfer)
            self._introduced = True
        return nccl.open(RECEIVES, facts, self._given_up, self._deadline)

    def _begin(
        self, move: Move, stage: torch.Tensor, communicator: NcclCommunicator, lane: Lane
    ) -> Work:
        return communicator.recv(stage)

    def _end(self, move: Move, stage: torch.Tensor, work: Work, lane: Lane) -> None:
        work()
        with self._touching():
            lane.copy(move.places, move.rows, stage, into_pool=True)
        if move.is_last:
            if not within(self._terms.patience_s, lambda: lane.settled() or self.over is not None):
                raise PeerLost(
                    f"copies into the pool have not ended for {self._terms.patience_s:g} s"
                )
            self._done(move.transfer)
            lane.forget(move.places)
