"""Random faults, one after the other, to a cluster of real processes that serves requests.

`python tests/cluster/fault_schedules.py --count 300` runs many and says how each kind has gone.
What is promised, and checked after each: every request has ended once and in time, with the tokens
of an undisturbed run (an error only where the fault allows one), and a second after the fault's end
all blocks of all living nodes are free.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import httpx2
import msgspec
from gates import Gate, Gates, can_cut, cut_connections, family
from real_cluster import SHORT_LEASE, TINY, Cluster, Process, free_port, tiny_body, wait_until

from kvrelay.wire.config import EngineConfig
from kvrelay.wire.outputs import Load

KINDS = (
    "kill",
    "restart",
    "short stop",
    "long stop",
    "cut between nodes",
    "cut from router",
    "refusal",
    "client gone",
    "router gone",
)
STATES = ("queued", "growing", "reading", "decoding")
LEASE_S = 1.5
PROMPTS, TOKENS, LAST = 6, 1500, 32
ANSWER_DEADLINE_S = 60.0
# Below the lease, which gives back what was forgotten. A node tells its blocks twice a second.
FREE_WITHIN_S = 0.8 * LEASE_S
READY_DEADLINE_S = 90.0


def prompt_of(number: int, tokens: int = TOKENS) -> list[int]:
    """Unlike any other."""
    drawn = random.Random(number)
    return [drawn.randrange(2, 300) for _ in range(tokens)]


class Asked(threading.Thread):
    """One streamed request of a client."""

    def __init__(self, port: int, number: int, tokens: int = TOKENS) -> None:
        super().__init__(daemon=True)
        self.number, self.text, self.end, self.tokens = number, "", "", 0
        self._news = threading.Condition()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_DEADLINE_S)
        self._left = False
        body = tiny_body(prompt_of(number, tokens), max_tokens=LAST, temperature=1, seed=5)
        self._body = json.dumps(body | {"stream": True}).encode()
        self.start()

    def run(self) -> None:
        try:
            self._connection.request(
                "POST", "/v1/completions", self._body, {"content-type": "application/json"}
            )
            answer = self._connection.getresponse()
            if answer.status != 200:
                self._over(f"status {answer.status}: {answer.read()[:300]!r}")
                return
            for line in answer:
                self._take(line)
            self._over("ended silently")
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as why:
            self._over(f"broken: {why!r}")

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: [DONE]"):
            self._over("done")
        elif b'"error"' in line:
            self._over(f"error {line!r}")
        elif line.startswith(b"data: {"):
            with self._news:
                self.text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                self.tokens += 1
                self._news.notify_all()

    def _over(self, how: str) -> None:
        with self._news:
            self.end = self.end or ("left" if self._left else how)
            self._news.notify_all()

    def wait_for(self, tokens: int, within_s: float) -> None:
        """Until so many pieces have come, or it has ended, or so long."""
        with self._news:
            self._news.wait_for(lambda: bool(self.end) or self.tokens >= tokens, within_s)

    def leave(self) -> None:
        self._left = True
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)


@dataclass
class Outcome:
    """One schedule that has kept its promises."""

    seed: int
    kind: str
    state: str
    ends: Counter[str]
    seconds: float
    free_s: float


@dataclass
class Faults:
    """A cluster of two nodes of each role, behind gates."""

    cluster: Cluster
    gates: dict[str, Gate]
    control_ports: dict[int, int]  # of the nodes' HTTP ports
    expected: dict[int, str] = field(default_factory=dict)
    first_token_s: float = 0.5
    down: list[Process] = field(default_factory=list)

    def measure(self) -> None:
        """What is answered without any fault, and how fast."""
        times = []
        for number in range(PROMPTS):
            began = time.monotonic()
            asked = Asked(self.router.port, number)
            asked.wait_for(1, ANSWER_DEADLINE_S)
            times.append(time.monotonic() - began)
            asked.join(ANSWER_DEADLINE_S)
            assert asked.end == "done", asked.end
            self.expected[number] = asked.text
        assert len(set(self.expected.values())) == PROMPTS, self.expected
        self.first_token_s = sorted(times)[PROMPTS // 2]

    @property
    def router(self) -> Process:
        assert self.cluster.router is not None
        return self.cluster.router

    def run(self, seed: int) -> Outcome:
        """One fault. Raises AssertionError, naming the seed."""
        rng = random.Random(seed)
        kinds = KINDS if can_cut() else tuple(kind for kind in KINDS if kind != "cut between nodes")
        kind, state, role = rng.choice(kinds), rng.choice(STATES), rng.choice(["prefill", "decode"])
        self._wait_for_nodes()
        began = time.monotonic()
        try:
            if kind == "refusal":
                state = "queued"  # it happens when the decode leg begins, and that is soon
                self.gates[rng.choice(self._up("decode")).url].refuse_next()
            asked = [
                Asked(self.router.port, rng.randrange(PROMPTS))
                for _ in range(rng.choice([1, 2, 3]))
            ]
            self._reach(state, asked[-1], rng)
            ended_at = self._happen(kind, role, asked[-1], rng)
            for each in asked:
                each.join(max(0.0, began + ANSWER_DEADLINE_S - time.monotonic()))
                self._judge(each, kind, asked[-1])
            for gate in self.gates.values():
                gate.refuses = 0  # nobody came
            self._bring_back()
            free_s = self._all_free(max(ended_at, time.monotonic()))
        except AssertionError as why:
            said = "\n".join(self.router.log.read_text().splitlines()[-8:])
            self._bring_back()
            raise AssertionError(
                f"seed {seed}: {kind} of {role} in state {state}: {why}\n{said}"
            ) from why
        ends = Counter(each.end.partition(" ")[0].strip(":") for each in asked)
        return Outcome(seed, kind, state, ends, time.monotonic() - began, free_s)

    def _reach(self, state: str, asked: Asked, rng: random.Random) -> None:
        """The moment by the clock until the first token, and by what the client sees from then on."""
        if state == "queued":
            time.sleep(0.03 * rng.random())
        elif state == "growing":
            asked.wait_for(1, self.first_token_s * rng.uniform(0.1, 0.95))
        else:
            # With the first token the last of the KV is on its way; the second one comes of the
            # decode node.
            asked.wait_for(1 if state == "reading" else rng.randint(2, LAST - 8), ANSWER_DEADLINE_S)
            time.sleep(0.004 * rng.random())

    def _happen(self, kind: str, role: str, asked: Asked, rng: random.Random) -> float:
        """Do it. When it will have ended: seen by all, or the leases that it has left behind have
        run out.
        """
        victim = self._busy(role)
        if kind in ("kill", "restart"):
            victim.kill(signal.SIGKILL)
            victim.popen.wait(10)
            self.down.append(victim)
            if kind == "restart":
                self._bring_back()
        elif kind in ("short stop", "long stop"):
            for_s = LEASE_S * (
                rng.uniform(0.1, 0.7) if kind == "short stop" else rng.uniform(1.2, 3.0)
            )
            processes = family(victim.popen.pid)
            try:
                for pid in processes:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(for_s)
            finally:
                for pid in processes:
                    os.kill(pid, signal.SIGCONT)
        elif kind == "cut between nodes":
            for reader, source in itertools.product(self._up("decode"), self._up("prefill")):
                for pid in family(reader.popen.pid):
                    cut_connections(pid, self.control_ports[source.port])
        elif kind == "cut from router":
            self.gates[victim.url].cut()
        elif kind == "client gone":
            asked.leave()
        elif kind == "router gone":
            self.router.kill(signal.SIGKILL)
            self.router.popen.wait(10)
            self.cluster.router = self.cluster._launch("router", self.router.port, self.router.argv)
        return time.monotonic() + (
            0.0 if kind in ("refusal", "client gone", "short stop") else LEASE_S
        )

    def _judge(self, asked: Asked, kind: str, left: Asked) -> None:
        assert not asked.is_alive(), (
            f"no answer within {ANSWER_DEADLINE_S:g} s, {asked.tokens} tokens so far"
        )
        if asked.end == "done":
            assert asked.text == self.expected[asked.number], (
                f"{asked.text!r} is not {self.expected[asked.number]!r}"
            )
        elif kind == "client gone" and asked is left:
            assert asked.end == "left", asked.end
        else:
            assert kind == "router gone", asked.end
            assert asked.end.startswith("broken") or asked.end == "ended silently", asked.end

    def _all_free(self, since: float) -> float:
        """Seconds from `since` until all blocks are free."""

        def has_all(report: dict[str, Any]) -> bool:
            load = msgspec.convert(report["load"], Load)
            return load.free_blocks == load.total_blocks

        def used() -> dict[str, object]:
            reports = {f"{node.role}:{node.port}": node.health() for node in self._up()}
            return {
                name: report
                for name, report in reports.items()
                if report is None or not has_all(report)
            }

        while left := used():
            over_s = time.monotonic() - since
            if over_s >= FREE_WITHIN_S:
                tails = "\n".join(
                    node.tail() for node in self._up() if f"{node.role}:{node.port}" in left
                )
                raise AssertionError(
                    f"{over_s:.1f} s after the fault's end blocks are not free: {left}\n{tails}"
                )
            time.sleep(0.02)
        return max(0.0, time.monotonic() - since)

    def _up(self, role: str = "") -> list[Process]:
        return [
            n for n in self.cluster.nodes if n not in self.down and (not role or n.role == role)
        ]

    def _busy(self, role: str) -> Process:
        """A node with a leg on it, if there is one."""
        with suppress(httpx2.HTTPError):
            nodes = httpx2.get(f"{self.router.url}/health", timeout=5).json()["nodes"]
            legs = {int(node["url"].rpartition(":")[2]): node["legs"] for node in nodes}
            return max(self._up(role), key=lambda node: legs.get(self.gates[node.url].port, 0))
        return self._up(role)[0]

    def _bring_back(self) -> None:
        """Start again what was killed, at its address. It is `down` until it is ready."""
        for index, node in enumerate(self.down):
            if node.popen.poll() is not None:
                self.down[index] = self.cluster.restart(node)

    def _wait_for_nodes(self) -> None:
        """All nodes and the router are ready, and the router knows it."""
        self.cluster.wait_ready(*self.cluster.nodes)
        self.down.clear()

        def ready() -> bool:
            with suppress(httpx2.HTTPError):
                nodes = httpx2.get(f"{self.router.url}/health", timeout=5).json()["nodes"]
                return all(node["up"] for node in nodes)
            return False

        wait_until(ready, READY_DEADLINE_S, "the router sees all nodes", 0.05)


def attentive_model(folder: Path) -> list[str]:
    """A model whose tokens depend on every block of its KV, and the flags of a node that serves it.

    Dummy weights are so small that a model of this size hardly attends: a foreign block changed the
    answer of none of 12 prompts. With weights 15 times as large, and drawn tokens, it changed all
    12.
    """
    from safetensors.torch import save_file
    from tokenizers.decoders import ByteLevel

    from kvrelay.openai_api.tokenizer_files import byte_tokenizer
    from kvrelay.paged_engine.before_loading import checked_model
    from kvrelay.paged_engine.model_files import dummy_tensors

    model = folder / "tiny"
    model.mkdir()
    fields = TINY | {"max_position_embeddings": 4096, "tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(fields))
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu")
    tensors = {
        name: tensor * (1 if name.endswith("norm.weight") else 15)
        for name, tensor in dummy_tensors(checked_model(config, "cpu"))
    }
    save_file(tensors, str(model / "model.safetensors"), metadata={"format": "pt"})
    backend = byte_tokenizer(model / "config.json").backend
    backend.decoder = ByteLevel()
    backend.save(str(model / "tokenizer.json"))
    return ["--model", str(model), "--device", "cpu", "--threads", "1"]


@contextmanager
def cluster_of_faults(folder: Path) -> Iterator[Faults]:
    """Two prefill and two decode nodes that are ready and measured; ended, whatever happens."""
    flags = [*attentive_model(folder), "--served-model-name", "tiny"]
    flags += [
        "--kv-cache-memory-bytes",
        str(8 << 20),
        "--max-num-batched-tokens",
        "32",
        "--no-enable-prefix-caching",
    ]
    flags += [
        *SHORT_LEASE,
        "--transfer-deadline-s",
        "3",
    ]
    cluster, gates = Cluster(folder, flags), Gates()
    try:
        control_ports = {}
        for role in ("prefill", "prefill", "decode", "decode"):
            port = free_port()
            node = cluster.start(role, [*flags, "--kv-port", str(port)])
            cluster.nodes.append(node)
            control_ports[node.port] = port
        cluster.wait_ready(*cluster.nodes)
        before = {node.url: gates.before(node.port) for node in cluster.nodes}
        peers = [
            f"--{node.role}=http://127.0.0.1:{before[node.url].port}" for node in cluster.nodes
        ]
        cluster.router = cluster.start(
            "router",
            [*peers, "--strict-roles", "--health-interval-s", "0.2", "--health-deadline-s", "0.5"],
        )
        cluster.wait_ready(cluster.router)
        faults = Faults(cluster, before, control_ports)
        faults._wait_for_nodes()
        faults.measure()
        yield faults
    finally:
        cluster.stop()
        gates.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args()
    began, outcomes, broken = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory() as folder, cluster_of_faults(Path(folder)) as faults:
        for seed in range(options.first, options.first + options.count):
            try:
                outcomes.append(faults.run(seed))
                print(f"{outcomes[-1]}", flush=True)
            except AssertionError as why:
                broken += 1
                print(f"BROKEN {why}", flush=True)
    for kind in KINDS:
        of = [outcome for outcome in outcomes if outcome.kind == kind]
        ends = sum((outcome.ends for outcome in of), Counter())
        slowest = max((outcome.free_s for outcome in of), default=0.0)
        print(
            f"{kind:18} {len(of):4} schedules, {dict(ends)}, blocks free {slowest:.2f} s after "
            f"its end at most"
        )
    print(
        f"{len(outcomes)} of {options.count} schedules kept every promise in "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
