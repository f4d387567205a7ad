"""The two ends of a pair: a source that sends what it is asked for, and a reader that asks and receives.

Owns what the one does with a slice and what the other does, and how an ask gets from one to the other: by the shortest
way (`kv_transfer/ask_line.py`) and over the control socket, under one number.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec
import torch

from kv_transfer.ask_line import Ear, Mouth
from kv_transfer.communicators import Communicator, Work
from kv_transfer.pair_messages import Ask, Leave, Listen, Meet, PairMessage, decode, encode
from kv_transfer.pairs import READER, SOURCE, Move, Pair, Terms, Transfer, within
from kv_transfer.shares import Share
from kv_transfer.staging import Lane
from wire.errors import PeerLost

__all__ = ["ReaderPair", "SourcePair"]

# Transfers that a reader may ask for before the first of them is through.
MAX_ASKS = 4096
# Used within so many seconds, a pair has not been ended for being idle meanwhile, even if its reader was stopped.
IN_USE_S = 1.0


class SourcePair(Pair):
    """Sends what it is asked for."""

    def __init__(
        self, meet: Meet, ear: Ear, terms: Terms, say: Callable[[PairMessage], None], ended: Callable[[Pair], None]
    ) -> None:
        """A reader wants to meet. The pair closes its ear."""
        super().__init__(meet.pair, SOURCE, meet.slice_bytes, terms, say, ended)
        self._facts = meet.facts
        self._ear = ear
        self._asleep = False
        self._asked = 0  # transfers

    def serve(self, ask: Ask) -> None:
        """Send so many bytes of these blocks when those before them are through. What was asked already is not heard.

        Raises ValueError for what no reader may ask."""
        blocks, start, num_bytes = ask.blocks, ask.start, ask.num_bytes
        with self._changed:
            if ask.number < self._asked:
                return
            if ask.number > self._asked:
                raise ValueError(f"asked for transfer {ask.number} before transfer {self._asked}")
            if len(self._jobs) >= MAX_ASKS:
                raise ValueError(f"more than {MAX_ASKS} transfers asked for at once")
            num_blocks = self._terms.pool.num_blocks
            if not blocks or not all(0 <= block < num_blocks for block in blocks):
                raise ValueError(f"asked for none, or for some outside a pool of {num_blocks} blocks")
            if not 0 <= start < start + num_bytes <= self._terms.pool.block_bytes:
                raise ValueError(f"asked for {num_bytes} bytes from {start} on of {self._terms.pool.block_bytes}")
            self._asked += 1
            self._jobs.append(Transfer(blocks, (), Share(start, 0, num_bytes)))
            self._wake()

    def _introduce(self) -> bytes:
        self._say(Listen(self.name, self._ear.address, self._ear.port))
        return self._facts

    def _hush(self) -> None:
        self._ear.close()

    def _listen(self) -> None:
        for frame in self._ear.heard():
            self._hear_ask(frame)

    def _sleep(self, limit_s: float) -> None:
        self._asleep = True
        self._changed.release()
        try:
            frame = self._ear.wait(limit_s)
        finally:
            self._changed.acquire()
            self._asleep = False
        if frame is not None:
            self._hear_ask(frame)

    def _wake(self) -> None:
        super()._wake()
        if self._asleep:
            self._ear.ring()

    def _hear_ask(self, frame: bytes) -> None:
        # What is wrong with it, the control socket tells; or it has come too soon, and will be heard from there.
        with contextlib.suppress(ValueError, msgspec.DecodeError):
            ask = decode(frame)
            if isinstance(ask, Ask) and ask.pair == self.name:
                self.serve(ask)

    def _leave(self) -> float:
        """Only the reader knows whether it is still receiving, or has asked; one that is gone is not waited for."""
        self._say(Leave(self.name))
        return self._terms.patience_s

    def _begin(self, move: Move, stage: torch.Tensor, communicator: Communicator, lane: Lane) -> Work:
        with self._touching():
            lane.gather(move.places, move.piece, stage)
        return communicator.send(stage)

    def _end(self, move: Move, stage: torch.Tensor, work: Work, lane: Lane) -> None:
        work.wait()
        if move.last:
            lane.forget(move.places)
            self._done(move.transfer)


class ReaderPair(Pair):
    """Asks, and receives in the order in which it has asked."""

    def __init__(
        self,
        name: bytes,
        terms: Terms,
        say: Callable[[PairMessage], None],
        ended: Callable[[Pair], None],
    ) -> None:
        """`name` is unlike any other's."""
        super().__init__(name, READER, terms.slice_bytes, terms, say, ended)
        self._introduced = False
        self._asked = 0  # transfers
        self._mouth: Mouth | None = None

    def listens(self, mouth: Mouth) -> None:
        """The source hears asks there, too. The pair closes it."""
        with self._changed:
            if self.over is None and self._mouth is None:
                self._mouth = mouth
                return
        mouth.close()

    @property
    def in_use(self) -> bool:
        """Whether it is now, or was within the last `IN_USE_S`."""
        since = self.idle_since
        return since is None or time.monotonic() - since < IN_USE_S

    def read(self, transfer: Transfer) -> bool:
        """False if this pair has ended: another one is needed."""
        with self._changed:
            if self.over is not None:
                return False
            self._jobs.append(transfer)
            if self._introduced:
                self._ask(transfer)
            self._wake()
        return True

    def _ask(self, transfer: Transfer) -> None:
        part = transfer.part
        ask = Ask(self.name, self._asked, list(transfer.remote_blocks), part.remote_start, part.num_bytes)
        self._asked += 1
        if self._mouth is not None:
            self._mouth.say(encode(ask))
        self._say(ask)

    def _hush(self) -> None:
        with self._changed:
            if self._mouth is not None:
                self._mouth.close()
                self._mouth = None

    def _leave(self) -> float:
        return 0.0

    def _introduce(self) -> bytes:
        facts = self._terms.backend.facts()
        with self._touching():
            self._say(Meet(self.name, self.slice_bytes, facts))
            for transfer in self._jobs:
                self._ask(transfer)
            self._introduced = True
        return facts

    def _begin(self, move: Move, stage: torch.Tensor, communicator: Communicator, lane: Lane) -> Work:
        return communicator.recv(stage)

    def _end(self, move: Move, stage: torch.Tensor, work: Work, lane: Lane) -> None:
        """Scattered is only what is known to be in: behind a receive that was aborted, a copy in the same stream would
        carry rubbish into the pool."""
        work.wait()
        with self._touching():
            lane.scatter(move.places, move.piece, stage)
        if move.last:
            if not within(self._terms.patience_s, lambda: lane.settled() or self.over is not None):
                raise PeerLost(f"copies into the pool have not ended for {self._terms.patience_s:g} s")
            self._done(move.transfer)
            lane.forget(move.places)
