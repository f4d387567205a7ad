"""Puts the batches of KV events of one node in order, whatever is lost, doubled or late. Pure."""

from __future__ import annotations

from kvrelay.wire.kv_events import EventBatch, is_snapshot

__all__ = ["EventStream"]

# Batches that wait for one that is missing; more are dropped, and come again with the next replay.
MAX_AHEAD = 4_096


class EventStream:
    """A stream of batches, which begins with a replay of what the node held before.

    `rebuilds`: a replay that does not reach back far enough brings all that is held instead, as our
    nodes' does.
    """

    def __init__(self, *, rebuilds: bool = True) -> None:
        self._rebuilds = rebuilds
        self.next_number = 0  # of the batch that is taken next
        self.complete = False  # what was taken is all that the node held
        self._ahead: dict[int, EventBatch] = {}

    @property
    def gap(self) -> bool:
        """Return whether a replay is needed now."""
        return not self.complete or bool(self._ahead)

    def add(self, number: int, batch: EventBatch) -> list[EventBatch]:
        """Add a batch, live or of a replay; return those that can be taken now, in order."""
        if number < self.next_number:
            return []
        if is_snapshot(batch):
            self.next_number = number + 1
            self._ahead = {at: later for at, later in self._ahead.items() if at > number}
            return [batch, *self._following()]
        if len(self._ahead) < MAX_AHEAD or number == self.next_number:
            self._ahead[number] = batch
        return self._following() if self.complete else []

    def end_replay(self) -> tuple[list[EventBatch], bool]:
        """Return the batches that can be taken now, and whether some before them are lost for ever.

        If so, what was known of the node must be forgotten first. There may still be a gap.
        """
        self.complete = True
        ready, lost = self._following(), False
        if self._ahead and not self._rebuilds:
            self.next_number, lost = min(self._ahead), True
            ready = self._following()
        return ready, lost

    def _following(self) -> list[EventBatch]:
        ready: list[EventBatch] = []
        while (batch := self._ahead.pop(self.next_number, None)) is not None:
            ready.append(batch)
            self.next_number += 1
        return ready
