"""Which requests begin now, which wait, and which are told to come back, and when. Pure: times are given, in seconds.

One queue for the nodes of one model, bounded. The first in it begins as soon as a prefill node wants work and a decode
node has room, for its KV and within its target of time per token. Whoever cannot have its first token in time is told
so on arrival, with the time that the queue takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from router.admission.fair_queue import Ahead, Entrant, FairQueue
from router.admission.saturation import (
    Freed,
    Nodes,
    Promised,
    own_tpot_s,
    own_ttft_s,
    ttft_s,
    until_decode_s,
    until_prefill_s,
)

__all__ = ["Admission", "Arrival", "Refusal"]

_NOBODY = Ahead()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not. `reason` is one of few words, for metrics."""

    reason: str
    message: str
    retry_after_s: float | None
    """How long it would wait from now on if it came again; None: it will never be taken as it is. 0 is not known."""


class Arrival(msgspec.Struct, frozen=True):
    """What becomes of a newcomer: refused, or it begins, or it waits; and who must leave the queue for it."""

    begins: bool = False
    refusal: Refusal | None = None
    displaced: Entrant | None = None
    displacement: Refusal | None = None


class Admission:
    """Who is not refused leaves exactly once: by `leave` or `late` while it waits, by `ended` once it began."""

    def __init__(self, max_queue: int) -> None:
        self.queue = FairQueue()
        self._max_queue = max_queue
        self._begun: set[Entrant] = set()
        self._promised = Promised()
        self._not_prefilling: set[Entrant] = set()
        self._not_decoding: set[Entrant] = set()
        self._freed = Freed()
        self._next_late = math.inf
        """Nobody in the queue is late before."""

    def take_over(self, max_queue: int) -> None:
        """So many may wait from now on; those that wait go on waiting."""
        self._max_queue = max_queue

    def arrive(self, entrant: Entrant, nodes: Nodes, now: float, max_of_key: int = 0) -> Arrival:
        """A newcomer. `max_of_key` bounds how many of its key may wait; 0 does not."""
        never = self._never(entrant, nodes)
        if never is not None:
            return Arrival(refusal=never)
        decode_s: float | None = None
        if not self.queue and until_prefill_s(nodes, self._promised) == 0:
            decode_s = until_decode_s(entrant, nodes, self._promised, self._freed, _NOBODY)
        has_room = decode_s == 0 or not (self.queue or self._begun)
        if entrant.ttft_s is not None or not has_room:
            late = self._late(entrant, nodes)
            if late is not None:
                return Arrival(refusal=late)
        if has_room:
            self._begin(entrant)
            return Arrival(begins=True)
        return self._line_up(entrant, nodes, max_of_key)

    def next(self, nodes: Nodes) -> Entrant | None:
        """Begin the first that waits, if there is room for it. `nodes` may change from one call to the next."""
        first = self.queue.first()
        if first is None:
            return None
        # With nothing under way there is nothing to wait for, whatever the nodes are thought to hold.
        if self._begun and (
            until_prefill_s(nodes, self._promised) or until_decode_s(first, nodes, self._promised, self._freed, _NOBODY)
        ):
            return None
        self._begin(first)
        return first

    def late(self, nodes: Nodes, now: float) -> list[tuple[Entrant, Refusal]]:
        """Take those out of the queue whose time is over: of the request, or for a first token as it was wanted."""
        if now < self._next_late:
            return []
        found: list[tuple[Entrant, Refusal]] = []
        for entrant in [entrant for entrant in self.queue if entrant.begin_by <= now]:
            self.queue.remove(entrant)
            if entrant.ttft_s is None or entrant.deadline <= now:
                why = f"the request waited for {now - entrant.arrived:.1f} s, until its deadline, and no node had room"
                found.append((entrant, Refusal("deadline", f"{why}; try again later", None)))
            else:
                why = f"the request waited for {now - entrant.arrived:.2f} s, and its target for the first token is "
                again = self._expected_s(entrant, nodes)
                found.append((entrant, Refusal("ttft_passed", f"{why}{entrant.ttft_s:g} s; {_LATER}", again)))
        self._next_late = min((entrant.begin_by for entrant in self.queue), default=math.inf)
        return found

    def leave(self, entrant: Entrant) -> None:
        """It waits no more: its client has gone."""
        self.queue.remove(entrant)

    def waits(self, entrant: Entrant) -> bool:
        """Whether it is in the queue."""
        return entrant in self.queue

    def placed(self, entrant: Entrant, *, prefilling: bool, decoding: bool) -> None:
        """Nodes count it themselves from now on."""
        if prefilling and entrant in self._not_prefilling:
            self._not_prefilling.discard(entrant)
            self._promised.prefill_requests -= 1
            self._promised.prefill_tokens -= entrant.uncached
        if decoding and entrant in self._not_decoding:
            self._not_decoding.discard(entrant)
            self._promised.decode_requests -= 1
            self._promised.kv_tokens -= entrant.tokens

    def ended(self, entrant: Entrant, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """It began and is over, however it ended, after so many tokens."""
        self._begun.discard(entrant)
        self.placed(entrant, prefilling=True, decoding=True)
        self.queue.correct(entrant, prompt_tokens + output_tokens)
        if output_tokens:
            self._freed.ended(prompt_tokens + output_tokens, now)

    def _expected_s(self, entrant: Entrant, nodes: Nodes) -> float:
        """How long a newcomer waits for its first token, behind all that would begin before it. 0 is not known."""
        ahead = self.queue.ahead(entrant)
        decode_s = until_decode_s(entrant, nodes, self._promised, self._freed, ahead)
        return ttft_s(entrant, nodes, self._promised, ahead, decode_s)

    def _begin(self, entrant: Entrant) -> None:
        self.queue.begin(entrant)
        for promised in (self._begun, self._not_prefilling, self._not_decoding):
            promised.add(entrant)
        self._promised.prefill_requests += 1
        self._promised.prefill_tokens += entrant.uncached
        self._promised.decode_requests += 1
        self._promised.kv_tokens += entrant.tokens

    def _line_up(self, entrant: Entrant, nodes: Nodes, max_of_key: int) -> Arrival:
        mine = self.queue.waiting(entrant.key)
        if max_of_key and mine >= max_of_key:
            why = f"{mine} requests of this key wait, and its limit is {max_of_key}; {_LATER}"
            return Arrival(refusal=Refusal("key_queue_full", why, self._expected_s(entrant, nodes)))
        if len(self.queue) < self._max_queue:
            self._push(entrant, nodes)
            return Arrival()
        full = f"{len(self.queue)} requests wait, and the limit is {self._max_queue}; {_LATER}"
        displaced = self.queue.displaced_by(entrant)
        if displaced is None:
            return Arrival(refusal=Refusal("queue_full", full, self._expected_s(entrant, nodes)))
        self.queue.remove(displaced)
        self._push(entrant, nodes)
        less = "less important" if displaced.priority > entrant.priority else "of a key with more of them"
        again = self._expected_s(displaced, nodes)
        return Arrival(displaced=displaced, displacement=Refusal("displaced", f"{full} (it was {less})", again))

    def _push(self, entrant: Entrant, nodes: Nodes) -> None:
        in_time = math.inf if entrant.ttft_s is None else entrant.arrived + entrant.ttft_s - own_ttft_s(entrant, nodes)
        entrant.begin_by = min(entrant.deadline, in_time)
        self._next_late = min(self._next_late, entrant.begin_by)
        self.queue.push(entrant)

    def _never(self, entrant: Entrant, nodes: Nodes) -> Refusal | None:
        """Targets that an idle cluster would miss, too."""
        if entrant.ttft_s is not None and (alone := own_ttft_s(entrant, nodes)) > entrant.ttft_s:
            return Refusal(
                "ttft_never",
                f"the first token of this prompt takes about {alone * 1e3:.0f} ms without any queue, and the target is "
                f"{entrant.ttft_s * 1e3:g} ms; send a shorter prompt or a higher target",
                None,
            )
        if entrant.tpot_s is not None and (alone := own_tpot_s(nodes)) > entrant.tpot_s:
            takes = f"a token takes about {alone * 1e3:.1f} ms on an idle node"
            return Refusal(
                "tpot_never", f"{takes}, and the target is {entrant.tpot_s * 1e3:g} ms; send a higher one", None
            )
        return None

    def _late(self, entrant: Entrant, nodes: Nodes) -> Refusal | None:
        """A first token that would come behind its target."""
        if entrant.ttft_s is None:
            return None
        expected = self._expected_s(entrant, nodes)
        if expected <= entrant.ttft_s:
            return None
        return Refusal(
            "ttft",
            f"the first token would take about {expected * 1e3:.0f} ms, and the target is {entrant.ttft_s * 1e3:g} ms; "
            f"{_LATER}, or send a higher target",
            expected - entrant.ttft_s,
        )


_LATER = "try again after the time in Retry-After"
