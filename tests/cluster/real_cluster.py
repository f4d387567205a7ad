"""A real cluster for tests: node and router processes on free ports of the loopback, ended by pid."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import msgspec

from benchmarks.local_cluster import free_ports
from kvrelay.wire.config import EngineConfig, TransferConfig
from kvrelay.wire.ladder import RUNGS
from kvrelay.wire.outputs import Load

DEADLINE_S = 120.0  # what comes in a moment may take a minute on a busy machine
START_DEADLINE_S = 300.0  # two seconds on a machine that has nothing else to do
SHORT_LEASE = ["--lease-s", "1.5", "--heartbeat-s=0.3"]
# Settings of clusters that modules share (conftest.py); the body is one of the decode node.
SMALL_LEASE_S, SMALL_LONGEST_BODY = 2.5, 10_000
EMBEDDED_KEY = "token-abc123"
ADMIN_KEY = "an-operator"

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
# The likeliest tokens are mostly the same with foreign KV; drawn ones are not.
DRAWN = {"temperature": 1, "seed": 5}
_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def tiny_model(folder: Path, max_position_embeddings: int = 1024, *, kv_mib: int = 8) -> list[str]:
    """Write a model of two small layers to `folder`/tiny; return the flags of a node of one thread.

    A request calls the model `tiny`.
    """
    model = folder / "tiny"
    model.mkdir()
    content = {**TINY, "max_position_embeddings": max_position_embeddings}
    (model / "config.json").write_text(json.dumps(content))
    flags = ["--model", str(model), "--load-format=dummy", "--device=cpu", "--threads=1"]
    return [*flags, "--kv-cache-memory-bytes", str(kv_mib << 20)]


def attentive_model(folder: Path, max_position_embeddings: int, *, kv_mib: int) -> list[str]:
    """Write such a model whose tokens depend on every block of its KV, with a chat template.

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
    fields = {"max_position_embeddings": max_position_embeddings, "tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(TINY | fields))
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu")
    tensors = {
        name: tensor * (1 if name.endswith("norm.weight") else 15)
        for name, tensor in dummy_tensors(checked_model(config, "cpu"))
    }
    save_file(tensors, str(model / "model.safetensors"), metadata={"format": "pt"})
    backend = byte_tokenizer(model / "config.json").backend
    backend.decoder = ByteLevel()
    backend.save(str(model / "tokenizer.json"))
    flags = ["--model", str(model), "--device=cpu", "--threads=1"]
    return [*flags, "--kv-cache-memory-bytes", str(kv_mib << 20)]


def tiny_body(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    """Return a completion request of 12 tokens to the tiny model, the same at each time."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    return body | {"ignore_eos": True} | fields


def complete(url: str, prompt: Any = "hello", **fields: Any) -> Any:
    """Return the answer to such a request, or all chunks of it with `stream`."""
    body = tiny_body(prompt, **fields)
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return chunks_of(answer.text) if body.get("stream") else answer.json()


def text_of(answer: Any) -> str:
    """Return the text of the only choice of an answer or of the chunks of a stream."""
    chunks = answer if isinstance(answer, list) else [answer]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def chunks_of(events: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream that has ended as it should."""
    *lines, done, end = events.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), events[-300:]
    # Comments keep a stream alive that waits for its first token.
    return [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(":")]


async def stream_until(
    stop: asyncio.Event,
    session: aiohttp.ClientSession,
    url: str,
    body: Callable[[int], dict[str, Any]],
    wanted: Callable[[int], str] | None = None,
    *,
    pause_s: float = 0.0,
) -> int:
    """Stream one answer after the other; each must be whole, and say what is wanted.

    `body` and `wanted` are asked with the number of answers before. Return how many there were.
    """
    done = 0
    while not stop.is_set():
        asked = body(done) | {"stream": True}
        async with session.post(f"{url}/v1/completions", json=asked) as answer:
            text = await answer.text()
        assert answer.status == 200, text
        chunks = chunks_of(text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length", text[-300:]
        assert wanted is None or text_of(chunks) == wanted(done)
        done += 1
        await asyncio.sleep(pause_s)
    return done


def cached_of(answer: Any) -> int:
    """Return how many of the prompt's tokens were not computed."""
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def ticket_of(prefill: Process, prompt: Any, **fields: Any) -> dict[str, Any]:
    """Have a node compute a prompt, as a third party's proxy does; return its hand-over."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = complete(prefill.url, prompt, max_tokens=1, kv_transfer_params=asked, **fields)
    ticket: dict[str, Any] = answer["kv_transfer_params"]
    return ticket


def ids(name: int, count: int) -> list[int]:
    """Return a prompt whose first block is no other name's (modulo 300)."""
    return [2 + (name * 7919 + at * at * (name + 3)) % 300 for at in range(count)]


def rungs(cluster: Cluster, prompt: list[int]) -> dict[str, int]:
    """Ask the router; return the rungs that are not empty, once it knows what nodes hold now."""
    assert cluster.router is not None
    answer = complete(cluster.url, prompt, include_metrics=True)
    found: dict[str, int] = answer["kvrelay"]["prompt"]
    assert list(found) == list(RUNGS)
    assert sum(found.values()) == answer["usage"]["prompt_tokens"] == len(prompt)
    assert sum(found[rung] for rung in RUNGS[:4]) == cached_of(answer)
    wait_told(cluster.router)
    return {rung: count for rung, count in found.items() if count}


def wait_told(router: Process) -> None:
    """Wait until it follows all nodes, and has heard nothing new of them for ten looks."""
    seen = list[float]()

    def steady() -> bool:
        nodes = httpx2.get(f"{router.url}/health", timeout=60).json()["nodes"]
        seen.append(router.metric("kvrelay_router_prefix_blocks"))
        same = len(seen) >= 10 and len(set(seen[-10:])) == 1
        return same and all(node["kv_events"] for node in nodes)

    wait_until(steady, "events of all nodes")


@contextmanager
def frozen(*nodes: Process) -> Iterator[None]:
    """Let the engines of nodes stand still."""
    engines = [pid for node in nodes for pid in children(node.popen.pid, b"engine_process")]
    assert len(engines) == len(nodes)
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in engines:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def free_port() -> int:
    """A port that nobody listens on now."""
    return free_ports(1)[0]


def wait_until(
    condition: Callable[[], Any],
    what: str,
    *,
    deadline_s: float = DEADLINE_S,
    interval_s: float = 0.02,
) -> Any:
    """Return the first true value of `condition`; `what` names it if there is none in time."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {deadline_s:g} s")
        time.sleep(interval_s)


def counted(nodes: Iterable[Process], name: str, expected: float) -> None:
    """Wait until a metric of these nodes sums up to `expected`, a moment behind the answer."""
    wait_until(
        lambda: sum(node.metric(name) for node in nodes) == expected, f"{name} is {expected:g}"
    )


def children(pid: int, what: bytes) -> list[int]:
    """Return the processes that this one has started whose command line contains `what`."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    found = []
    for child in listed:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if what in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


@dataclass(eq=False)
class Process:
    """One `kvrelay` command."""

    role: str
    port: int
    popen: subprocess.Popen[bytes]
    log: Path
    argv: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def lease_s(self) -> float:
        if "--lease-s" in self.argv:
            return float(self.argv[self.argv.index("--lease-s") + 1])
        return TransferConfig().lease_s

    def health(self) -> dict[str, Any] | None:
        """The health report, or None if it is not healthy."""
        try:
            answer = httpx2.get(f"{self.url}/health", timeout=60)
        except httpx2.HTTPError:
            return None
        return (
            answer.json() if answer.status_code == 200 and answer.json()["status"] == "ok" else None
        )

    def status(self) -> str:
        """Return the status of its health report; nothing if it does not answer."""
        try:
            return str(httpx2.get(f"{self.url}/health", timeout=60).json()["status"])
        except httpx2.HTTPError:
            return ""

    def free_blocks(self) -> tuple[int, int]:
        """Free and total KV blocks."""
        report = self.health()
        assert report is not None, f"{self.role} on port {self.port} is not healthy: {self.tail()}"
        load = msgspec.convert(report["load"], Load)
        return load.free_blocks, load.total_blocks

    def as_source(self, tokens: int, **changes: Any) -> dict[str, Any]:
        """Name it as a source of cached KV, as a router does by its health report."""
        report = self.health()
        assert report is not None
        kv = report["kv"]
        named = {name: kv[name] for name in ("port", "generation", "seal")}
        return named | {"host": kv["address"], "tokens": tokens, **changes}

    def at_work(self) -> bool:
        """It has a request, and blocks for it. Blocks alone: nodes that meet hand one over to try."""
        report = self.health()
        if report is None or not report["requests"]:
            return False
        load = msgspec.convert(report["load"], Load)
        return load.free_blocks < load.total_blocks

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        assert lines, f"no metric {name} in:\n{text}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def engines_told(self) -> int:
        """Return how often an engine was told what is kept below it: a ready one does not know yet."""
        return self.log.read_text().count("an engine is told of")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.popen.pid, how)

    def engines(self) -> list[Path]:
        """The processes below it, in /proc."""
        return [Path("/proc", str(pid)) for pid in children(self.popen.pid, b"")]

    def kill_whole(self) -> None:
        """SIGKILL, and wait until its engine is gone, which serves its KV and outlives it a moment."""
        below = self.engines()
        self.kill()
        self.popen.wait(30)
        wait_until(lambda: not any(each.exists() for each in below), "the engine goes, too")

    def tail(self) -> str:
        return self.log.read_text()[-3000:]


@dataclass
class Cluster:
    """Processes by role; `url` is the router's. The nodes share a secret that the router does not
    know.
    """

    folder: Path
    flags: list[str]
    secret: str = field(default_factory=secrets.token_urlsafe)
    nodes: list[Process] = field(default_factory=list)
    router: Process | None = None
    others: list[Process] = field(default_factory=list)
    """Further routers."""

    @property
    def url(self) -> str:
        assert self.router is not None
        return self.router.url

    @property
    def operator(self) -> dict[str, str]:
        """The headers of an operator of the router."""
        return {"authorization": f"Bearer {ADMIN_KEY}"}

    def of(self, role: str) -> list[Process]:
        return [node for node in self.nodes if node.role == role]

    def start(
        self,
        role: str,
        flags: list[str],
        port: int | None = None,
        env: dict[str, str] | None = None,
    ) -> Process:
        """`env`: variables for this process beside ours. The ranks of another host have a port that
        nobody uses.
        """
        port = port or free_port()
        at = [] if role == "rank" else ["--port", str(port)]
        argv = [sys.executable, "-m", "kvrelay.cli", role, *at, *flags]
        return self._launch(role, port, argv, env)

    def restart(self, process: Process, env: dict[str, str] | None = None) -> Process:
        """Start a killed process again on its port."""
        process.popen.wait(DEADLINE_S)
        fresh = self._launch(process.role, process.port, process.argv, env)
        self.nodes[self.nodes.index(process)] = fresh
        return fresh

    def _launch(
        self, role: str, port: int, argv: list[str], env: dict[str, str] | None = None
    ) -> Process:
        log = self.folder / f"{role}-{port}.log"
        root = Path(__file__).parents[2]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        }
        environment.pop("KVRELAY_CLUSTER_SECRET", None)
        if role == "router":
            environment["KVRELAY_ADMIN_KEY"] = ADMIN_KEY
        else:
            environment["KVRELAY_CLUSTER_SECRET"] = self.secret
        environment |= env or {}
        with log.open("ab") as out:
            popen = subprocess.Popen(argv, stdout=out, stderr=out, env=environment, cwd=self.folder)
        return Process(role, port, popen, log, argv)

    def wait_ready(self, *processes: Process, within_s: float = START_DEADLINE_S) -> None:
        for process in processes:

            def healthy(process: Process = process) -> Any:
                assert process.popen.poll() is None, (
                    f"{process.role} ended at start: {process.tail()}"
                )
                return process.health()

            wait_until(
                healthy,
                f"{process.role} on port {process.port} ready",
                deadline_s=within_s,
                interval_s=0.1,
            )

    def restored(self, victim: Process) -> None:
        """Start a node again, until the router sees all nodes."""
        self.wait_ready(self.restart(victim))
        self.wait_up()

    def wait_up(self) -> None:
        """Wait until each worker of the router sees all of its nodes up."""

        def all_up() -> bool:
            # Each question is a connection of its own, which any of two workers may answer.
            told = [httpx2.get(f"{self.url}/health", timeout=60).json() for _ in range(16)]
            return all(node["up"] for each in told for node in each["nodes"])

        wait_until(all_up, "the router sees all nodes up")

    def all_blocks_free(self, within_s: float | None = None) -> None:
        """Check that every block of every live node is free within the time.

        By default sooner than a lease, which gives back what was forgotten.
        """
        live = [node for node in self.nodes if node.popen.poll() is None]
        within_s = within_s or 0.8 * min((node.lease_s for node in live), default=1.0)

        def free() -> bool:
            return all(free == total for free, total in (node.free_blocks() for node in live))

        try:
            wait_until(free, "all blocks free", deadline_s=within_s)
        except AssertionError:
            reports = {f"{node.role}:{node.port}": node.health() for node in live}
            raise AssertionError(f"blocks are not free {within_s:g} s later: {reports}") from None

    def stop(self) -> None:
        everything = [*self.nodes, *([self.router] if self.router else []), *self.others]
        for process in everything:
            if process.popen.poll() is None:
                process.kill(signal.SIGCONT)
                process.kill(signal.SIGTERM)
        for process in everything:
            try:
                process.popen.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.popen.wait(5)


