"""Sessions that grow, branch and end, on nodes that pull KV and keep it in tiers: no token may differ.

    python -m tests.soak.sessions --seconds 600 --seed 1
    python -m tests.soak.sessions --upgrade --sessions 50 [--from COMMIT]

The first kills, stops and restarts engines, cache processes and nodes, and damages files, while pools
and tiers are too small for a session; a node without any cache answers all again. Odd seeds share a
store folder, every third moves KV by NIXL. The second kills each engine and then restarts each node;
it prints the shares of known tokens that were found, undisturbed and not. Exits with 1 if a token
differs, something is not given back, or more than two points are lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.cluster.previous_release import code_of
from tests.cluster.real_cluster import (
    SHORT_LEASE,
    Cluster,
    Process,
    cached_of,
    children,
    tiny_body,
    tiny_model,
    wait_until,
)
from tests.soak.report import reported

__all__ = ["Soak", "disturbed", "main", "running"]

BLOCK, CONTEXT = 16, 2048
ENGINE, HOST = b"engine_process", b"cache_process"
POISON = "while they had this request"
_AGAIN_S, _PATIENCE_S = 0.3, 180.0
_MOST_FILES, _MOST_LOST, _LIVE = 64, 0.02, 6
_FAULTS = {
    "kill engine": 3,
    "kill host": 1,
    "kill node": 2,
    "restart": 2,
    "stop engine": 3,
    "stop host": 2,
    "damage": 4,
    "reset": 1,
    "stale": 2,
}
"""How often each is drawn. damage: files of a store are flipped, cut off and exchanged; stale: a node
is sent to sources that are no more.
"""


@dataclass
class Session:
    """One conversation, drawn from a seed; at times a turn goes on from an earlier one."""

    seed: str
    history: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Tokens after each turn."""
    known: int = 0
    """Tokens of the newest prompt that have been computed before."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        shared, salt = self.rng.randrange(2), self.rng.choice([None, None, "a", "b"])
        self.turns = self.rng.randint(2, 20)
        self.history = [2 + at * (at + shared) % 300 for at in range(64)]
        self.fields = {} if salt is None else {"cache_salt": salt}

    def next(self) -> dict[str, Any]:
        rng = self.rng
        if self.starts and rng.random() < 0.2:
            del self.history[rng.choice(self.starts) :]
        self.known = (len(self.history) - 1) // BLOCK * BLOCK if self.starts else 0
        self.history += [rng.randrange(2, 300) for _ in range(rng.randrange(20, 64))]
        drawn = {"max_tokens": rng.randrange(8, 28), "seed": rng.getrandbits(30)}
        body = tiny_body(list(self.history), temperature=1, return_token_ids=True)
        return body | drawn | self.fields

    def heard(self, tokens: Sequence[int]) -> None:
        self.history += tokens
        self.starts.append(len(self.history))


class Soak:
    """A 2P2D cluster with a router, and a node without any cache, `plain`, if it is asked for."""

    def __init__(
        self, folder: Path, seed: int, *, plain: bool = False, large: bool = False, commit: str = ""
    ) -> None:
        """`commit`: the code that nodes begin with."""
        self.rng, self.seed, self.folder = random.Random(seed), seed, folder
        # The small pool has 127 blocks of 8 KiB, and the host's memory 63.
        flags = tiny_model(folder, CONTEXT, kv_mib=16 if large else 1)
        flags += [*SHORT_LEASE, "--transfer-deadline-s", "3", "--kv-pull", "always"]
        if seed % 3 == 2:
            flags += ["--kv-connector", "nixl"]
        self.cluster = it = Cluster(folder, flags)
        env = {"PYTHONPATH": str(code_of(commit, folder / "old"))} if commit else {}
        memory, store = ("32MiB", "256MiB") if large else ("512KiB", "2MiB")
        tiers = ["--kv-checksums", "0.001", "--kv-host-memory", memory, "--kv-store-size", store]
        for at, role in enumerate(("prefill", "prefill", "decode", "decode")):
            where = folder / f"store{0 if seed % 2 else at}"
            mine = [*tiers, "--kv-store", str(where)]
            it.nodes.append(it.start(role, [*flags, *mine], env=env))
        self.plain = it.start("serve", [*flags, "--no-enable-prefix-caching"]) if plain else None
        it.others += [self.plain] if self.plain else []
        self.broken: list[str] = []
        self.counts: Counter[str] = Counter()
        self.answers: dict[tuple[str, int], list[int]] = {}
        self._lock = threading.Lock()

    def ready(self) -> None:
        it = self.cluster
        it.wait_ready(*it.nodes, *it.others)
        it.router = it.start("router", [f"--{node.role}={node.url}" for node in it.nodes])
        it.wait_ready(it.router)
        it.wait_up()
        self.sources = [node.as_source(CONTEXT) for node in it.nodes]

    def ask(self, url: str, body: dict[str, Any]) -> Any:
        """Return an answer, however often it takes to ask; None if it may not be asked again."""
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            try:
                answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=_PATIENCE_S)
                if answer.status_code == 200:
                    return answer.json()
                if POISON in answer.text:
                    return None
                if answer.status_code < 500 and answer.status_code != 429:
                    raise AssertionError(answer.text)
                why = f"{answer.status_code} {answer.json()['error']['message'][:90]}"
            except httpx2.TransportError as error:
                why = repr(error)
            self.counts[f"asked again: {why}"] += 1
            time.sleep(_AGAIN_S)
        raise AssertionError(f"no answer within {_PATIENCE_S:g} s")

    def turn(self, session: Session) -> bool:
        """Have a session answered, and compare; False if it cannot go on."""
        body = session.next()
        answer = self.ask(self.cluster.url, body)
        if answer is None:
            self.counts["given up"] += 1
            return False
        mine, key = answer["choices"][0]["token_ids"], (session.seed, len(session.starts))
        if self.plain is not None:
            self.answers[key] = self.ask(self.plain.url, body)["choices"][0]["token_ids"]
        if mine != (wanted := self.answers.setdefault(key, mine)):
            self.broken.append(f"{key}: {mine}, not {wanted}; {answer['usage']}")
        session.heard(wanted)
        with self._lock:
            found = min(cached_of(answer), session.known)
            self.counts += Counter(turns=1, known=session.known, found=found)
        return True

    def talk(
        self,
        name: str,
        going: Callable[[], bool],
        live: int = 1,
        turns: int = 1 << 30,
        pause_s: float = 0.0,
    ) -> None:
        """Have so many `live` sessions of this client in turn, and others as they end."""
        sessions, rng = [Session(f"{name}.{-at}") for at in range(live)], random.Random(name)
        try:
            for turn in range(turns):
                if not going():
                    return
                at = rng.randrange(live)
                if not self.turn(sessions[at]) or len(sessions[at].starts) == sessions[at].turns:
                    sessions[at] = Session(f"{name}.{turn + 1}")
                time.sleep(rng.random() * 2 * pause_s)
        except Exception as why:  # noqa: BLE001 - of a thread
            self.broken.append(f"{name}: {why!r}")

    @contextmanager
    def crowd(self, clients: int, **talk: Any) -> Iterator[list[threading.Thread]]:
        """Have clients talk until the block ends."""
        going = True
        threads = [
            threading.Thread(
                target=self.talk, args=(f"{self.seed} {at}", lambda: going), kwargs=talk
            )
            for at in range(clients)
        ]
        for each in threads:
            each.start()
        try:
            yield threads
        finally:
            going = False
            for each in threads:
                each.join()

    # Faults.

    def strike(self, kind: str, node: Process | None = None) -> None:
        node = node or self.rng.choice(self.cluster.nodes)
        self.counts[kind] += 1
        what = HOST if kind.endswith("host") else ENGINE
        if kind in ("kill node", "restart"):
            self.end(node, signal.SIGKILL if kind == "kill node" else signal.SIGTERM)
        elif kind.startswith("kill"):
            self.send(node, what, signal.SIGKILL)
        elif kind.startswith("stop"):
            self.send(node, what, signal.SIGSTOP)
            time.sleep(0.2 * 25 ** self.rng.random())
            self.send(node, what, signal.SIGCONT)
        elif kind == "damage":
            self.damage()
        elif kind == "reset":
            with suppress(httpx2.TransportError):
                httpx2.post(f"{node.url}/reset_prefix_cache", timeout=10)
        elif kind == "stale":
            self.stale(node)

    def send(self, node: Process, what: bytes, how: signal.Signals) -> None:
        for pid in children(node.popen.pid, what):
            with suppress(ProcessLookupError):
                os.kill(pid, how)

    def end(self, node: Process, how: signal.Signals = signal.SIGTERM) -> None:
        node.kill(how)
        node.popen.wait(60)

    def damage(self) -> None:
        """Damage files as they are used: each in another way."""
        files = [each for each in self.folder.glob("store*/*/*") if not each.suffix]
        for path in self.rng.sample(files, min(len(files), 20)):
            with suppress(OSError):
                content, other = bytearray(path.read_bytes()), self.rng.choice(files).read_bytes()
                content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
                at = self.rng.randrange(len(content))
                path.write_bytes(self.rng.choice([bytes(content), bytes(content[:at]), other]))
                self.counts["damaged files"] += 1

    def stale(self, node: Process) -> None:
        """Ask a node with sources of an earlier time; its answer must be right."""
        source = self.rng.choice(self.sources) | self.rng.choice([{}, {"generation": "another"}])
        body = Session(f"stale {self.rng.random()}").next()
        params = {"do_remote_decode": True} if node.role == "prefill" else {}
        asked = body | {"max_tokens": 1, "kv_transfer_params": params | {"sources": [source]}}
        with suppress(httpx2.TransportError):
            answer = httpx2.post(f"{node.url}/v1/completions", json=asked, timeout=60)
            if self.plain is not None and answer.status_code == 200:
                right = self.ask(self.plain.url, body)["choices"][0]["token_ids"]
                if answer.json()["choices"][0]["token_ids"] != right[:1]:
                    self.broken.append(f"stale {source}: {answer.text}")

    def mend(self, *, all_: bool = True) -> None:
        """Start again what has ended, and nodes without a host process."""
        for node in list(self.cluster.nodes):
            if node.popen.poll() is not None:
                self.cluster.restart(node)
            elif all_ and node.health() and not children(node.popen.pid, HOST):
                self.end(node)
                self.cluster.restart(node)

    def whole(self, *, idle: bool = True) -> None:
        """Wait until all is up and, `idle`, has given back all that it took."""

        def up() -> bool:
            self.mend()
            return all(node.health() for node in self.cluster.nodes)

        wait_until(up, "all nodes are up", deadline_s=180, interval_s=0.2)
        self.cluster.wait_up()
        if not idle:
            return
        self.cluster.all_blocks_free(60)
        for name in ("blocks_held", "blocks_quarantined", "tier_host_used_blocks"):
            for node in self.cluster.nodes:
                with suppress(AssertionError):
                    wait_until(lambda: node.metric(f"kvrelay_{name}") == 0, name)  # noqa: B023
                    continue
                self.broken.append(f"{node.role}:{node.port} has {name}: {node.log}")


@contextmanager
def running(folder: Path, seed: int, **wanted: Any) -> Iterator[Soak]:
    soak = Soak(folder, seed, **wanted)
    try:
        soak.ready()
        yield soak
    finally:
        soak.cluster.stop()


def disturbed(soak: Soak, clients: int, seconds: float, every_s: float, turns: int = 0) -> None:
    """Strike for so long, and until there were so many turns."""
    end = time.monotonic() + seconds
    with soak.crowd(clients, live=_LIVE):
        while (time.monotonic() < end or soak.counts["turns"] < turns) and not soak.broken:
            time.sleep(soak.rng.expovariate(1 / every_s))
            soak.strike(soak.rng.choices(list(_FAULTS), list(_FAULTS.values()))[0])
            soak.mend(all_=soak.rng.random() < 0.3)
    soak.whole()
    soak.broken += [
        f"process {each.name} has {count} files open, after {soak.counts}"
        for each in (each for node in soak.cluster.nodes for each in node.engines())
        if (count := len(list(each.joinpath("fd").iterdir()))) > _MOST_FILES
    ]


def upgraded(soak: Soak, clients: int, turns: int, *, struck: bool) -> float:
    """Have so many turns; return the share of known tokens that was found.

    If `struck`, engines are killed, and then nodes restarted, at equal distances.
    """
    kinds = ["kill engine", "restart"] if struck else []
    faults = [(kind, at) for kind in kinds for at in range(len(soak.cluster.nodes))]
    with soak.crowd(clients, turns=turns, pause_s=4.0) as threads:
        for number, (kind, at) in enumerate(faults, 1):
            due = clients * turns * number / (len(faults) + 1)
            wait_until(lambda: soak.counts["turns"] >= due, "turns", deadline_s=300)  # noqa: B023
            soak.strike(kind, soak.cluster.nodes[at])
            soak.whole(idle=False)
        for each in threads:
            each.join()
    return soak.counts["found"] / soak.counts["known"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=float, default=300.0)
    add("--sessions", type=int, default=6, help="at any moment")
    add("--every-s", type=float, default=1.5, help="between two faults, in the mean")
    add("--upgrade", action="store_true")
    add("--from", dest="commit", default="", help="the code that --upgrade begins with")
    add("--turns", type=int, default=20, help="of each client with --upgrade")
    add("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    def run(folder: Path) -> dict[str, Any]:
        with running(folder, options.seed, plain=True) as soak:
            disturbed(soak, options.sessions, options.seconds, options.every_s)
        return {**soak.counts, "broken": soak.broken}

    def upgrade(folder: Path) -> dict[str, Any]:
        rates, broken = [], list[str]()
        answers: dict[tuple[str, int], list[int]] = {}
        for struck in (False, True):
            within = folder / str(struck)
            within.mkdir()
            commit = options.commit if struck else ""
            with running(within, options.seed, large=True, commit=commit) as soak:
                soak.answers = answers
                rates.append(upgraded(soak, options.sessions, options.turns, struck=struck))
                broken += soak.broken
            print(soak.counts, file=sys.stderr)
        if rates[0] - rates[1] > _MOST_LOST:
            broken.append(f"{rates[0]:.1%} was found undisturbed, and {rates[1]:.1%}")
        return {"undisturbed": rates[0], "struck": rates[1], "broken": broken}

    return reported("sessions", upgrade if options.upgrade else run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
