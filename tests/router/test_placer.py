"""What a router asks of placement, and takes: targets, expected answers, and which nodes are asked
at all.
"""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from router_doubles import KV, NO_PROMPTS, parse_job

from kvrelay.router.nodes.node import (
    FAILURES_IN_A_ROW,
    HealthReport,
    Node,
    NodeKind,
    NodeSpec,
    Source,
)
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.placement import Placement, Refuse, Wait
from kvrelay.router.prefix.index import Prefix
from kvrelay.router.request.job import CHAT_PATH, Job, Slo, prefix_of
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery, Placer
from kvrelay.wire import transfer as wire
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvNotLoaded, NoNode, Overloaded
from kvrelay.wire.kv_events import CPU
from kvrelay.wire.ladder import Found
from kvrelay.wire.outputs import Load, PromptBlocks
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import KvFacts

P, D = Role.PREFILL, Role.DECODE
COSTS = StepCosts(4.0, 0.01, 2e-5, 0.0, 0.02, 0.0)
ROOMY = Load(free_blocks=1_000, total_blocks=1_000, block_size=16, legs=1, spill_ms=250.0)
FULL = msgspec.structs.replace(ROOMY, running=4, free_blocks=0)
BUSY = msgspec.structs.replace(ROOMY, running=4, backlog_ms=900.0)
OTHER_KV = msgspec.structs.replace(
    KV, fingerprint=msgspec.structs.replace(KV.fingerprint, kv_dtype="bfloat16")
)


class Rig:
    """A placer over nodes that have said what they are: `p0`, `p1`, `d0`, `d1`."""

    def __init__(self, prefill: int = 1, decode: int = 2, **config: Any) -> None:
        self.pool = Pool(
            [f"http://p{at}" for at in range(prefill)], [f"http://d{at}" for at in range(decode)]
        )
        self.placer = Placer(RouterConfig(**config), self.pool, random.Random(1))
        for node in self.pool.nodes:
            self.says(node.url[7:])

    def says(self, name: str, load: Load = ROOMY, kv: KvFacts = KV) -> Node:
        node = self.pool.find(f"http://{name}")
        assert node is not None
        report = HealthReport(
            node.role, "m", load=load, generation=name, kv=kv, costs=COSTS, max_gap_ms=50.0
        )
        self.pool.note_report(node, report, 1.0, 1.0)
        return node

    def query(self, job: Job, *known: Any, **how: Any) -> PlacementQuery:
        return replace(self.placer.wanted(job, *(known or [None])), **how)

    def find(self, job: Job, *known: Any, **how: Any) -> Placement | Wait | Refuse:
        return self.placer.find(self.query(job, *known, **how))

    def found(self, job: Job, **how: Any) -> tuple[str, str]:
        placed = self.find(job, **how)
        assert isinstance(placed, Placement)
        return placed.prefill[7:], placed.decode[7:]

    def take(self, job: Job, *known: Any, **how: Any) -> PlacementLeases:
        query = self.query(job, *known, **how)
        found = self.placer.find(query)
        assert isinstance(found, Placement)
        return self.placer.take(query, found)


def job(targets: Slo = Slo(), **fields: Any) -> Job:  # noqa: B008 - a value
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 4_000}], **fields}
    return parse_job(json.dumps(body).encode(), CHAT_PATH, targets=targets)


@pytest.mark.parametrize("max_tokens", [None, 1, 4_096])
def test_what_an_answer_may_have_says_nothing_of_how_long_it_will_be(
    max_tokens: int | None,
) -> None:
    rig = Rig()
    asked = job(max_tokens=max_tokens)
    assert rig.query(asked).output == 128
    for _ in range(1_000):
        rig.placer.answered("m", 40)
    request = rig.query(asked)
    assert request.output == pytest.approx(40, rel=0.01)
    assert request.most_output == (max_tokens or math.inf)
    assert request.kv_tokens == request.tokens + min(
        request.output, request.most_output
    )  # room alone
    rig.placer.answered("m", 10**9)
    assert rig.placer.expected_output("m") < 400  # one answer is one answer


def test_a_text_has_as_many_tokens_as_nodes_have_counted_of_others() -> None:
    rig, asked = Rig(), job()
    prefix = prefix_of(asked)
    assert rig.query(asked, prefix).tokens == pytest.approx(1_000, abs=20)
    for _ in range(100):
        rig.pool.prefixes.counted(prefix, 650)
    assert rig.query(asked, prefix).tokens == pytest.approx(650, rel=0.02)


