"""Probes of the hand-over in one engine process, with a connector that does what the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvrelay.kv_transfer.connector import Fetched, FetchFailed, Released, Settled, Way
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.node.probes import MAX_BYTES, Probes, pattern
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.ranks import Alone
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.wire.engine_messages import (
    FetchProbe,
    OfferProbe,
    ProbeFetched,
    ProbeOffered,
    ProbeRefused,
)
from kvrelay.wire.transfer import Ticket
from tests.paged_engine.invariants import check_scheduler

BLOCKS, WORDS = 33, 256
CPU = torch.device("cpu")


class FakeConnector:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def offer(self, request_id: str, block_ids: list[int], num_tokens: int) -> Ticket:
        self.asked.append(("offer", request_id))
        return Ticket(remote_request_id=request_id, remote_block_ids=[block_ids])

    def watch(self, request_id: str, params: Ticket) -> None:
        self.asked.append(("watch", request_id))

    def fetch(self, request_id: str, remote_blocks: list[int], local_blocks: list[int]) -> None:
        self.asked.append(("fetch", request_id, remote_blocks, local_blocks))

    def way(self, params: Ticket) -> Way:
        return Way("nixl", {"direct": "no shared memory"})


class Node:
    """Probes over a pool of bytes and a real scheduler."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(BLOCKS, 2, WORDS * 2, dtype=torch.uint8)
        pool = SimpleNamespace(
            bytes=self.bytes, num_blocks=BLOCKS, block_bytes=WORDS * 4, block_size=16
        )
        self.scheduler = Scheduler(
            BlockPool(BLOCKS),
            block_size=16,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            max_model_len=99,
            eos_token_ids=(),
        )
        self.connector, self.said = FakeConnector(), list[Any]()
        model = SimpleNamespace(num_kv_heads=2)
        engine = SimpleNamespace(scheduler=self.scheduler, pool=pool, device=CPU, model=model)
        self.probes = Probes(
            cast(Engine, engine), cast(TransferEngine, self.connector), self.said.append, Alone()
        )

    def words(self, block: int) -> torch.Tensor:
        return self.bytes.view(BLOCKS, -1).view(torch.int32)[block]

    @property
    def taken(self) -> int:
        check_scheduler(self.scheduler)
        return self.scheduler.pool.total - self.scheduler.pool.free


def offered(node: Node, blocks: int = 3) -> ProbeOffered:
    node.probes.offer(OfferProbe("probe-1", blocks))
    answer = node.said.pop()
    assert isinstance(answer, ProbeOffered), answer
    return answer


def remote_blocks(offer: ProbeOffered) -> list[int]:
    (blocks,) = offer.ticket.remote_block_ids or []
    return blocks


def fetching(reader: Node, offer: ProbeOffered) -> list[int]:
    """The local blocks of a fetch that runs."""
    reader.probes.fetch(FetchProbe("probe-2", offer.ticket, offer.seed))
    assert reader.said == []
    watched, (_, _, remote, local) = reader.connector.asked
    assert watched == ("watch", "probe-2")
    assert remote_blocks(offer) == remote
    return cast(list[int], local)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_the_pattern_is_finite_in_every_dtype_of_kv(dtype: torch.dtype) -> None:
    for seed in (0, 1, 2**31 - 1, 2**63 - 1):
        assert pattern(seed, 7, 4096, CPU).view(dtype).float().isfinite().all()


def test_no_two_blocks_or_seeds_or_positions_are_alike() -> None:
    seeds = (0, 10**6, 2**31 - 1)
    blocks = [pattern(seed, at * WORDS, WORDS, CPU) for seed in seeds for at in range(8)]
    for i, one in enumerate(blocks):
        assert not any(torch.equal(one, other) for other in blocks[:i])
        assert not torch.equal(one, one.roll(WORDS // 2))
        assert one.unique().numel() > WORDS * 0.99


@pytest.mark.gpu
def test_a_gpu_makes_the_same_pattern() -> None:
    gpu = torch.device("cuda")
    for seed in (0, 2**31 - 1):
        assert torch.equal(pattern(seed, 63, 1 << 20, gpu).cpu(), pattern(seed, 63, 1 << 20, CPU))


def test_a_probe_that_arrives_is_verified_and_all_blocks_are_free() -> None:
    source, reader = Node(), Node()
    offer = offered(source)
    assert (source.taken, offer.spare_blocks) == (3, 16)
    local = fetching(reader, offer)
    for remote, mine in zip(remote_blocks(offer), local, strict=True):
        reader.words(mine).copy_(source.words(remote))
    assert reader.probes.handle(Fetched("probe-2", 3072, 0.5, read_s=0.25))
    (answer,) = reader.said
    assert isinstance(answer, ProbeFetched)
    assert (answer.verified, answer.read_s, answer.plane) == (True, 0.25, "nixl")
    assert answer.missed == {"direct": "no shared memory"}
    assert answer.host == offer.host
    assert reader.taken == 0
    assert source.probes.handle(Released("probe-1", expired=False))
    assert source.taken == 0


@pytest.mark.parametrize("harm", ["missing", "swapped", "one bit"])
def test_wrong_bytes_are_not_verified(harm: str) -> None:
    source, reader = Node(), Node()
    offer = offered(source)
    local = fetching(reader, offer)
    remote = remote_blocks(offer)
    for theirs, mine in zip(reversed(remote) if harm == "swapped" else remote, local, strict=True):
        reader.words(mine).copy_(source.words(theirs))
    if harm == "missing":
        reader.words(local[2])[WORDS // 2 :].zero_()
    elif harm == "one bit":
        reader.words(local[1])[5] ^= 1
    reader.probes.handle(Fetched("probe-2", 3072, 0.5))
    assert reader.said[0].verified is False


def test_a_probe_that_fails_keeps_its_blocks_in_quarantine_and_the_node_busy_until_settled() -> (
    None
):
    source, reader = Node(), Node()
    offer = offered(source)
    fetching(reader, offer)
    assert reader.probes.handle(FetchFailed("probe-2", "PeerLost: gone"))
    assert reader.said.pop() == ProbeRefused("probe-2", "PeerLost: gone")
    assert (reader.taken, reader.scheduler.pool.quarantined) == (3, 3)
    reader.probes.fetch(FetchProbe("probe-3", offer.ticket, offer.seed))
    assert reader.said.pop().busy is True
    assert reader.probes.handle(Settled("probe-2"))
    assert (reader.taken, reader.scheduler.pool.quarantined) == (0, 0)
    reader.probes.fetch(FetchProbe("probe-3", offer.ticket, offer.seed))
    assert reader.said == []


def test_a_probe_has_a_size_that_the_step_loop_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_BYTES, "cpu", 5 * WORDS * 4)
    source = Node()
    source.probes.offer(OfferProbe("probe-1", 6))
    assert source.said.pop() == ProbeRefused(
        "probe-1", "this node can spare 5 blocks now, and the probe asks for 6", busy=True
    )
    assert offered(source, 5).spare_blocks == 5