@contextmanager
def running(
    folder: Path,
    *,
    flags: list[str],
    prefill: int = 1,
    decode: int = 1,
    router_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
) -> Iterator[Cluster]:
    """A cluster that is ready; ended, whatever happens."""
    cluster = Cluster(folder, flags)
    try:
        cluster.nodes = [cluster.start("prefill", [*flags, *prefill_flags]) for _ in range(prefill)]
        cluster.nodes += [cluster.start("decode", [*flags, *decode_flags]) for _ in range(decode)]
        cluster.wait_ready(*cluster.nodes)
        peers = [f"--{node.role}={node.url}" for node in cluster.nodes]
        # Tests of the hand-over have short prompts, which would stay on their decode node.
        cluster.router = cluster.start("router", [*peers, "--strict-roles", *router_flags])
        cluster.wait_ready(cluster.router)
        cluster.wait_up()
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def further_router(
    cluster: Cluster, *flags: str, peers: Sequence[str] = (), status: str = "ok"
) -> Iterator[Process]:
    """Start another router before the nodes of a cluster, or before these `peers`."""
    peers = peers or ["--strict-roles", *(f"--{node.role}={node.url}" for node in cluster.nodes)]
    router = cluster.start("router", [*peers, *flags])
    try:
        wait_until(lambda: router.status() == status, f"the router is {status}")
        yield router
    finally:
        router.kill()
        router.popen.wait(10)