def test_targets_come_of_the_card_and_no_target_buys_priority() -> None:
    placer = Rig().placer
    usual = placer.wanted(job(), None)
    ttft_ms = 24 * 4 + 0.6 * 0.02 * usual.tokens
    assert (usual.ttft_ms, usual.tpot_ms) == (pytest.approx(ttft_ms), 14.4)
    told = placer.wanted(job(Slo(0.125, 0.02)), None)
    assert (told.ttft_ms, told.tpot_ms) == (125, 20)
    greedy = placer.wanted(job(Slo(0.001, 0.001)), None)
    assert (greedy.ttft_ms, greedy.tpot_ms) == (usual.ttft_ms / 2, 7.2)
    assert usual.ttft_limit_ms == math.inf


def test_a_told_target_is_a_limit_where_nodes_have_said_what_they_cost() -> None:
    rig = Rig()
    late = job(Slo(0.010, None))
    wanted = rig.placer.limited(rig.query(late), late.targets)
    refused = rig.placer.find_after(0.0, wanted)
    assert isinstance(refused, Refuse)
    assert (refused.what, refused.never, refused.limit_ms) == ("ttft", True, 10)
    alone_ms = 0.95 * refused.expected_ms
    barely = replace(wanted, ttft_limit_ms=alone_ms + 0.1)
    assert rig.placer.find_after(0.0, barely) == replace(refused, limit_ms=alone_ms + 0.1)
    wanted = replace(wanted, ttft_limit_ms=1_000.0)
    for load, in_time in ((ROOMY, Placement), (FULL, Wait)):
        for name in ("d0", "d1"):
            rig.says(name, load)
        assert isinstance(rig.placer.find_after(900.0, wanted), in_time)
        refused = rig.placer.find_after(945.0, wanted)
        assert isinstance(refused, Refuse)
        assert (refused.never, refused.limit_ms) == (False, 1_000), "it has waited too long"
        assert refused.expected_ms > 1_000
    unknown = Placer(RouterConfig(), Pool([], []), random.Random(1))
    assert unknown.limited(wanted, late.targets) is wanted


def test_refused_work_is_what_nodes_would_have_computed() -> None:
    rig = Rig()
    asked = replace(rig.query(job()), tokens=1_000, output=200, most_output=50)
    assert rig.placer.refused_work(0.0) == {}
    held = replace(asked, cached={"http://p0": 400}, below={"http://d0": (300, 600)})
    whole = replace(asked, cached={"http://p0": 1_100})  # as far as chunks tell
    for second in range(40):
        for wanted in (asked, held, whole, replace(asked, kind=NodeKind.VLLM)):
            rig.placer.note_refused(wanted, float(second))
    prompts_ms, tokens = rig.placer.refused_work(39.0)["m"]
    # Means of some seconds are a little higher just after a request.
    assert prompts_ms == pytest.approx((1_000 + 400 + 1) * 0.02 / 1e3, rel=0.15)
    assert tokens == pytest.approx(3 * 50 / 1e3, rel=0.15)
    assert max(rig.placer.refused_work(90.0)["m"]) < 1e-6


def test_what_is_taken_counts_until_it_is_given_back() -> None:
    rig = Rig()
    placed = rig.take(job(n=3))
    assert placed.prefill is not None
    assert (placed.prefill.node.url, placed.decode.node.state.rows) == ("http://p0", 3)
    assert placed.prefill.node.state.rows == 1
    assert placed.prefill.node.state.backlog_ms == pytest.approx(0.02 * placed.wanted.tokens)
    assert rig.found(job())[1] != placed.decode.node.url[7:]
    for _ in range(2):
        rig.placer.give_back(placed)
    assert all(node.state.is_idle and not node.leases for node in rig.pool.nodes)


def test_a_policy_chooses_the_node_of_its_role() -> None:
    rig = Rig(2, 2, prefill_policy="round_robin", decode_policy="round_robin")
    ways = []
    for _ in range(4):
        placed = rig.take(job())
        ways.append((placed.placement.prefill[7:], placed.placement.decode[7:]))
        rig.placer.give_back(placed)
    assert ways == [("p0", "d0"), ("p1", "d1")] * 2


def test_nodes_that_cannot_hand_over_are_no_pair() -> None:
    rig = Rig(2, 2)
    rig.says("p0", kv=OTHER_KV)
    rig.says("d0", kv=OTHER_KV)
    rig.says("p1", BUSY)
    assert rig.found(job(), spills=False) == ("p0", "d0")
    rig.says("d0", FULL, kv=OTHER_KV)
    assert rig.found(job(), spills=False) == ("p1", "d1")
    rig.says("d1", kv=OTHER_KV)
    rig.says("p0")  # nobody takes the KV of either
    assert rig.found(job())[0] == "d1"


