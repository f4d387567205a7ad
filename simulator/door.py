"""The admission of one simulated router: the real queue and its rules, on the simulation's clock.

As router/admission/controller.py, without keys: each request is one of a nobody's. Owns no decision.
Milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.router.admission.admission_queue import AdmissionQueue
from kvrelay.router.admission.fair_queue import QueuedRequest
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
"""As the admission controller looks while somebody waits."""

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
        self._admission: AdmissionQueue[QueuedRequest, ChosenNodes] = AdmissionQueue(
            max_queue, self._find
        )
        self._requests: dict[Stream, QueuedRequest] = {}
        self._waiting: dict[QueuedRequest, tuple[Stream, PlacementQuery]] = {}
        self._looking = False

    def arrive(self, stream: Stream, now: float) -> None:
        """It begins now or in its turn, or is refused."""
        targets = self._router.targets(stream)
        wanted = self._router.placer.limited(self._router.wanted(stream), targets)
        request = QueuedRequest(
            "",
            now / 1e3,
            priority=stream.priority,
            tokens=stream.prompt + round(wanted.request.output),
            ttft_s=targets.ttft_s,
            deadline=(now + DEADLINE_MS) / 1e3,
        )
        self._waiting[request] = stream, wanted
        self._requests[stream] = request
        try:
            found = self._admission.arrive(request)
        except NoNode:
            self._refuse(request)
            return
        if isinstance(found, Refusal):
            self._refuse(request)
        elif not isinstance(found, Wait):
            self._begin(request, found, now)
        elif not self._looking:
            self._looking = True
            self._later(now + _LOOK_MS, self._look)

    def ended(self, stream: Stream, now: float) -> None:
        """It is over, however it ended; others may begin."""
        request = self._requests.pop(stream, None)
        if request is not None:
            self._admission.queue.correct(request, stream.prompt + stream.done)
            self._turn(now)

    def _find(self, request: QueuedRequest) -> ChosenNodes | Wait | Refuse:
        found = self._router.find(self._waiting[request][1])
        if found is None:
            raise NoNode("no node could take it, now or later")
        return found

    def _turn(self, now: float) -> None:
        for request, found in self._admission.leaving(now / 1e3):
            if isinstance(found, Refusal | KvrelayError):
                self._refuse(request)
            else:
                self._begin(request, found, now)

    def _begin(self, request: QueuedRequest, found: ChosenNodes, now: float) -> None:
        self._begins(self._waiting.pop(request)[0], found, now)

    def _look(self, now: float) -> None:
        self._turn(now)
        self._looking = bool(self._waiting)
        if self._looking:
            self._later(now + _LOOK_MS, self._look)

    def _refuse(self, request: QueuedRequest) -> None:
        stream, _ = self._waiting.pop(request)
        del self._requests[stream]
        self._refused(stream)
