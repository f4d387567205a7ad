"""The admission of one simulated router: the real queue and its rules, on the simulation's clock.

As router/admission/gate.py, without keys: each request is one of a nobody's. Owns no decision.
Milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.router.admission.admission import Admission
from kvrelay.router.admission.fair_queue import Entrant
from kvrelay.router.admission.rate_limits import Refusal
from kvrelay.router.placement import Refuse, Wait
from kvrelay.router.request.placer import ChosenNodes, PlacementQuery
from kvrelay.simulator.routers import Router
from kvrelay.simulator.stream import Stream
from kvrelay.wire.errors import KvrelayError, NoNode

__all__ = ["DEADLINE_MS", "Door"]

DEADLINE_MS = 600_000.0
"""Of a request: a router's request_deadline_s, if nobody has changed it."""
_LOOK_MS = 10.0
"""As the gate looks while somebody waits."""

Begins = Callable[[Stream, ChosenNodes, float], None]
"""Place it there and begin."""


class Door:
    """Of one router."""

    def __init__(
        self, router: Router, max_queue: int, later: Callable[[float, Callable[[float], None]], None],
        begins: Begins, refused: Callable[[Stream], None],
    ) -> None:  # fmt: skip
        """`later(at, call)` runs a call at a time."""
        self._router, self._later = router, later
        self._begins, self._refused = begins, refused
        self._admission: Admission[Entrant, ChosenNodes] = Admission(max_queue, self._find)
        self._entrants: dict[Stream, Entrant] = {}
        self._waiting: dict[Entrant, tuple[Stream, PlacementQuery]] = {}
        self._looking = False

    def arrive(self, stream: Stream, now: float) -> None:
        """It begins now or in its turn, or is refused."""
        targets = self._router.targets(stream)
        wanted = self._router.placer.limited(self._router.wanted(stream), targets)
        entrant = Entrant(
            "",
            now / 1e3,
            priority=stream.priority,
            tokens=stream.prompt + round(wanted.request.output),
            ttft_s=targets.ttft_s,
            deadline=(now + DEADLINE_MS) / 1e3,
        )
        self._waiting[entrant] = stream, wanted
        self._entrants[stream] = entrant
        try:
            found = self._admission.arrive(entrant)
        except NoNode:
            self._refuse(entrant)
            return
        if isinstance(found, Refusal):
            self._refuse(entrant)
        elif not isinstance(found, Wait):
            self._begin(entrant, found, now)
        elif not self._looking:
            self._looking = True
            self._later(now + _LOOK_MS, self._look)

    def ended(self, stream: Stream, now: float) -> None:
        """It is over, however it ended; others may begin."""
        entrant = self._entrants.pop(stream, None)
        if entrant is not None:
            self._admission.queue.correct(entrant, stream.prompt + stream.done)
            self._turn(now)

    def _find(self, entrant: Entrant) -> ChosenNodes | Wait | Refuse:
        found = self._router.find(self._waiting[entrant][1])
        if found is None:
            raise NoNode("no node could take it, now or later")
        return found

    def _turn(self, now: float) -> None:
        for entrant, found in self._admission.turns(now / 1e3):
            if isinstance(found, Refusal | KvrelayError):
                self._refuse(entrant)
            else:
                self._begin(entrant, found, now)

    def _begin(self, entrant: Entrant, found: ChosenNodes, now: float) -> None:
        self._begins(self._waiting.pop(entrant)[0], found, now)

    def _look(self, now: float) -> None:
        self._turn(now)
        self._looking = bool(self._waiting)
        if self._looking:
            self._later(now + _LOOK_MS, self._look)

    def _refuse(self, entrant: Entrant) -> None:
        stream, _ = self._waiting.pop(entrant)
        del self._entrants[stream]
        self._refused(stream)
