"""Real nodes with KV below a pool that is too small for their sessions."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_cluster import (
    TINY,
    Cluster,
    cached_of,
    children,
    complete,
    counted,
    tiny_model,
    wait_until,
)

from kvrelay.wire.ladder import RUNGS

pytestmark = pytest.mark.cluster
pytest.importorskip("nixl")

SESSIONS, TURNS = 6, 5
GDS = "kv_store takes NIXL's POSIX plugin; GDS is not measured, and can"
TIERS = ["--kv-pull=always", "--kv-checksums=0.001"]
on_both = pytest.mark.parametrize(
    "tiers", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


class Tiers:
    """A node whose pool has room for a session and a half, and one without any cache.

    The second stays for other tests.
    """

    def __init__(self, folder: Path, device: str, plain: dict[str, Cluster]) -> None:
        # 127 blocks of 8 KiB, on a GPU of 16; the host has room for 63, and the files for all.
        flags = tiny_model(folder, max_position_embeddings=2048, kv_mib=1)
        host = ["--kv-host-memory=512KiB"]
        if device == "cuda":
            config = TINY | {"head_dim": 64, "max_position_embeddings": 2048}
            (folder / "tiny" / "config.json").write_text(json.dumps(config))
            flags += ["--device=cuda", "--block-size=16", "--kv-cache-memory-bytes=2MiB"]
            flags += ["--batch-invariant", "--gpu-memory-utilization=0.05"]
            host = ["--kv-host-memory=1MiB"]
        self.cluster = Cluster(folder, flags)
        store = ["--kv-store", str(folder / "store"), "--kv-store-size=64MiB"]
        self.tiered = self.cluster.start("serve", [*flags, *TIERS, *host, *store])
        self.cluster.nodes += [self.tiered]
        if device not in plain:
            plain[device] = Cluster(folder, flags)
            plain[device].nodes = [
                plain[device].start("serve", [*flags, "--no-enable-prefix-caching"])
            ]
        (self.plain,) = plain[device].nodes
        self.histories: dict[int, list[int]] = {}
        self.cached = self.told = 0
        self.rungs: Counter[str] = Counter()

    def wait_ready(self) -> None:
        self.cluster.wait_ready(self.tiered, self.plain)
        self.wait_tiers()

    def wait_tiers(self) -> None:
        """Wait until an engine knows what a cache process holds, one of them new."""
        self.told += 1
        wait_until(lambda: self.tiered.engines_told() == self.told, "an engine is told")

    def wait_stored(self, blocks: int = 1) -> None:
        """Wait until blocks are in host memory: a first use of a GPU takes seconds."""
        wait_until(lambda: self.in_host >= blocks, f"{blocks} blocks are in host memory")

    @property
    def in_host(self) -> float:
        return self.tiered.metric("kvrelay_tier_host_blocks")

    def turn(self, session: int, number: int) -> None:
        """Ask both nodes for the next answer of a session: each token must be equal."""
        rng = random.Random(f"{session} {number}")
        shared = [2 + at * at % 300 for at in range(64)]
        history = self.histories.setdefault(session, [*shared])
        history += [rng.randrange(2, 300) for _ in range(rng.randrange(50, 120))]
        fields: dict[str, Any] = {
            "max_tokens": rng.randrange(10, 40),
            "temperature": 1,
            "seed": session * 100 + number,
            "return_token_ids": True,
            "include_metrics": True,
        }
        answers = [complete(node.url, history, **fields) for node in (self.tiered, self.plain)]
        mine, plain = (answer["choices"][0]["token_ids"] for answer in answers)
        assert mine == plain, (session, number)
        assert len(set(mine)) > 2
        self.cached += cached_of(answers[0])
        rungs = answers[0]["kvrelay"]["prompt"]
        assert sum(rungs.values()) == answers[0]["usage"]["prompt_tokens"]
        assert sum(rungs[rung] for rung in RUNGS[:4]) == cached_of(answers[0])
        self.rungs.update(rungs)
        history += mine

    def kill(self, process: bytes) -> None:
        (pid,) = children(self.tiered.popen.pid, process)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in children(self.tiered.popen.pid, process), "it is gone")

    def kill_engine(self) -> None:
        self.kill(b"engine_process")
        wait_until(lambda: self.tiered.health() is None, "the node knows")
        wait_until(self.tiered.health, "another engine")
        self.wait_tiers()


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, Cluster]]:
    """Nodes without any cache, by device, as they are needed."""
    made: dict[str, Cluster] = {}
    yield made
    for each in made.values():
        each.stop()


@pytest.fixture
def tiers(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    plain: dict[str, Cluster],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Tiers]:
    # A second death counts as soon after the first, however long a start takes here.
    soon = "from kvrelay.node import child\n\nchild.RESTART_S = 3600.0\n"
    (tmp_path / "sitecustomize.py").write_text(soon)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    it = Tiers(tmp_path, getattr(request, "param", "cpu"), plain)
    try:
        it.wait_ready()
        yield it
        it.cluster.all_blocks_free()
    finally:
        it.cluster.stop()


@on_both
def test_sessions_that_move_all_the_time_get_every_token_of_a_node_without_a_cache(
    tiers: Tiers,
) -> None:
    with ThreadPoolExecutor(2) as pool:
        for number in range(TURNS):
            list(pool.map(lambda session: tiers.turn(session, number), range(SESSIONS)))  # noqa: B023
            tiers.wait_stored()
            if number == TURNS // 2:
                tiers.kill_engine()
                # Nothing is in its pool, so all that is found comes from below.
                before = tiers.cached
                tiers.turn(0, TURNS)
                assert tiers.cached > before
    for which in ("host", "store"):
        assert tiers.rungs[which] > 0
        assert tiers.tiered.metric(f"kvrelay_tier_{which}_loaded_blocks_total") > 0
        assert tiers.tiered.metric(f"kvrelay_tier_{which}_corrupt_blocks_total") == 0
    assert tiers.tiered.metric("kvrelay_tier_host_evicted_blocks_total") > 0


def test_a_node_that_starts_again_is_warm_and_a_reset_empties_all(tiers: Tiers) -> None:
    log = tiers.tiered.log
    wait_until(lambda: GDS in log.read_text(), "what is found of GDS")
    tiers.turn(1, 0)
    blocks = len(tiers.histories[1]) // 16
    stored = "kvrelay_tier_store_stored_blocks_total"
    wait_until(lambda: tiers.tiered.metric(stored) >= blocks - 1, "all is stored")
    tiers.tiered.kill_whole()
    tiers.tiered = tiers.cluster.restart(tiers.tiered)
    tiers.wait_ready()
    tiers.turn(1, 1)
    assert tiers.cached >= (blocks - 1) * 16
    before = tiers.cached
    answer = httpx2.post(f"{tiers.tiered.url}/reset_prefix_cache", timeout=60)
    assert answer.status_code == 200
    tiers.turn(1, 2)
    assert tiers.cached == before
    counted([tiers.tiered], "kvrelay_tier_store_corrupt_blocks_total", 0)
    # An engine that dies twice in a minute is not started a third time.
    tiers.kill_engine()
    tiers.kill(b"engine_process")
    assert tiers.tiered.popen.wait(120) == 1
    tiers.cluster.nodes.remove(tiers.tiered)


@on_both
def test_what_is_pinned_survives_the_engine_and_a_flood_below_the_pool_for_its_salt_alone(
    tiers: Tiers,
) -> None:
    url = tiers.tiered.url
    mine, other = ([at + 2 * each * each % 290 for each in range(200)] for at in (2, 3))
    wish = {"cache_control": {"type": "ephemeral"}, "cache_salt": "a"}
    complete(url, mine, **wish)
    complete(url, other, cache_salt="a")
    for at in range(4, 9):  # found again, and so worth the room of what is not pinned
        for _ in range(2):
            complete(url, [at + 3 * each * each % 290 for each in range(300)])
    stored = "kvrelay_tier_host_stored_blocks_total"
    wait_until(lambda: tiers.tiered.metric(stored) > 100, "they are in host memory")
    tiers.kill_engine()
    loaded = tiers.tiered.metric("kvrelay_tier_host_loaded_blocks_total")
    for salt in (None, "b"):
        assert cached_of(complete(url, mine, cache_salt=salt)) == 0
    assert tiers.tiered.metric("kvrelay_tier_host_loaded_blocks_total") == loaded
    assert cached_of(complete(url, mine, cache_salt="a")) == 192


@on_both
def test_a_cache_process_that_dies_is_followed_by_one_that_an_engine_leaves_its_kv_to(
    tiers: Tiers,
) -> None:
    tiers.turn(1, 0)
    tiers.wait_stored()
    assert httpx2.post(f"{tiers.tiered.url}/reset_prefix_cache", timeout=60).status_code == 200
    wait_until(lambda: tiers.in_host == 0, "host memory is empty")
    tiers.turn(1, 1)
    tiers.wait_stored()
    tiers.kill(b"cache_process")
    tiers.wait_tiers()
    tiers.turn(1, 2)
    tiers.wait_stored((len(tiers.histories[1]) - 1) // 16)  # all that are full
    tiers.kill_engine()
    before = tiers.rungs["host"]
    tiers.turn(1, 3)
    assert tiers.rungs["host"] > before
    # A second death within a minute is its last, and the next one of an engine the node's.
    tiers.kill(b"cache_process")
    for number in range(4, 6):
        tiers.turn(1, number)
    tiers.kill(b"engine_process")
    assert tiers.tiered.popen.wait(120) == 1
    assert tiers.tiered.engines_told() == tiers.told
    tiers.cluster.nodes.remove(tiers.tiered)


@pytest.mark.gpu
def test_kv_of_two_ranks_on_gpus_outlives_its_engine(tmp_path: Path) -> None:
    """Sums of bf16 depend on what is in a step, so values are near rather than equal."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    flags = tiny_model(tmp_path, max_position_embeddings=2048, kv_mib=8)
    config = TINY | {"head_dim": 64, "max_position_embeddings": 2048, "torch_dtype": "bfloat16"}
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    flags += ["--device=cuda", "--block-size=16", "--gpu-memory-utilization=0.05"]
    cluster = Cluster(tmp_path, [*flags, "--tensor-parallel-size=2"])
    try:
        node = cluster.start("serve", [*cluster.flags, *TIERS, "--kv-host-memory=4MiB"])
        cluster.nodes.append(node)
        cluster.wait_ready(node, within_s=240)
        wait_until(lambda: node.engines_told() == 1, "it is told")
        prompt = [2 + at * at % 290 for at in range(300)]
        first = complete(node.url, prompt, logprobs=0)["choices"][0]["logprobs"]
        stored = "kvrelay_tier_host_stored_blocks_total"
        wait_until(lambda: node.metric(stored) >= 18, "the prompt is in host memory")
        (engine,) = children(node.popen.pid, b"engine_process")
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: node.health() is None, "the node knows")
        wait_until(node.health, "another engine", deadline_s=240)
        wait_until(lambda: node.engines_told() == 2, "it is told")
        again = complete(node.url, prompt, logprobs=0)
        assert cached_of(again) == 288
        values = again["choices"][0]["logprobs"]["token_logprobs"]
        assert values[0] == pytest.approx(first["token_logprobs"][0], abs=0.05)
        counted([node], "kvrelay_tier_host_corrupt_blocks_total", 0)
        cluster.all_blocks_free()
    finally:
        cluster.stop()
