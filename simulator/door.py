"""The admission of one simulated router: the real queue and its rules, on the simulation's clock.

As router/admission/gate.py, without keys: each request is one of a nobody's. Owns no decision.
"""

from __future__ import annotations

from collections.abc import Callable

from router.admission.admission import Admission
from router.admission.fair_queue import Entrant
from router.admission.saturation import Nodes
from router.nodes.pool import Pool
from simulator.stream import Stream
from wire.config import Role

__all__ = ["Door"]


class Door:
    """Of one router. At most `max_queue` wait."""

    def __init__(self, pool: Pool, max_queue: int) -> None:
        self._pool = pool
        self._admission = Admission(max_queue)
        self._entrants: dict[Stream, Entrant] = {}
        self._waiting: dict[Entrant, tuple[Stream, Callable[[Stream, float], None]]] = {}

    def arrive(
        self,
        stream: Stream,
        now: float,
        begins: Callable[[Stream, float], None],
        refused: Callable[[Stream], None],
    ) -> None:
        """It begins now or in its turn, or is refused. Milliseconds."""
        nodes = self._nodes()
        expected = nodes.decode[0].rates.output_tokens() if nodes.decode else 0.0
        entrant = Entrant(
            "", now / 1e3, priority=stream.priority, prompt_tokens=stream.prompt, output_tokens=round(expected)
        )
        arrival = self._admission.arrive(entrant, nodes, now / 1e3)
        if arrival.refusal is not None:
            refused(stream)
            return
        self._entrants[stream] = entrant
        if arrival.displaced is not None:
            other, _ = self._waiting.pop(arrival.displaced)
            del self._entrants[other]
            refused(other)
        if arrival.begins:
            begins(stream, now)
        else:
            self._waiting[entrant] = stream, begins

    def placed(self, stream: Stream, *, decoding: bool) -> None:
        """A node counts it from now on."""
        self._admission.placed(self._entrants[stream], prefilling=True, decoding=decoding)

    def ended(self, stream: Stream, now: float) -> None:
        """It is over, however it ended; others may begin."""
        entrant = self._entrants.pop(stream, None)
        if entrant is None:
            return
        self._admission.ended(entrant, stream.prompt, stream.done, now / 1e3)
        self.turn(now)

    def turn(self, now: float) -> None:
        """Let begin who may."""
        while (entrant := self._admission.next(self._nodes())) is not None:
            stream, begins = self._waiting.pop(entrant)
            begins(stream, now)

    def _nodes(self) -> Nodes:
        return Nodes(self._pool.up(Role.PREFILL), self._pool.up(Role.DECODE))
