"""Random schedules of faults on the real tables, engines, schedulers and engine loops, by a fake
clock.

`python tests/kv_transfer/simulated_faults.py --seed 7` tells the story of one; `--first 0 --count
100000` runs many. What is promised, and checked: admitted KV is the right one, no READ writes to a
block that is free or somebody else's, every request and every fetch ends exactly once, none is
late, and a second after the last fault has ended all blocks of all living nodes are free. When a
fault has ended is said where it is made.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import simulated_world
from simulated_backend import SimulatedBackendThread, SimulatedChecksums
from simulated_cluster import Call, Router, longest_s, random_call
from simulated_node import LATE_S, TRANSFER, SimulatedNode
from simulated_world import CLOCK, SimulatedControl, Violation, World

import kvrelay.kv_transfer.backend
import kvrelay.kv_transfer.peers
import kvrelay.kv_transfer.rank_backends
import kvrelay.kv_transfer.transfer_engine
from kvrelay.node import engine_process, pulls

FAULTS = (
    "kill",
    "restart",
    "short stop",
    "long stop",
    "darkness",
    "cut",
    "client gone",
)
STATES = (
    "queued",
    "growing",
    "held",
    "watched",
    "waiting",
    "reading",
    "confirming",
    "abandoned",
    "decoding",
)
# A fault is over when the last one whom it concerns has seen it, or has seen the lease run out.
SEEN_S = simulated_world.SLOW_S + LATE_S
FREE_WITHIN_S = 1.0
SILENT = logging.Logger("simulated", logging.CRITICAL + 1)


@dataclass(slots=True)
class Fault:
    """What happens to whom, as soon as some request is in this state (for the `skip`-th time)."""

    kind: str
    state: str
    to_source: bool
    skip: int
    delay_s: float
    lasts_s: float


@dataclass(slots=True)
class Scene:
    """Who is in the state that a fault waits for."""

    source: SimulatedNode | None
    reader: SimulatedNode | None
    request_id: str


@contextlib.contextmanager
def simulation(world: World) -> Iterator[None]:
    """The modules under test live in this world."""
    CLOCK.world = world
    engine, backend = kvrelay.kv_transfer.transfer_engine, kvrelay.kv_transfer.backend
    threads, peers = kvrelay.kv_transfer.rank_backends, kvrelay.kv_transfer.peers
    with contextlib.ExitStack() as stack:
        for module, name, instead in (
            (engine, "time", CLOCK),
            (backend, "time", CLOCK),
            (engine_process, "time", CLOCK),
            (pulls, "time", CLOCK),
            (engine, "ControlThread", SimulatedControl),
            (threads, "BackendThread", SimulatedBackendThread),
            (threads, "Checksums", SimulatedChecksums),
            # Longer than a READ of this world takes, also if its source is stopped meanwhile.
            (backend, "BROKEN_S", 20.0),
            (peers, "log", SILENT),
            (backend, "log", SILENT),
            (engine_process, "log", SILENT),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        yield


class Schedule:
    """One cluster, its requests and its faults, made of a seed."""

    def __init__(self, seed: int, *, told: bool = False) -> None:
        self.world = world = World(seed)
        self.rng = rng = world.rng
        world.trace = [] if told else None
        world.blind_reads = rng.random() < 0.4
        world.shares_words = rng.random() < 0.4
        world.checksums = 1.0 if seed % 4 == 0 else 0.0
        world.slowest_read_s = rng.choice([0.02, 0.3, 1.0, 3.0, 3.0])
        self.seen: Counter[tuple[str, str]] = Counter()  # faults by kind and state
        self.ends: Counter[str] = Counter()  # how requests and fetches have ended
        self.router = Router(world, rng)
        if seed % 3 == 1:  # with draws of their own: the other schedules stay as they are
            self.router.pulls = random.Random(seed)
        self.pending = [self._fault() for _ in range(rng.choice([1, 1, 2, 3]))]
        if rng.random() < 0.2:
            # Whoever does not hear that his client has left, and comes again under the same name.
            first = self.pending[0]
            first.kind, first.to_source = rng.choice(["short stop", "darkness"]), False
            first.state = rng.choice(["waiting", "reading", "confirming"])
            self.pending.insert(1, replace(first, kind="client gone", delay_s=0.0, skip=0))
        self.calls = rng.randint(1, 6)
        self.calls_within_s = rng.choice([0.3, 1.0, 3.0])

    def _fault(self) -> Fault:
        rng = self.rng
        kind = rng.choice(FAULTS)
        longest_s = {"short stop": 0.6, "long stop": 4.0}.get(kind, 2.0) * TRANSFER.lease_s
        return Fault(
            kind,
            rng.choice(STATES),
            to_source=rng.random() < 0.5,
            skip=rng.choice([0, 0, 1, 3]),
            delay_s=rng.choice([0.0, 0.0, 0.003, 0.05]) * rng.random(),
            lasts_s=longest_s * rng.random(),
        )

    def run(self) -> None:
        """Raises Violation."""
        world, rng = self.world, self.rng
        with simulation(world), contextlib.ExitStack() as stack:
            stack.callback(lambda: [node.connector._words.close() for node in world.nodes])
            for role, counts in (("prefill", [1, 1, 2]), ("decode", [1, 2, 2])):
                for index in range(rng.choice(counts)):
                    host = f"127.0.0.{len(world.nodes) + 1}"
                    self.router.add(role, SimulatedNode(world, f"{role}{index}", host))
            for index in range(self.calls):
                call = random_call(rng, f"c{index}")
                world.after(
                    rng.random() * self.calls_within_s, lambda call=call: self.router.begin(call)
                )
            # The longest way through all faults, and then alone through the queue.
            limit_s = longest_s(self.calls) + 40 * TRANSFER.lease_s
            world.run(self._all_ended, limit_s)
            self.pending.clear()
            world.disturbed_until(world.now)
            world.run(self._over, limit_s)
            for node in world.nodes:
                if node.alive:
                    node.check_all()
                    if left := node.idle():
                        raise Violation(
                            f"{node.name} still has {left}, {FREE_WITHIN_S:g} s after the last "
                            f"fault's end"
                        )
                stats = node.connector._fetches.stats
                self.ends += stats.failures
                self.ends["Fetched"] += stats.fetches - stats.failures.total()
                self.ends["pulled"] += node.pulled
                self.ends += Counter(
                    {f"ask {why}": n for why, n in node.connector._asks.failures.items()}
                )
            self.ends += Counter(call.end for call in self.router.calls)

    def _all_ended(self) -> bool:
        if self.pending:
            self._look()
        calls = self.router.calls
        return len(calls) >= self.calls and all(call.end for call in calls)

    def _over(self) -> bool:
        """Nothing is left to happen, or it is too late for it."""
        world = self.world
        if not self._all_ended():
            world.disturbed_until(world.now)
            return False
        alive = [node for node in world.nodes if node.alive]
        if any(node.backend.delays() for node in alive):
            world.disturbed_until(world.now)  # a READ that takes long is a fault, too
        if not world.events or world.now >= world.calm_at + FREE_WITHIN_S:
            return True
        return world.now >= world.calm_at and not any(node.idle() for node in alive)

    # When a fault happens.

    def _look(self) -> None:
        for fault in self.pending:
            scene = self._scene(fault.state)
            if scene is None:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            self.pending.remove(fault)
            self.seen[fault.kind, fault.state] += 1
            self.world.after(
                fault.delay_s, lambda fault=fault, scene=scene: self._happen(fault, scene)
            )
            return

    def _scene(self, state: str) -> Scene | None:
        for node in self.world.nodes:
            if not node.alive:
                continue
            for fetch in node.connector._fetches._fetches.values():
                if fetch.state.name.lower() == state:
                    source = self.world.listening.get((fetch.peer.host, fetch.peer.port))
                    return Scene(source, node, fetch.request_id)
            if node.name.startswith("decode"):
                if state == "decoding" and (running := node.engine.scheduler._running):
                    return Scene(self.world.nodes[0], node, running[0].request_id)
                continue
            waiting = node.engine.scheduler._waiting
            offers = node.connector._offers._offers.values()
            there = [
                offer.ticket.remote_request_id
                for offer in offers
                if state == ("growing" if offer.ticket.growing else "held")
            ]
            if state == "queued" and (begin := waiting.candidates()):
                return Scene(node, self._any_reader(), begin[0].request_id)
            if there:
                return Scene(node, self._any_reader(), there[0])
        return None

    def _any_reader(self) -> SimulatedNode:
        return self.rng.choice(
            [node for node in self.world.nodes if node.name.startswith("decode")]
        )

    # What it does, and when it has ended.

    def _happen(self, fault: Fault, scene: Scene) -> None:
        world = self.world
        victim = scene.source if fault.to_source else scene.reader
        world.say(
            f"*** {fault.kind} in state {fault.state}: {scene.request_id}, {victim and victim.name}"
        )
        call = next(
            (
                c
                for c in self.router.calls
                if scene.request_id.startswith(f"{c.name}-") and not c.end
            ),
            None,
        )
        if fault.kind == "client gone":
            if call is not None:
                self.router.client_leaves(call)
                self._come_again(call)
        elif victim is None or not victim.alive:
            return
        elif fault.kind in ("kill", "restart"):
            self._kill(victim, restart=fault.kind == "restart", after_s=fault.lasts_s)
        elif fault.kind in ("short stop", "long stop"):
            victim.stop(fault.lasts_s)
            self.router.node_stopped(victim)
            world.disturbed_until(
                world.now + fault.lasts_s + TRANSFER.lease_s * (fault.kind == "long stop") + SEEN_S
            )
            self._crowd(fault.lasts_s)
        elif scene.source is not None and scene.reader is not None:
            self._part(scene.source, scene.reader, fault)

    def _kill(self, victim: SimulatedNode, *, restart: bool, after_s: float) -> None:
        world = self.world
        victim.kill()
        self.router.node_died(victim)
        # Its connections tell it to those who read from it; what it would have read is held for a
        # lease.
        world.disturbed_until(world.now + TRANSFER.lease_s + SEEN_S)
        if restart:
            role = victim.name.rstrip("0123456789'")

            def again() -> None:
                self.router.add(role, SimulatedNode(world, f"{victim.name}'", victim.host))

            world.after(after_s * 0.3, again)

    def _part(self, source: SimulatedNode, reader: SimulatedNode, fault: Fault) -> None:
        world = self.world
        if fault.kind == "darkness":
            until = world.now + fault.lasts_s
            world.dark[frozenset((source.host, reader.host))] = until
            # What was on its way arrives then; a lease that was renewed by it runs out after that.
            world.disturbed_until(until + TRANSFER.lease_s + SEEN_S)
            self._crowd(fault.lasts_s)
            return
        for link in world.links:
            if link.reader is reader and link.source is source and link.up and not link.hung_up:
                link.reset()
        # The source is not told: what it held for this reader is free when the lease has run out.
        world.disturbed_until(world.now + TRANSFER.lease_s + SEEN_S)

    def _crowd(self, lasts_s: float) -> None:
        """Others come, who take the blocks of whoever has lost them meanwhile."""
        if self.rng.random() < 0.5:
            for _ in range(3):
                self.calls += 1
                call = random_call(self.rng, f"c{self.calls}x")
                self.world.after(
                    lasts_s * self.rng.random(), lambda call=call: self.router.begin(call)
                )

    def _come_again(self, call: Call) -> None:
        """Another request under the same name, at once: whatever is still under way is of the other
        one.
        """
        if self.rng.random() < 0.6:
            again = random_call(self.rng, call.name)
            self.calls += 1
            self.world.after(self.rng.random() * 0.1, lambda: self.router.begin(again))


def run_seed(seed: int, *, told: bool = False) -> Schedule:
    """Raises Violation, naming the seed and how to see it again."""
    schedule = Schedule(seed, told=told)
    try:
        schedule.run()
    except Exception as why:
        if told and schedule.world.trace:
            sys.stderr.write("\n".join(schedule.world.trace) + "\n")
        again = f"python tests/kv_transfer/simulated_faults.py --seed {seed}"
        raise Violation(f"seed {seed}: {type(why).__name__}: {why} (the story: {again})") from why
    return schedule


def run_many(first: int, count: int) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Faults by kind and state, and ends of requests and fetches. Raises Violation."""
    seen: Counter[tuple[str, str]] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(first, first + count):
        schedule = run_seed(seed)
        seen += schedule.seen
        ends += schedule.ends
    return seen, ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="tell the story of this one")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=3000)
    options = parser.parse_args()
    if options.seed is not None:
        sys.stdout.write("\n".join(run_seed(options.seed, told=True).world.trace or []) + "\n")
        return
    seen, ends = run_many(options.first, options.count)
    sys.stdout.write(f"{seen}\n{ends}\n{options.count} schedules kept every promise\n")


if __name__ == "__main__":
    main()
