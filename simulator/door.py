"""The admission of one simulated router: the real queue and its rules, on the simulation's clock.

As router/admission/gate.py, without keys: each request is one of a nobody's. Owns no decision. Milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from router.admission.admission import Admission
from router.admission.fair_queue import Entrant
from router.admission.saturation import Nodes
from router.nodes.pool import Pool
from simulator.setting import Setting
from simulator.stream import Stream
from wire.config import Role

__all__ = ["Door"]

_LOOK_MS = 10.0
"""As the gate looks while somebody waits."""


class Door:
    """Of one router. At most `max_queue` wait; with targets who would miss them is refused."""

    def __init__(self, pool: Pool, setting: Setting, later: Callable[[float, Callable[[float], None]], None]) -> None:
        """`later(at, call)` runs a call at a time."""
        self._pool, self._setting, self._later = pool, setting, later
        self._admission = Admission(setting.max_queue)
        self._entrants: dict[Stream, Entrant] = {}
        self._waiting: dict[Entrant, tuple[Stream, Callable[[Stream, float], None], Callable[[Stream], None]]] = {}
        self._looking = False

    def arrive(
        self,
        stream: Stream,
        now: float,
        begins: Callable[[Stream, float], None],
        refused: Callable[[Stream], None],
    ) -> None:
        """It begins now or in its turn, or is refused."""
        nodes, targets = self._nodes(), self._setting.targets
        expected = nodes.decode[0].rates.output_tokens() if nodes.decode else 0.0
        entrant = Entrant(
            "",
            now / 1e3,
            priority=stream.priority,
            prompt_tokens=stream.prompt,
            output_tokens=round(expected),
            ttft_s=None if targets is None else targets.ttft_ms / 1e3,
            tpot_s=None if targets is None else targets.tpot_ms / 1e3,
        )
        arrival = self._admission.arrive(entrant, nodes, now / 1e3)
        if arrival.refusal is not None:
            refused(stream)
            return
        self._entrants[stream] = entrant
        if arrival.displaced is not None:
            self._refuse(arrival.displaced)
        if arrival.begins:
            begins(stream, now)
            return
        self._waiting[entrant] = stream, begins, refused
        if not self._looking:
            self._looking = True
            self._later(now + _LOOK_MS, self._look)

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
            stream, begins, _ = self._waiting.pop(entrant)
            begins(stream, now)

    def _look(self, now: float) -> None:
        for entrant, _ in self._admission.late(self._nodes(), now / 1e3):
            self._refuse(entrant)
        self.turn(now)
        self._looking = bool(self._waiting)
        if self._looking:
            self._later(now + _LOOK_MS, self._look)

    def _refuse(self, entrant: Entrant) -> None:
        stream, _, refused = self._waiting.pop(entrant)
        del self._entrants[stream]
        refused(stream)

    def _nodes(self) -> Nodes:
        prefill, decode = (self._pool.up(role) for role in (Role.PREFILL, Role.DECODE))
        return Nodes(prefill, decode, self._setting.conditional)
