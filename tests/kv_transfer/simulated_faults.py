"""Random schedules of faults on the real tables, desks, schedulers and engine loops, by a fake
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
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import simulated_world
from simulated_cluster import Call, Router, longest_s, random_call
from simulated_node import LATE_S, TRANSFER, SimulatedNode
from simulated_plane import SimulatedChecksums, SimulatedPlaneThread
from simulated_world import CLOCK, SimulatedControl, Violation, World

import kvrelay.kv_transfer.backend
import kvrelay.kv_transfer.backends
import kvrelay.kv_transfer.peers
import kvrelay.kv_transfer.transfer_engine
from kvrelay.node import engine_process

FAULTS = (
    "kill",
    "restart",
    "short stop",
    "long stop",
    "darkness",
    "cut",
    "refusal",
    "client gone",
    "router gone",
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
    with contextlib.ExitStack() as stack:
        for module in (
            kvrelay.kv_transfer.transfer_engine,
            kvrelay.kv_transfer.backend,
            engine_process,
        ):
            stack.enter_context(mock.patch.object(module, "time", CLOCK))
        stack.enter_context(
            mock.patch.object(
                kvrelay.kv_transfer.transfer_engine, "ControlThread", SimulatedControl
            )
        )
        stack.enter_context(
            mock.patch.object(kvrelay.kv_transfer.backends, "BackendThread", SimulatedPlaneThread)
        )
        stack.enter_context(
            mock.patch.object(kvrelay.kv_transfer.backends, "Checksums", SimulatedChecksums)
        )
        # Longer than a READ of this world takes, also if its source is stopped meanwhile.
        stack.enter_context(mock.patch.object(kvrelay.kv_transfer.backend, "BROKEN_S", 20.0))
        for module in (kvrelay.kv_transfer.peers, kvrelay.kv_transfer.backend, engine_process):
            stack.enter_context(mock.patch.object(module, "log", SILENT))
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
        self.pending = [self._fault() for _ in range(rng.choice([1, 1, 2, 3]))]
        if rng.random() < 0.2:
            # Whoever does not hear that his client has left, and comes again under the same name.
            self.pending[0].kind, self.pending[0].to_source = (
                rng.choice(["short stop", "darkness"]),
                False,
            )
            self.pending[0].state = rng.choice(["waiting", "reading", "confirming"])
            self.pending.insert(
                1, replace(self.pending[0], kind="client gone", delay_s=0.0, skip=0)
            )
        self.calls = rng.randint(1, 6)
        self.calls_within_s = rng.choice([0.3, 1.0, 3.0])

    def _fault(self) -> Fault:
        rng = self.rng
        kind = rng.choice(FAULTS)
        lasts_s = (
            {"short stop": 0.6, "long stop": 4.0}.get(kind, 2.0) * TRANSFER.lease_s * rng.random()
        )
        delay_s = rng.choice([0.0, 0.0, 0.003, 0.05]) * rng.random()
        return Fault(
            kind, rng.choice(STATES), rng.random() < 0.5, rng.choice([0, 0, 1, 3]), delay_s, lasts_s
        )

    def run(self) -> None:
        """Raises Violation."""
        world, rng = self.world, self.rng
        with simulation(world), contextlib.ExitStack() as stack:
            stack.callback(lambda: [node.desk._words.close() for node in world.nodes])
            for role, count in (
                ("prefill", rng.choice([1, 1, 2])),
                ("decode", rng.choice([1, 2, 2])),
            ):
                for index in range(count):
                    name = f"{role}{index}"
                    self.router.add(
                        role, SimulatedNode(world, name, f"127.0.0.{len(world.nodes) + 1}")
                    )
            self.nodes = len(world.nodes)
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
                self.ends += node.desk._fetches.failures + Counter(
                    {"Fetched": node.desk._fetches.fetched}
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
        if any(node.plane.delays() for node in alive):
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
            if node.name.startswith("decode"):
                for fetch in node.desk._fetches._fetches.values():
                    if fetch.state.name.lower() == state:
                        source = self.world.listening.get((fetch.peer.host, fetch.peer.port))
                        return Scene(source, node, fetch.request_id)
                if state == "decoding" and (running := node.engine.scheduler._running):
                    return Scene(self.world.nodes[0], node, running[0].request_id)
                continue
            leases, waiting = node.desk._leases, node.engine.scheduler._waiting
            there = {"growing": leases._growing, "held": leases._held}.get(state)
            if state == "queued" and waiting:
                return Scene(node, self._any_reader(), waiting.candidates()[0].request_id)
            if there:
                return Scene(node, self._any_reader(), next(iter(there)))
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
        elif fault.kind == "router gone":
            self.router.die()
            # Nobody tells a prefill node that what it holds is not wanted.
            world.disturbed_until(world.now + TRANSFER.lease_s + SEEN_S)
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
        elif fault.kind == "refusal":
            for front in self.router.fronts["decode"]:
                front.refuses += front.node is scene.reader
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


def run_many(
    first: int, count: int, told: Callable[[str], None] | None = None
) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Faults by kind and state, and ends of requests and fetches. Raises Violation at the first
    broken promise.
    """
    seen: Counter[tuple[str, str]] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(first, first + count):
        schedule = run_seed(seed)
        seen += schedule.seen
        ends += schedule.ends
        if told is not None and (seed + 1 - first) % 1000 == 0:
            told(f"{seed + 1 - first} schedules, {seen.total()} faults")
    return seen, ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="tell the story of this one")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=3000)
    options = parser.parse_args()
    began = time.monotonic()
    if options.seed is not None:
        schedule = run_seed(options.seed, told=True)
        sys.stdout.write("\n".join(schedule.world.trace or []) + "\n")
        return
    seen, ends = run_many(options.first, options.count, lambda text: sys.stdout.write(text + "\n"))
    for kind in FAULTS:
        row = "  ".join(f"{state} {seen[kind, state]}" for state in STATES)
        sys.stdout.write(f"{kind:12} {row}\n")
    sys.stdout.write(", ".join(f"{end} {count}" for end, count in sorted(ends.items())) + "\n")
    sys.stdout.write(
        f"{options.count} schedules kept every promise in {time.monotonic() - began:.1f} s\n"
    )


if __name__ == "__main__":
    main()