def test_where_the_nodes_of_policies_are_no_pair_the_price_chooses() -> None:
    rig = Rig(2, 2, prefill_policy="least_queue", decode_policy="least_queue")
    rig.says("p0", kv=OTHER_KV)
    rig.says("d0", kv=OTHER_KV)
    rig.says("p1", BUSY)  # p0 and d1 have the shortest queues
    rig.says("d0", BUSY, kv=OTHER_KV)
    assert rig.found(job()) == ("p0", "d0")


def test_while_the_only_partner_rests_others_are_not_asked_for_what_they_cannot_take() -> None:
    rig = Rig(1, 2)
    rig.says("p0", kv=OTHER_KV)
    rig.says("d0", kv=OTHER_KV)
    rig.says("d1", kv=msgspec.structs.replace(KV, computes_prompts=False))
    rests, now = rig.pool.nodes[1], time.monotonic()
    rig.pool.rest(rests, 5.0, now)
    assert isinstance(rig.find(job()), Wait)
    for _ in range(FAILURES_IN_A_ROW):  # long ago: the breaker is half-open
        rig.pool.failed(object(), rests, "500", now - 9)
    with pytest.raises(Overloaded):
        rig.pool.available(D, "", [rig.pool.nodes[2]], now)
    rig.says("d1")
    assert rig.found(job()) == ("d1", "d1")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["pace", "backlog_ms", "row_weight"])
def test_what_no_node_can_have_is_not_believed(wrong: float, name: str) -> None:
    rig = Rig()
    before = rig.pool.nodes[0].state.row_ms, rig.pool.nodes[0].state.wait_ms
    node = rig.says("p0", msgspec.structs.replace(ROOMY, **{name: wrong}))
    assert (node.state.row_ms, node.state.wait_ms) == before
    report = HealthReport(
        P, "m", generation="p0", kv=KV, costs=StepCosts(wrong, 0.0, 0.0, 0.0, 0.0, 0.0)
    )
    rig.pool.note_report(node, report, 2.0, 2.0)
    assert node.state.costs == COSTS


def test_who_needs_more_than_half_of_all_room_waits_for_half_of_it() -> None:
    rig = Rig(1, 1)
    rig.says("d0", msgspec.structs.replace(ROOMY, free_blocks=500, running=1))
    assert rig.found(job(messages=[{"role": "user", "content": "x" * 60_000}]))[1] == "d0"
    rig.says("d0", msgspec.structs.replace(ROOMY, free_blocks=490, running=1))
    assert isinstance(rig.find(job(n=99)), Wait)


def test_without_a_prefill_node_a_decode_node_does_it_all_if_it_may() -> None:
    rig = Rig(1, 1)
    rig.pool.blame(rig.pool.nodes[0], "gone", 2.0)
    assert rig.found(job()) == ("d0", "d0")
    rig.says("d0", kv=NO_PROMPTS)
    with pytest.raises(NoNode, match="no prefill node is up"):
        rig.found(job())
    assert rig.found(job(), ignores_room=True) == ("d0", "d0")  # a part of its answer is there


def test_kv_that_lies_on_a_prefill_node_wants_a_decode_node_alone() -> None:
    rig = Rig(1, 2)
    rig.says("d0", msgspec.structs.replace(ROOMY, running=3))
    peer = rig.pool.nodes[0]
    wanted = rig.query(job(), None, 1_000, peer)
    placed = rig.take(job(), None, 1_000, peer)
    way = placed.placement
    assert (way.prefill, way.decode, way.spills) == (peer.url, "http://d1", False)
    assert (placed.prefill, placed.decode.share.prompt_ms, peer.state.is_idle) == (None, 0, True)
    for name in ("d0", "d1"):
        rig.says(name, FULL)
    assert isinstance(rig.placer.find(wanted), Wait)
    assert isinstance(rig.placer.find(replace(wanted, ignores_room=True)), Placement)
    for name in ("d0", "d1"):
        rig.says(name, kv=msgspec.structs.replace(OTHER_KV, computes_prompts=False))
    with pytest.raises(KvNotLoaded, match="kv_dtype"):
        rig.placer.find(wanted)


def test_kv_on_a_prefill_node_that_was_removed_is_fetched_all_the_same() -> None:
    rig = Rig(1, 1)
    peer = rig.pool.nodes[0]
    rig.pool.set_members(Source.STATIC, [NodeSpec("http://d0", D)], 2.0)
    way = rig.take(job(), None, 1_000, peer).placement
    assert (way.prefill, way.decode) == (peer.url, "http://d0")


