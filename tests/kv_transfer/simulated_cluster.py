"""The router and the clients of the simulated world: requests walk through two nodes as in
router/request/run.py.

A front stands for a node's HTTP process: it knows which requests are alive and aborts those whose
caller has left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from simulated_device import EOS, chain, next_token
from simulated_node import STEP_S, SimulatedNode
from simulated_world import Violation, World

from kvrelay.wire.engine_messages import Order, RequestUpdate, StepOutputs, Submit
from kvrelay.wire.outputs import Finish
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import Source, Ticket

ATTEMPTS = 3
# After so long without a word the router cuts the legs on a node, as it does after three health
# checks.
NODE_LOST_S = 1.2


def answer_of(prompt: list[int], max_tokens: int) -> list[int]:
    """What any node must say to this."""
    value, answer = chain(prompt)[-1], []
    while len(answer) < max_tokens and (not answer or answer[-1] != EOS):
        answer.append(next_token(value))
        value = chain(answer[-1:], value)[-1]
    return answer


@dataclass(eq=False, slots=True)
class Leg:
    """One request on one node."""

    call: Call
    front: Front
    request_id: str
    role: str
    at: int = 0  # tokens of the answer before its next one
    begun_at: float = 0.0
    over: bool = False


@dataclass(eq=False, slots=True)
class Call:
    """One request of a client."""

    name: str
    prompt: list[int]
    max_tokens: int
    pipelined: bool
    answer: list[int]
    tokens: list[int] = field(default_factory=list)
    ticket: Ticket | None = None
    handover: tuple[Ticket | None, list[int]] | None = None
    prefill: Leg | None = None
    decode: Leg | None = None
    tried: list[tuple[str, SimulatedNode]] = field(default_factory=list)
    settled: bool = False
    end: str = ""
    ended: int = 0


class Front:
    """The HTTP process of a node, and the way to it."""

    def __init__(self, world: World, node: SimulatedNode, router: Router) -> None:
        self.world, self.node, self._router = world, node, router
        self._legs: dict[str, Leg] = {}
        self._heard_until = 0.0
        node.tell = lambda outputs: self._later(partial(self._hear, outputs, world.now))

    def _later(self, what: Callable[[], None]) -> None:
        """In order, and not while the node sleeps."""
        self._heard_until = max(self._heard_until, self.world.now + self.world.rng.random() * 0.003)
        self.world.after(self._heard_until - self.world.now, lambda: self._now(what))

    def _now(self, what: Callable[[], None]) -> None:
        if not self.node.alive:
            return
        if not self.node.running:
            self.world.after(self.node.stopped_until - self.world.now, lambda: self._now(what))
            return
        what()

    def submit(self, leg: Leg, submit: Submit) -> None:
        def begin() -> None:
            if leg.over:
                return
            self._legs[leg.request_id] = leg
            leg.begun_at = self.world.now
            self.node.give(submit)

        self._later(begin)

    def leave(self, leg: Leg) -> None:
        """The caller has closed the connection."""
        leg.over = True

        def abort() -> None:
            if self._legs.pop(leg.request_id, None) is not None:
                self.node.give(Order("abort", leg.request_id))

        self._later(abort)

    def release(self, request_id: str) -> None:
        """On a connection of its own: not in order with the others."""
        self.world.after(
            self.world.way_s(),
            lambda: self._now(lambda: self.node.give(Order("release", request_id))),
        )

    def _hear(self, outputs: StepOutputs, said_at: float) -> None:
        for update in outputs.updates:
            leg = self._legs.get(update.request_id)
            if leg is not None and said_at < leg.begun_at:
                continue  # of another leg that had its name
            if leg is None:  # its abort gives back what is held
                continue
            if update.finish is not None:
                del self._legs[update.request_id]
            self._router.update(leg, update)


class Router:
    """Decides which node; knows of a node's end a little later than it happens."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.fronts: dict[str, list[Front]] = {"prefill": [], "decode": []}
        self.calls: list[Call] = []
        self.pulls: random.Random | None = None
        """With it requests name sources, of which some are wrong."""

    def add(self, role: str, node: SimulatedNode) -> None:
        self.fronts[role].append(Front(self.world, node, self))

    def begin(self, call: Call) -> None:
        if self.pulls is not None and self.calls and self.pulls.random() < 0.7:  # another turn
            before = self.pulls.choice(self.calls)
            call.prompt = [*before.prompt, *before.answer][:40] + call.prompt[-3:]
            call.answer = answer_of(call.prompt, call.max_tokens)
        self.calls.append(call)
        self._prefill(call)

    # What ends legs and calls.

    def node_died(self, node: SimulatedNode) -> None:
        """Seen by its connections."""
        self.world.after(self.world.way_s(), lambda: self._lost(node))

    def node_stopped(self, node: SimulatedNode) -> None:
        """Seen by its silence, if it lasts."""

        def look() -> None:
            if not node.running and node.alive:
                self._lost(node)

        self.world.after(NODE_LOST_S, look)

    def _lost(self, node: SimulatedNode) -> None:
        for call in self.calls:
            for leg in (call.prefill, call.decode):
                if leg is not None and leg.front.node is node and not leg.over:
                    leg.front.leave(leg)
                    self.broke(leg, "node lost", left=True)

    def client_leaves(self, call: Call) -> None:
        if not call.end:
            self._end(call, "left")

    def broke(self, leg: Leg, why: str, *, left: bool = False) -> None:
        """A leg is over without its end."""
        call = leg.call
        if leg.over and not left:
            return
        leg.over = True
        self.world.say(
            f"router: the {leg.role} leg of {call.name} on {leg.front.node.name} broke: {why}"
        )
        if call.end:
            return
        if leg.role == "decode":
            if leg is call.decode:
                call.decode = None
                self._decode(call)
        elif call.handover is None and call.decode is None:
            if call.tokens:
                self._decode(call)  # from the tokens that the client has
            else:
                call.ticket = None
                self._prefill(call)

    def _end(self, call: Call, how: str) -> None:
        call.ended += 1
        if call.ended > 1:
            raise Violation(f"{call.name} has ended twice: {call.end}, {how}")
        call.end = how
        self.world.say(f"router: {call.name} ends: {how}")
        cut = call.prefill is not None and not call.prefill.over
        for leg in (call.prefill, call.decode):
            if leg is not None and not leg.over:
                leg.front.leave(leg)
        ticket = call.ticket if call.handover is None else call.handover[0]
        if call.settled or call.prefill is None:
            return
        if ticket is not None:
            call.prefill.front.release(ticket.remote_request_id)
        elif cut:
            # Its hand-over may be on its way, unread: released by the name of the call.
            call.prefill.front.release(call.name)

    # The walk.

    def _choose(self, call: Call, role: str) -> Front | None:
        tried = [node for name, node in call.tried if name == role]
        there = [f for f in self.fronts[role] if f.node.alive and f.node not in tried]
        if not there or len(tried) >= ATTEMPTS:
            return None
        front = self.rng.choice(there)
        call.tried.append((role, front.node))
        return front

    def _prefill(self, call: Call) -> None:
        front = self._choose(call, "prefill")
        if front is None:
            self._end(call, "no prefill node")
            return
        # Real nodes make a new id for each leg. A lease whose name comes again is harder.
        sources = self._sources(call, front)
        name = f"{call.name}-p{next(self.world.count)}" if sources else f"{call.name}-p"
        call.prefill = Leg(call, front, name, "prefill")
        params = SamplingParams(max_tokens=1, seed=1)
        hold = call.max_tokens > 1
        front.submit(call.prefill, Submit(name, call.prompt, params, hold=hold, sources=sources))

    def _sources(self, call: Call, front: Front) -> list[Source]:
        if self.pulls is None or self.pulls.random() < 0.2:
            return []
        node = self.pulls.choice([each for each in self.world.nodes if each is not front.node])
        generation = node.connector.generation if self.pulls.random() < 0.9 else "another"
        return [Source(node.host, 1, generation, len(call.prompt))]

    def _decode(self, call: Call) -> None:
        front = self._choose(call, "decode")
        if front is None:
            self._end(call, "no decode node")
            return
        fetch, generated = None, list(call.tokens)
        if call.handover is not None and len(call.tokens) <= 1:
            fetch, generated = call.handover[0], list(call.handover[1])
        elif call.ticket is not None and len(call.tokens) <= 1:
            fetch, generated = call.ticket, []
        call.decode = Leg(
            call, front, f"{call.name}-d{next(self.world.count)}", "decode", at=len(generated)
        )
        params = SamplingParams(max_tokens=call.max_tokens, seed=1)
        if len(generated) >= call.max_tokens or (generated and generated[-1] == EOS):
            self._end(call, "done")
            return
        front.submit(
            call.decode,
            Submit(
                call.decode.request_id,
                call.prompt,
                params,
                generated=generated,
                fetch=fetch,
                sources=self._sources(call, front),
            ),
        )

    def update(self, leg: Leg, update: RequestUpdate) -> None:
        """A node says how far it is."""
        call = leg.call
        if leg.over or call.end:
            return
        if update.error is not None:
            self.broke(leg, update.error)
            return
        begin, leg.at = leg.at, leg.at + len(update.token_ids)
        call.tokens += update.token_ids[len(call.tokens) - begin :]
        if leg.role == "decode":
            call.settled |= bool(update.token_ids) or update.finish is not None
        if call.tokens != call.answer[: len(call.tokens)]:
            raise Violation(f"{call.name} is told {call.tokens}, not {call.answer}")
        if leg.role == "prefill" and update.held is not None and update.finish is None:
            call.ticket = update.held
            if call.pipelined and call.decode is None:
                self._decode(call)
        if update.finish is None:
            return
        leg.over = True
        if leg.role == "decode" or update.finish is Finish.STOP or call.max_tokens == 1:
            self._end(call, "done")
            return
        call.handover = (update.held, list(update.token_ids))
        if call.decode is None:
            self._decode(call)


def random_call(rng: random.Random, name: str) -> Call:
    """Prompts of a few families, so that some have a prefix in common."""
    family = random.Random(rng.randrange(3))
    shared = [family.randrange(1, 900) for _ in range(rng.choice([0, 6, 13]))]
    prompt = [*shared, *(rng.randrange(1, 900) for _ in range(rng.randrange(1, 30)))]
    max_tokens = rng.choice([1, 2, 3, 8])
    return Call(name, prompt, max_tokens, rng.random() < 0.7, answer_of(prompt, max_tokens))


def longest_s(calls: int) -> float:
    """How long so many requests may take on one undisturbed node of the slowest kind, one after the
    other.
    """
    return 2.0 + calls * 64 * STEP_S
