"""A listener with vLLM's types and sockets at a real node: what is cached, and again what it has
missed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
import zmq
from real_cluster import Cluster, free_port, tiny_model, wait_until

pytestmark = pytest.mark.cluster

BLOCK = 16
DEADLINE_MS = 20_000


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """As vLLM's listeners declare them."""


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


read = msgspec.msgpack.Decoder(Batch).decode


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """Its URL, and where it publishes and replays events."""
    folder = tmp_path_factory.mktemp("told")
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay,
    }
    told |= {"topic": "kv-events", "token_ids": True}
    cluster = Cluster(folder, [])
    try:
        flags = [*tiny_model(folder), f"--kv-events-config={json.dumps(told)}"]
        cluster.nodes = [cluster.start("serve", flags)]
        cluster.wait_ready(*cluster.nodes)
        yield cluster.nodes[0].url, endpoint, replay
    finally:
        cluster.stop()


def ask(url: str, prompt: list[int], **more: Any) -> None:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 1, **more}
    assert httpx2.post(f"{url}/v1/completions", json=fields, timeout=60).status_code == 200


def told_again(
    context: zmq.Context[zmq.Socket[bytes]], replay: str, start: int
) -> dict[int, bytes]:
    """The batches from a number on, until the node says that there are no more."""
    found = {}
    with context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        asking.connect(replay)
        asking.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            _, number, payload = asking.recv_multipart()
            if not payload:
                assert number == (-1).to_bytes(8, "big", signed=True)
                return found
            found[int.from_bytes(number, "big")] = payload


def test_a_listener_reads_what_is_cached_and_again_what_it_missed(
    node: tuple[str, str, str],
) -> None:
    url, endpoint, replay = node
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
        context.socket(zmq.REQ) as asking,
    ):
        for socket in (sub, asking):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        sub.connect(endpoint)
        asking.connect(replay)
        prompts = [[first, *range(40)] for first in range(100, 140)]

        def heard() -> bool:  # a subscription takes a moment, and until then batches are missed
            ask(url, prompts.pop(0))
            return bool(sub.poll(200))

        wait_until(heard, DEADLINE_MS / 1000, "the first batch")
        topic, number, payload = sub.recv_multipart()
        assert topic == b"kv-events"
        (event,) = read(payload).events
        assert isinstance(event, BlockStored)
        assert (event.parent_block_hash, event.block_size, event.medium) == (None, BLOCK, "GPU")
        assert len(event.block_hashes) == 2

        salted = [7] * 40
        ask(url, salted, cache_salt="mine")
        newest, last = sub.recv_multipart()[1:]
        assert newest > number
        (event,) = read(last).events
        assert isinstance(event, BlockStored)
        assert (event.token_ids, event.extra_keys) == (salted[:32], [("mine",), None])

        # REQ takes the first answer alone; what follows it is for sockets that take several.
        asking.send(newest)
        assert asking.recv_multipart() == [newest, last]
        missed = told_again(context, replay, 0)
        assert sorted(missed) == list(range(int.from_bytes(newest, "big") + 1))
        assert missed[max(missed)] == last
        (first,) = read(missed[0]).events
        assert isinstance(first, BlockStored)
        assert first.token_ids == [100, *range(31)]
        assert told_again(context, replay, len(missed)) == {}
