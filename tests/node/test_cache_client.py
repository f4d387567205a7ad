"""KV that a node finds below its pool, and nodes whose cache process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_doubles import write_config

from kvrelay.node.cache_client import CacheClient, identity
from kvrelay.node.child import Child
from kvrelay.wire.cache_messages import Attach, CacheStats, ToCache
from kvrelay.wire.config import CacheConfig, EngineConfig, NodeConfig, TransferConfig
from kvrelay.wire.engine_messages import EngineReady
from kvrelay.wire.kv_events import CacheChanges
from kvrelay.wire.transfer import Fingerprint, KvFacts, Source

FINGERPRINT = Fingerprint(
    protocol=1,
    model="tiny",
    kv_dtype="bfloat16",
    block_size=16,
    kv_heads=2,
    head_dim=16,
    layers=1,
    window=0,
    tp_size=1,
)


def test_a_copy_of_a_model_finds_the_same_kv_and_a_changed_one_does_not(tmp_path: Path) -> None:
    def of(folder: Path, **fields: Any) -> bytes:
        return identity(FINGERPRINT, EngineConfig(model=str(folder), **fields))

    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    write_config(mine)
    shutil.copytree(mine, other, copy_function=shutil.copy)  # with new times
    assert of(other) == of(mine)
    config = other / "config.json"
    written = config.read_bytes()
    config.write_bytes(written.replace(b" ", b"\t"))  # of the same size
    assert of(other) != of(mine)
    config.write_bytes(written)
    assert of(other) == of(mine)
    settings = [{}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "fp8"}]
    assert len({of(mine, **each, device="cuda") for each in settings}) == len(settings)


CONFIG = NodeConfig(
    engine=EngineConfig("tiny", enable_prefix_caching=True),
    transfer=TransferConfig(kv_checksums=0.1),
    cache=CacheConfig(kv_host_memory=1 << 20),
)
ENGINE = EngineReady("e", "g", "tiny", 9, 9, 16, 9, 64, [], 0.0, kv=KvFacts(FINGERPRINT))
RESET = CacheChanges([], [], cleared=True)


class Double:
    """A cache process that follows what it is told until it is killed."""

    def __init__(self) -> None:
        self.process, self.told = self, list[Attach | CacheChanges]()
        self.reports, self.dead = asyncio.Queue[bytes](), asyncio.Event()
        self.socket = self
        self.recv = self.reports.get

    @property
    def alive(self) -> bool:
        return not self.dead.is_set()

    async def wait(self) -> int:
        await self.dead.wait()
        return -9

    def run(self, *work: Any) -> None:
        self.tasks = [asyncio.ensure_future(each) for each in work]

    def send(self, message: bytes) -> None:
        self.told.append(msgspec.msgpack.decode(message, type=ToCache))

    def report(self, clears: int, engine: str = "") -> None:
        stats = CacheStats(Source("h", 1, "cache", 0), clears, engine)
        self.reports.put_nowait(msgspec.msgpack.encode(stats))

    def remove_folder(self) -> None: ...

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()


async def until(done: Any) -> None:
    async with asyncio.timeout(5):
        while not done():
            await asyncio.sleep(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Double]:
    """Return the processes that are started, as they are."""
    made: list[Double] = []

    async def start(*_: object) -> Double:
        made.append(Double())
        return made[-1]

    monkeypatch.setattr(Child, "start", start)
    return made


async def test_the_log_says_once_that_an_engine_is_told_and_again_by_each_process(
    made: list[Double], caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> int:
        return caplog.text.count("an engine is told of 0 blocks in host memory and 0 in the store")

    caplog.set_level(logging.INFO, "kvrelay.node")
    client = CacheClient(CONFIG, lambda _: None)
    client.attach(ENGINE)
    reports = 0
    for at, engines in enumerate((["", "one", "one", "two", "two"], ["", "two", "two"])):
        await until(lambda: len(made) > at and made[at].told)  # noqa: B023
        for engine in engines:
            reports += 1
            made[at].report(reports, engine)
            await until(lambda: client.stats and client.stats.clears == reports)  # noqa: B023
            assert told() == {"": 2 * at, "one": 1, "two": 2 + at}[engine]
        made[at].dead.set()
    await until(lambda: "no KV is kept below the pool" in caplog.text)
    assert told() == 3
    await client.stop()


async def test_a_process_after_another_follows_the_resets_that_it_did_not(
    made: list[Double],
) -> None:
    """The files are older than the process."""
    client = CacheClient(CONFIG, lambda _: None)
    client.attach(ENGINE)
    await until(lambda: made and made[0].told)
    for _ in range(2):
        client.reset()
        client.tell(RESET)
    attach = made[0].told[0]
    assert made[0].told == [attach, RESET, RESET]
    made[0].report(1)  # and it is killed before it comes to the second
    await until(lambda: client.stats)
    made[0].dead.set()
    client.reset()
    client.tell(RESET)
    await until(lambda: len(made) == 2 and made[1].told)
    assert made[1].told == [msgspec.structs.replace(attach, clears=1), RESET, RESET]
    client.attach(ENGINE)  # another engine: all was told
    assert made[1].told[3:] == [msgspec.structs.replace(attach, clears=3)]
    assert client.source is None
    made[1].report(3)
    await until(lambda: client.source)
    await client.stop()


async def test_a_node_goes_on_without_a_process_and_with_a_link_that_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(*_: object) -> Child:
        raise BlockingIOError(11, os.strerror(11))

    monkeypatch.setattr(Child, "start", full)
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    config = replace(CONFIG, engine=replace(CONFIG.engine, model=str(tmp_path)))
    client = CacheClient(config, lambda _: None)
    client.attach(ENGINE)
    client.tell(CacheChanges([], []))
    await until(lambda: caplog.text)
    await client.stop()
    assert client.source is None
    assert "no cache process ([Errno 11] Resource temporarily unavailable)" in caplog.text
