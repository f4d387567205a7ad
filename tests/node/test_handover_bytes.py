"""Two engines, two connectors, one process: the KV that arrives is the KV that was computed, byte
for byte.
"""

import json
import random
import threading
import time

import pytest
import torch

from kvrelay.kv_transfer.connector import (
    Fetched,
    FetchFailed,
    PoolRegion,
    Released,
    Settled,
)
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Fetch, Request
from kvrelay.wire.config import EngineConfig, TransferConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.outputs import Finish
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import Fingerprint, Ticket
from kvrelay.wire.versions import HANDOVER
from tests.paged_engine.invariants import check_scheduler

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class Side:
    """An engine with its connector, stepped by hand."""

    def __init__(self, name: str, model: str, device: str) -> None:
        options = EngineConfig(
            model=model,
            load_format="dummy",
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
            block_size=16,
            threads=1,
            kv_cache_memory_bytes=16 << 20,
            # Tokens must not depend on what is computed where, and other tests use the GPU at the
            # same time.
            batch_invariant=True,
            gpu_memory_utilization=0.05,
            max_num_seqs=8,
            max_num_batched_tokens=128,
        )
        self.engine = Engine(options)
        self.news = threading.Event()
        self.heard: list[object] = []
        pool, config = self.engine.pool, self.engine.model
        fingerprint = Fingerprint(
            HANDOVER.newest,
            config.name,
            str(pool.dtype),
            pool.block_size,
            config.num_kv_heads,
            config.head_dim,
            config.num_layers,
            config.window,
            1,
        )
        region = PoolRegion(
            pool.address, pool.num_blocks, pool.block_bytes, str(self.engine.device)
        )
        self.connector: TransferEngine = TransferEngine(
            name, fingerprint, region, TransferConfig(), self.news.set
        )

    # The engine's Handover.

    def fetch(self, fetch: Fetch) -> None:
        self.connector.fetch(fetch.request.request_id, fetch.remote_blocks, fetch.local_blocks)

    def offer(self, request: Request) -> None:
        raise AssertionError("requests are offered when they have ended")

    def grow(self, request: Request, tokens: int) -> None:
        raise AssertionError

    def next_event(self) -> object:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            self.news.clear()
            self.heard += self.connector.events()
            if self.heard:
                return self.heard.pop(0)
            self.news.wait(0.2)
        raise AssertionError("no event within 20 s")

    def blocks(self, ids: list[int]) -> torch.Tensor:
        return self.engine.pool.bytes[ids].cpu()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def sides(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    both = tuple(Side(name, str(folder), request.param) for name in ("prefill", "decode"))
    yield both
    for side in both:
        side.connector.close()


def new_request(name: str, prompt: list[int], **submit) -> Request:
    params = SamplingParams(submit.pop("max_tokens"), seed=3, temperature=0.7, ignore_eos=True)
    return Request.from_submit(Submit(name, prompt, params, **submit), 0.0)


def prefill(side: Side, name: str, prompt: list[int]) -> tuple[Request, Ticket]:
    req = new_request(name, prompt, max_tokens=1, hold=True)
    side.engine.scheduler.add(req)
    drain(side)
    assert req.finish is Finish.LENGTH
    held = side.engine.scheduler.kept.held(name)
    assert held is not None
    return req, side.connector.offer(name, held, len(prompt))


def decode(side: Side, name: str, prompt: list[int], first: list[int], params: Ticket) -> Request:
    req = new_request(name, prompt, max_tokens=20, generated=first, fetch=params)
    side.engine.scheduler.add(req)
    side.connector.watch(name, params)
    side.engine.step(side)
    return req


def check_all_free(sides) -> None:
    for side in sides:
        check_scheduler(side.engine.scheduler)
        assert side.engine.scheduler.pool.free == side.engine.scheduler.pool.total


def drain(side: Side) -> None:
    while side.engine.has_work:
        side.engine.step()


def aggregated(model: Side, prompt: list[int]) -> list[int]:
    req = new_request("alone", prompt, max_tokens=20)
    model.engine.scheduler.add(req)
    drain(model)
    return req.token_ids


@pytest.mark.parametrize("length", [1, 16, 17, 333])
def test_kv_bytes_and_tokens_survive_the_hand_over(sides, length):
    p, d = sides
    rng = random.Random(length)
    prompt = [rng.randrange(300) for _ in range(length)]
    # Shift the two pools against each other, so that equal block ids cannot hide a mistake.
    spare = d.engine.scheduler.pool.allocate(length % 5) or []
    first, params = prefill(p, f"p{length}", prompt)
    sent = p.blocks(p.engine.scheduler.kept.held(f"p{length}") or [])
    req = decode(d, f"d{length}", prompt, first.token_ids[length:], params)
    event = d.next_event()
    assert isinstance(event, Fetched), event
    assert torch.equal(d.blocks(req.blocks), sent)
    assert sent.any()
    d.engine.scheduler.finish_fetch(req.request_id)
    drain(d)
    released = p.next_event()
    assert released == Released(f"p{length}", expired=False)
    p.engine.scheduler.kept.release(f"p{length}")
    d.engine.scheduler.pool.release(spare)
    check_all_free(sides)
    assert req.token_ids == aggregated(p, prompt)


def test_a_fetch_of_released_kv_fails_and_the_tokens_are_the_same(sides):
    p, d = sides
    prompt = list(range(50, 120))
    first, params = prefill(p, "gone-p", prompt)
    p.connector.release("gone-p")
    assert isinstance(p.next_event(), Released)
    p.engine.scheduler.kept.release("gone-p")
    req = decode(d, "gone-d", prompt, first.token_ids[len(prompt) :], params)
    event = d.next_event()
    assert isinstance(event, FetchFailed), event
    d.engine.scheduler.fail_fetch("gone-d", event.reason)
    drain(d)
    assert d.next_event() == Settled("gone-d")
    d.engine.scheduler.kept.settle("gone-d")
    assert req.token_ids == aggregated(p, prompt)
    assert d.engine.scheduler.pool.free == d.engine.scheduler.pool.total
