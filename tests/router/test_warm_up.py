"""Which pairs of nodes are warmed up, in which order; and the probe, with fake nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from router_doubles import FakeNode, cluster, decode, prefill, until

from kvrelay.router.membership.warm_up import PARTNERS, How, WarmUp, WarmUps
from kvrelay.router.nodes.node import Node
from kvrelay.wire.config import Role
from kvrelay.wire.outputs import Load


def node(role: Role, at: int, generation: str = "g", model: str = "m", requests: int = 0) -> Node:
    made = Node(f"http://{role}{at}", role=role, up=True, model=model, generation=generation)
    made.note_load(Load(running=requests))
    return made


def nodes(role: Role, count: int) -> list[Node]:
    return [node(role, at) for at in range(count)]


def begun(
    pairs: WarmUps,
    prefill: list[Node],
    decode: list[Node],
    now: float = 0.0,
    how: How | None = None,
) -> list[WarmUp]:
    """Return what is begun until nothing is due, each ended at once if it is said how."""
    had: list[WarmUp] = []
    while warm_up := pairs.begin(prefill, decode, now):
        had.append(warm_up)
        if how is not None:
            pairs.end(warm_up, how, "", now)
    return had


@settings(max_examples=60)
@given(st.integers(0, 7), st.integers(0, 7))
def test_in_a_small_cluster_each_pair_meets_once_and_a_node_has_one_meeting_at_a_time(
    ps: int, ds: int
) -> None:
    pairs, prefill, decode = WarmUps(), nodes(Role.PREFILL, ps), nodes(Role.DECODE, ds)
    seen: set[tuple[str, str]] = set()
    while together := begun(pairs, prefill, decode):
        for side in ([m.prefill.url for m in together], [m.decode.url for m in together]):
            assert len(set(side)) == len(side)
        for warm_up in together:
            pairs.end(warm_up, "met", "", 0.0)
            seen.add((warm_up.prefill.url, warm_up.decode.url))
    assert pairs.pairs()[0] == len(seen) == ps * ds


def test_in_a_large_cluster_a_node_meets_no_more_than_its_share_and_all_meet_somebody_first() -> (
    None
):
    pairs, prefill, decode = WarmUps(), nodes(Role.PREFILL, 60), nodes(Role.DECODE, 50)
    had = begun(pairs, prefill, decode, how="met")
    for side in (Counter(m.prefill.url for m in had), Counter(m.decode.url for m in had)):
        assert max(side.values()) <= PARTNERS
    assert len({m.decode.url for m in had[:50]}) == 50


def test_another_generation_meets_anew_and_the_old_one_is_forgotten() -> None:
    pairs, prefill, decode = WarmUps(), nodes(Role.PREFILL, 1), nodes(Role.DECODE, 2)
    begun(pairs, prefill, decode, how="met")
    decode[0] = node(Role.DECODE, 0, "another")
    assert [m.decode for m in begun(pairs, prefill, decode, how="met")] == [decode[0]]
    assert pairs.pairs()[0] == 2


def test_nodes_of_another_model_or_without_a_generation_do_not_meet() -> None:
    decode = [node(Role.DECODE, 0, model="other"), node(Role.DECODE, 1, generation="")]
    assert WarmUps().begin(nodes(Role.PREFILL, 2), decode, 0.0) is None


@pytest.mark.parametrize(
    ("how", "not_before", "again_at"),
    [("busy", 0.5, 1.0), ("failed", 59.0, 60.0), ("never", 1e9, None)],
)
def test_what_failed_is_tried_again_in_its_time(
    how: How, not_before: float, again_at: float | None
) -> None:
    pairs, prefill, decode = WarmUps(), nodes(Role.PREFILL, 1), nodes(Role.DECODE, 1)
    (warm_up,) = begun(pairs, prefill, decode)
    pairs.end(warm_up, how, "differs", 0.0)
    assert pairs.pairs()[1] == (
        [("http://prefill0", "http://decode0", "differs", 60.0)] if how == "failed" else []
    )
    assert pairs.begin(prefill, decode, not_before) is None
    if again_at is not None:
        assert len(begun(pairs, prefill, decode, again_at)) == 1


# The probe.


class Probing:
    """Answers of fake nodes to probes."""

    def __init__(self, *fetches: dict[str, Any]) -> None:
        self.fetches = list(fetches)
        self.offered: list[dict[str, Any]] = []
        self.fetched: list[dict[str, Any]] = []

    async def offer(self, request: web.Request) -> web.Response:
        self.offered.append(await request.json())
        ticket = {
            "do_remote_prefill": True,
            "remote_request_id": "probe-1",
            "remote_block_ids": [[1]],
        }
        offer = {
            "type": "ProbeOffered",
            "probe_id": "probe-1",
            "ticket": ticket,
            "seed": 7,
            "spare_blocks": 9,
            "host": "",
        }
        return web.json_response(offer)

    async def fetch(self, request: web.Request) -> web.Response:
        self.fetched.append(await request.json())
        return web.json_response(self.fetches.pop(0) if len(self.fetches) > 1 else self.fetches[0])


GOT = {
    "type": "ProbeFetched",
    "probe_id": "x",
    "num_bytes": 1,
    "seconds": 0.1,
    "read_s": 0.1,
    "verified": True,
    "plane": "nixl",
    "missed": {},
    "spare_blocks": 9,
    "host": "",
}
BUSY = {
    "type": "ProbeRefused",
    "probe_id": "x",
    "reason": "another probe is not over",
    "busy": True,
}
UNLIKE = {
    "type": "ProbeRefused",
    "probe_id": "x",
    "reason": "Incompatible: block_size is 16 here and 64 there",
}


def probed(answers: Probing) -> tuple[FakeNode, FakeNode]:
    p, d = prefill(), decode()
    p.posts["/kv/probe/offer"], d.posts["/kv/probe/fetch"] = answers.offer, answers.fetch
    return p, d


async def test_nodes_meet_when_both_are_up_and_again_after_a_restart() -> None:
    answers = Probing(GOT)
    p, d = probed(answers)
    async with cluster(p, d) as c:
        await until(lambda: c.router.warm_ups.pairs()[0] == 1)
        assert (answers.offered, answers.fetched[0]["seed"]) == ([{"blocks": 1}], 7)
        assert answers.fetched[0]["ticket"]["remote_request_id"] == "probe-1"
        async with c.http.get(f"{c.url}/health") as answer:
            assert (await answer.json())["pairs"] == {"met": 1, "failed": []}
        d.generation = "g2"
        await until(lambda: len(answers.fetched) == 2 and c.router.warm_ups.pairs()[0] == 1)
        assert c.metric("kvrelay_router_meetings_total", outcome="met") == 2
        assert p.released == []


async def test_a_busy_node_is_asked_again_and_what_was_offered_is_given_back() -> None:
    p, d = probed(Probing(BUSY, GOT))
    async with cluster(p, d) as c:
        await until(lambda: c.router.warm_ups.pairs()[0] == 1)
        assert p.released == [["probe-1"]]


async def test_nodes_that_cannot_hand_over_are_shown_with_the_reason() -> None:
    p, d = probed(Probing(UNLIKE))
    async with cluster(p, d) as c:
        await until(lambda: bool(c.router.warm_ups.pairs()[1]))
        async with c.http.get(f"{c.url}/health") as answer:
            failed = {"prefill": p.url, "decode": d.url, "reason": UNLIKE["reason"]}
            assert (await answer.json())["pairs"] == {"met": 0, "failed": [failed]}


async def test_nodes_that_know_no_probes_are_asked_once() -> None:
    async with cluster(prefill(), decode()) as c:
        await until(lambda: c.metric("kvrelay_router_meetings_total", outcome="never") == 1)
        await c.text()
        assert c.router.warm_ups.pairs()[1] == []
