"""The two ends of a pair: a source that sends what it is asked for, and a reader that asks and
receives.

Owns what the one does with a slice and what the other does; the order of slices is
kv_transfer/pairs.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrelay.kv_transfer.communicators import NcclCommunicator, NcclWork
from kvrelay.kv_transfer.pair_messages import Ask, Leave, Meet, PairMessage
from kvrelay.kv_transfer.pairs import READER, SOURCE, Move, Pair, Terms, Transfer, within
from kvrelay.kv_transfer.shares import Share
from kvrelay.kv_transfer.staging import Lane
from kvrelay.wire.errors import PeerLost, TransferError

__all__ = ["ReaderPair", "SourcePair"]

# Transfers that a reader may ask for before the first of them is through.
MAX_ASKS = 4096


class SourcePair(Pair):
    """Sends what it is asked for."""

    def __init__(
        self,
        meet: Meet,
        terms: Terms,
        say: Callable[[PairMessage], None],
        ended: Callable[[Pair], None],
    ) -> None:
        """A reader wants to meet."""
        super().__init__(meet.pair, SOURCE, meet.slice_bytes, terms, say, ended)
        self._facts = meet.facts

    def serve(self, ask: Ask) -> None:
        """Send so many bytes of these blocks when those before them are through.

        Raises ValueError for what no reader may ask."""
        blocks, start, num_bytes = ask.blocks, ask.start, ask.num_bytes
        with self._changed:
            if len(self._jobs) >= MAX_ASKS:
                raise ValueError(f"more than {MAX_ASKS} transfers asked for at once")
            num_blocks = self._terms.pool.num_blocks
            if not blocks or not all(0 <= block < num_blocks for block in blocks):
                raise ValueError(
                    f"asked for none, or for some outside a pool of {num_blocks} blocks"
                )
            if not 0 <= start < start + num_bytes <= self._terms.pool.block_bytes:
                raise ValueError(
                    f"asked for {num_bytes} bytes from {start} on of {self._terms.pool.block_bytes}"
                )
            self._jobs.append(Transfer(blocks, (), Share(start, 0, num_bytes)))
            self._changed.notify_all()

    def _meet(self) -> NcclCommunicator:
        return self._terms.nccl.join(self._facts, self._given_up, self._deadline)

    def _leave(self) -> float:
        """Only the reader knows whether it is still receiving, or has asked; one that is gone is
        not waited for.
        """
        self._say(Leave(self.name))
        return self._terms.patience_s

    def _begin(
        self, move: Move, stage: torch.Tensor, communicator: NcclCommunicator, lane: Lane
    ) -> NcclWork:
        with self._touching():
            lane.gather(move.places, move.piece, stage)
        return communicator.send(stage)

    def _end(self, move: Move, stage: torch.Tensor, work: NcclWork, lane: Lane) -> None:
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

    def read(self, transfer: Transfer) -> bool:
        """False if this pair has ended: another one is needed."""
        with self._changed:
            if self.over is not None:
                return False
            self._jobs.append(transfer)
            if self._introduced:
                self._ask(transfer)
            self._changed.notify_all()
        return True

    def unheard(self, error: TransferError) -> list[Transfer]:
        """The source has closed this pair as idle: end it, and what it has not heard of is for
        another pair.
        """
        return self._end_now(error)

    def _ask(self, transfer: Transfer) -> None:
        part = transfer.part
        self._say(Ask(self.name, list(transfer.remote_blocks), part.remote_start, part.num_bytes))

    def _leave(self) -> float:
        return 0.0

    def _meet(self) -> NcclCommunicator:
        return self._terms.nccl.invite(self._introduce, self._given_up, self._deadline)

    def _introduce(self, facts: bytes) -> None:
        with self._touching():
            self._say(Meet(self.name, self.slice_bytes, facts))
            for transfer in self._jobs:
                self._ask(transfer)
            self._introduced = True

    def _begin(
        self, move: Move, stage: torch.Tensor, communicator: NcclCommunicator, lane: Lane
    ) -> NcclWork:
        return communicator.recv(stage)

    def _end(self, move: Move, stage: torch.Tensor, work: NcclWork, lane: Lane) -> None:
        """Scattered is only what is known to be in: behind a receive that was aborted, a copy in
        the same stream would carry rubbish into the pool.
        """
        work.wait()
        with self._touching():
            lane.scatter(move.places, move.piece, stage)
        if move.last:
            if not within(self._terms.patience_s, lambda: lane.settled() or self.over is not None):
                raise PeerLost(
                    f"copies into the pool have not ended for {self._terms.patience_s:g} s"
                )
            self._done(move.transfer)
            lane.forget(move.places)