def test_who_cannot_hand_over_is_no_pair_though_nobody_else_has_room() -> None:
    rig = Rig(2, 2)
    rig.says("d0", FULL)
    rig.says("p1", FULL, kv=OTHER_KV)
    rig.says("d1", kv=OTHER_KV)
    assert isinstance(rig.find(job(), spills=False), Wait)
    assert rig.found(job()) == ("d1", "d1")
    rig.says("d1", FULL, kv=OTHER_KV)
    assert isinstance(rig.find(job()), Wait)


def test_another_nodes_host_memory_is_named_beside_its_pool_to_those_of_its_kind() -> None:
    rig, asked = Rig(3, 1), job()
    cache = wire.Source("h", 7, "cache of p0", 0)
    holder = msgspec.structs.replace(KV, address="h", port=5, generation="p0", cache=cache)
    rig.says("p0", BUSY, kv=holder)
    pulls = msgspec.structs.replace(ROOMY, pull_token_ms=1e-6)
    compares = msgspec.structs.replace(KV, compares=True)
    rig.says("p1", pulls, kv=compares)
    rig.says("p2", pulls, kv=msgspec.structs.replace(OTHER_KV, compares=True))
    prefix, index = prefix_of(asked), rig.pool.prefixes
    hashes = b"".join(at.to_bytes(16, "little") for at in range(1, 63))
    prefix = prefix.known(PromptBlocks(16, hashes), 1_000)
    assert prefix.keys is not None
    for node in rig.pool.nodes:
        index.changed(node.url, (), cleared=True)
    index.changed("http://p0", prefix.keys[:10])
    index.changed("http://p0", prefix.keys[:60], cleared=True, medium=CPU)
    placed = rig.take(asked, prefix, spills=False)
    assert "p1/d0" in str(placed.placement)
    assert "pulls from p0" in str(placed.placement)
    pool = wire.Source("h", 5, "p0", 160)
    assert rig.placer.sources(placed) == [pool, msgspec.structs.replace(cache, tokens=960)]
    rig.placer.give_back(placed)
    rig.says("p1", pulls)  # it does not check what it would read
    assert rig.query(asked, prefix).holder[2] == set()
    rig.says("p0", msgspec.structs.replace(ROOMY, host_token_ms=1e-7), kv=holder)
    placed = rig.take(asked, prefix, spills=False)
    assert "p0/d0" in str(placed.placement)
    assert "pulls from host" in str(placed.placement)
    assert rig.placer.sources(placed) == []
    changes_role = rig.pool.nodes[0]
    rig.pool.note_role_change(changes_role, Role.DECODE, 3.0)
    assert rig.query(asked, prefix).holder[0] == "http://p0"
    rig.pool.note_unready(changes_role, "gone", 4.0)
    assert rig.query(asked, prefix).holder[0] == ""


def test_each_reason_why_a_prompts_kv_was_not_found_is_named() -> None:
    rig, hashes = Rig(prefill=2, decode=1), [bytes([at]) * 16 for at in range(1, 9)]
    known = prefix_of(job()).known(PromptBlocks(16, b"".join(hashes)), 131)
    changed, (p0, p1, d0) = rig.pool.prefixes.changed, [node.url for node in rig.pool.nodes]
    assert known.keys is not None
    changed(p0, known.keys[:4], at=1.0)
    changed(p1, known.keys[:3], at=1.0)
    changed(p1, known.keys[3:5], at=1.0, medium=CPU)
    changed(d0, known.keys[:6], at=1.0)
    changed(d0, (), known.keys[5:6], at=1.5)
    placed = rig.take(job())
    wanted = replace(placed.wanted, cached={p0: 48, p1: 80})
    placed = replace(
        placed, at=2.0, wanted=wanted, placement=replace(placed.placement, prompt=(0.0, 80, d0))
    )
    changed(p0, known.keys[6:], known.keys[3:4], at=3.0)

    def rungs(found: Found, prefix: Prefix = known) -> dict[str, int]:
        node = rig.says("p0")
        shown = rig.placer.rungs(placed, node, prefix, 131, found)
        assert sum(shown.values()) == 131
        return {rung: count for rung, count in shown.items() if count}

    rest = {"capacity": 16, "new": 35}
    assert rungs(Found(16)) == {"gpu": 16, "stale": 32, "evicted": 16, "placement": 16, **rest}
    assert rungs(Found(16, peer=32, failed=32)) == {"gpu": 16, "peer": 32, "failed": 32, **rest}
    # The other node was asked, and did not have what it had told of.
    assert rungs(Found(16, asked=80)) == {"gpu": 16, "stale": 64, **rest}
    # Without names of blocks nothing is known of the rest.
    assert rungs(Found(16), prefix_of(job())) == {"gpu": 16, "new": 115}
