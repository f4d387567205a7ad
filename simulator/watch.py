"""What the online planner of a simulation sees, from what a router can know, and what its decisions lead to.

Work is reckoned by the rate card: of a prompt the time that it takes alone, of an answer its tokens at the largest
batch whose steps keep the target, with contexts and lengths as those of the answers that have just ended.
"""

from __future__ import annotations

from planning.balance import Balance, Seen, enough
from planning.planner import NETWORK_MS, token_ms
from simulator.cluster import Clock, Cluster
from simulator.setting import Flipped, Result, Setting
from simulator.stream import Stream
from wire.config import Role

__all__ = ["Watch"]


class Watch:
    """Looks every few seconds."""

    def __init__(self, setting: Setting, cluster: Cluster, clock: Clock, result: Result) -> None:
        assert setting.balancing is not None
        assert setting.targets is not None
        self._every_s = setting.balancing.every_s
        self._balance = Balance(setting.balancing)
        self._targets = setting.targets
        self._speeds, self._decodes = setting.speeds, setting.speeds_of(Role.DECODE)
        self._cluster, self._clock, self._result = cluster, clock, result
        self._prompts: list[int] = []
        self._due: dict[Stream, None] = {}
        """Whose first token can come in time still; in the order of arrival."""
        self._answers = self._answer_tokens = self._kept_tokens = 0
        self._output = self._context = 0.0
        self._running = self._all_answers = 0
        self._known = False
        self._first = [0, 0]
        self._last = [0, 0]
        clock.later(self._every_s * 1e3, self._look)

    def arrived(self, stream: Stream) -> None:
        """A request is asked."""
        self._prompts.append(stream.prompt)
        self._due[stream] = None

    def first_token(self, stream: Stream) -> None:
        """It has its first token."""
        self._running += 1
        if stream in self._due:
            del self._due[stream]
            self._first[0] += 1
            self._first[1] += stream.ttft + NETWORK_MS <= self._targets.ttft_ms

    def ended(self, stream: Stream) -> None:
        """It has its last token."""
        self._running -= 1
        self._answers += 1
        self._all_answers += 1
        self._answer_tokens += stream.output
        self._kept_tokens += stream.prompt + stream.output
        self._last[0] += 1
        self._last[1] += stream.tpot <= self._targets.tpot_ms

    def _look(self, now: float) -> None:
        while self._due and now - (oldest := next(iter(self._due))).at + NETWORK_MS > self._targets.ttft_ms:
            del self._due[oldest]
            self._first[0] += 1
        decision = self._balance.look(
            self._prefill(now), self._decode(now), now / 1e3, switching=self._cluster.switching
        )
        self._prompts.clear()
        self._answers = self._answer_tokens = self._kept_tokens = 0
        self._first, self._last = [0, 0], [0, 0]
        if decision.role is not None:
            idle = Role.DECODE if decision.role is Role.PREFILL else Role.PREFILL
            nodes = self._cluster.nodes
            at = min(self._cluster.taking(idle), key=lambda each: (nodes[each].requests, each))
            self._result.flips.append(Flipped(now, at, decision.role, decision.why))
            self._cluster.change_role(at, decision.role, now)
        self._clock.later(now + self._every_s * 1e3, self._look)

    def _prefill(self, now: float) -> Seen:
        work_ms = sum(self._speeds.prompt_ms(tokens) for tokens in self._prompts)
        taking = self._cluster.taking(Role.PREFILL)
        waiting = sum(self._cluster.nodes[at].tokens for at in taking)
        waits_ms = waiting * (work_ms / max(1, sum(self._prompts)))
        # What a node computes within a moment is no backlog.
        backlog_ms = max(0.0, waits_ms - len(taking) * self._targets.ttft_ms / 2)
        ended, met = self._first
        return Seen(len(taking), work_ms / 1e3 / self._every_s, backlog_ms / 1e3, ended, met)

    def _decode(self, now: float) -> Seen:
        taking = self._cluster.taking(Role.DECODE)
        if self._answers:
            self._output = self._answer_tokens / self._answers
            self._context = self._kept_tokens / self._answers - self._output / 2
        self._known = self._known or enough(self._all_answers, self._running)
        if not self._output:
            return Seen(len(taking), 0.0, known=False)
        each_ms = token_ms(self._decodes.card, self._context, self._targets.tpot_ms)
        work_ms = len(self._prompts) * self._output * each_ms
        waiting = sum(self._cluster.nodes[at].waiting for at in taking)
        waiting += sum(router.waiting_for_room for router in self._cluster.routers)
        work, waits_s = work_ms / 1e3 / self._every_s, waiting * self._output * each_ms / 1e3
        ended, met = self._last
        return Seen(len(taking), work, waits_s, ended, met, known=self._known)
