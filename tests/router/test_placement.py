"""One price: what placement promises, whatever the nodes are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.node_load import NodeLoad, Share
from kvrelay.router.placement import (
    AVOIDED_MS,
    LINK_MS,
    Placement,
    PlacementRequest,
    Refuse,
    Wait,
    near,
    place,
    place_decode,
)
from kvrelay.router.placement import shares_of as taken_by
from kvrelay.wire.announced import Announced
from kvrelay.wire.outputs import Load
from kvrelay.wire.step_costs import MEMORY_MS, StepCosts

COSTS = StepCosts(5.5, 0.006, 4.7e-5, -3.5, 0.0215, 8.7e-7)
ROOMY = Load(legs=1, block_size=16, free_blocks=100_000, total_blocks=100_000, spill_ms=250.0)


def node(name: str, load: Load = ROOMY, costs: StepCosts = COSTS, **more: Any) -> NodeLoad:
    made = NodeLoad(name, costs)
    made.announced(
        load
        if not more
        else Load(**{**{n: getattr(load, n) for n in load.__struct_fields__}, **more})
    )
    return made


def placing(request: PlacementRequest, *nodes: Any, **how: Any) -> Placement:
    placed = place(request, *nodes, **how)
    assert isinstance(placed, Placement)
    return placed


@st.composite
def loads(draw: Any) -> Load:
    rows = draw(st.integers(0, 200))
    return Load(
        running=rows,
        free_blocks=draw(st.integers(0, 1_300)),
        total_blocks=1_300,
        block_size=16,
        context_tokens=int(rows * draw(st.floats(1, 4_000))),
        legs=draw(st.integers(1, 9)),
        pace=draw(st.sampled_from([0.0, 0.8, 2.0])),
        backlog_ms=draw(st.floats(0, 2_000)) if rows else 0.0,
        token_rate=draw(st.floats(0, 20)),
        prompt_share=draw(st.floats(0, 1.2)),
        row_weight=rows / 15 / draw(st.floats(1, 500)),
        strictest_tpot_ms=draw(st.sampled_from([0.0, 8.0, 40.0])),
        spill_ms=draw(st.floats(-50, 500)),
        promised_tokens=draw(st.integers(0, 5_000)),
    )


@st.composite
def nodes(draw: Any, prefix: str, least: int) -> list[NodeLoad]:
    count = draw(st.integers(least, 4))
    costs = [COSTS.scaled(draw(st.sampled_from([0.5, 1.0, 2.0]))) for _ in range(count)]
    return [node(f"{prefix}{at}", draw(loads()), costs[at]) for at in range(count)]


requests = st.builds(
    PlacementRequest,
    tokens=st.integers(1, 10_000),
    output=st.floats(1, 2_000),
    ttft_ms=st.floats(50, 5_000),
    tpot_ms=st.floats(5, 100),
    most_output=st.sampled_from([math.inf, 1.0, 100.0]),
    choices=st.integers(1, 3),
    tie=st.integers(0, 1 << 30),
    cached=st.dictionaries(st.sampled_from(["p0", "p1", "d0", "d1"]), st.integers(0, 10_000)),
    below=st.dictionaries(st.sampled_from(["p1", "d0"]), st.just((10_000, 10_000))),
    holder=st.sampled_from([("", 0, ()), ("d1", 9_000, ("p0", "p1"))]),
)


def apart(prefill: str, decode: str) -> float:
    return LINK_MS if prefill[-1] == decode[-1] else AVOIDED_MS


def unlike(prefill: str, decode: str) -> float:
    return LINK_MS if prefill[-1] == decode[-1] else math.inf


@given(
    requests, nodes("p", 0), nodes("d", 1), st.booleans(), st.sampled_from([near, apart, unlike])
)
def test_nothing_is_placed_where_its_kv_cannot_fit(
    request: PlacementRequest,
    prefill: list[NodeLoad],
    decode: list[NodeLoad],
    spills: bool,
    link: Any,
) -> None:
    placed = place(request, prefill, decode, link, spills=spills)
    by_name = {each.name: each for each in (*prefill, *decode)}
    roomy = [each.name for each in decode if request.kv_tokens <= each.room]
    linked = [name for name in roomy if link("p0", name) <= LINK_MS]
    handed = place_decode(request, decode, "p0", link)
    if isinstance(handed, Placement):
        assert handed.prefill == "p0"
        assert handed.decode in (linked or roomy)
    else:
        assert not roomy
    if not isinstance(placed, Placement):
        assert isinstance(placed, Wait)
        return
    source, target = by_name[placed.prefill], by_name[placed.decode]
    assert target.name in roomy
    if source is target:
        assert placed.spills == bool(prefill)
        assert spills or not prefill
    else:
        assert source in prefill
        assert link(source.name, target.name) < math.inf
        assert request.tokens <= source.room
    if placed.other is not None:
        assert placed.other[2] >= placed.price


@given(
    requests,
    nodes("p", 0),
    nodes("d", 1),
    st.sampled_from([near, apart, unlike]),
    st.randoms(use_true_random=False),
)
def test_the_order_of_nodes_changes_nothing(
    request: PlacementRequest, prefill: list[NodeLoad], decode: list[NodeLoad], link: Any, rng: Any
) -> None:
    shuffled = [sorted(each, key=lambda _: rng.random()) for each in (prefill, decode)]
    assert place(request, prefill, decode, link) == place(request, *shuffled, link)
    handed = place_decode(request, decode, "p0", link)
    assert handed == place_decode(request, shuffled[1], "p0", link)


@given(requests, loads(), loads(), st.floats(1, 1_000))
def test_more_load_never_makes_a_node_cheaper(
    request: PlacementRequest, source: Load, target: Load, more: float
) -> None:
    request = replace(request, cached={})
    room = {"free_blocks": 1 << 20, "total_blocks": 1 << 20}

    def price(of_source: dict[str, float] | None, of_target: dict[str, float]) -> float:
        prefill = [] if of_source is None else [node("p", source, **room, **of_source)]
        placed = place(request, prefill, [node("d", target, **room, **of_target)], spills=False)
        return placed.price if isinstance(placed, Placement) else math.inf

    def more_of(load: Load, *names: str) -> list[dict[str, float]]:
        return [{name: type(getattr(load, name))(getattr(load, name) + more)} for name in names]

    for each in more_of(source, "backlog_ms", "prompt_share"):
        assert price(each, {}) >= price({}, {})
    rows = {
        "running": target.running + 1,
        "context_tokens": target.context_tokens * (1 + 1 / max(1, target.running)) + 1,
    }
    for each in (
        rows,
        *more_of(
            target, "backlog_ms", "row_weight", "context_tokens", "prompt_share", "token_rate"
        ),
    ):
        assert price(None, each) >= price(None, {}) * (1 - 1e-12)
    lax, strict = ({"strictest_tpot_ms": ms} for ms in (5.0 + more, 5.0))
    assert price(None, strict) >= price(None, lax)


@given(requests, loads())
def test_an_idle_node_is_not_passed_over_for_a_busy_one_that_is_equal(
    request: PlacementRequest, busy: Load
) -> None:
    request = replace(request, cached={}, below={}, holder=("", 0, ()))
    room = {"free_blocks": ROOMY.free_blocks, "total_blocks": ROOMY.total_blocks}
    loaded = node("d0", busy, pace=1.0, **room)
    placed = place(request, [], [loaded, node("d1")])
    if busy.running or busy.backlog_ms > 1e-3:
        assert isinstance(placed, Placement)
        assert placed.decode == "d1"
    placed = place(request, [loaded, node("p1")], [node("d")], spills=False)
    if busy.backlog_ms > 1e-3:
        assert isinstance(placed, Placement)
        assert placed.prefill == "p1"


def price_parts(load: NodeLoad) -> tuple[float, ...]:
    """What the prices of requests are made of there."""
    return (
        load.wait_ms,
        load.behind,
        load.row_ms,
        load.context_ms,
        load.stretch,
        load.lost,
        load.spill_ms,
    )


@given(requests, st.booleans())
def test_a_cancelled_placement_gives_everything_back(
    request: PlacementRequest, local: bool
) -> None:
    request = replace(request, cached={})
    prefill = [] if local else [node("p")]
    target = node("d")
    placed = placing(request, prefill, [target], spills=False)
    before = [
        (each.rows, each.kv_free, each.backlog_ms, price_parts(each)) for each in (*prefill, target)
    ]
    source = prefill[0] if prefill else target
    for each, share in zip(
        (source, target), taken_by(request, placed, source, target), strict=True
    ):
        if share is not None:
            each.add(share)
            assert each.own == 1
            each.remove(share)
            each.remove(share)
    for each, (rows, kv_free, backlog, parts) in zip((*prefill, target), before, strict=True):
        assert (each.rows, each.own) == (rows, 0)
        assert each.kv_free == pytest.approx(kv_free)
        assert each.backlog_ms == pytest.approx(backlog, abs=1e-6)
        assert price_parts(each) == pytest.approx(parts, abs=1e-6)


@pytest.mark.parametrize(
    ("prefill", "other", "said"),
    [
        ("prefill-0", ("decode-1",) * 2, "prefill-0/decode-1 price=0.41, decode-1 alone 0.77"),
        ("decode-1", ("prefill-0", "d2"), "decode-1 alone price=0.41, prefill-0/d2 0.77"),
        ("prefill-0", None, "prefill-0/decode-1 price=0.41"),
    ],
)
def test_a_placement_is_told_with_its_price_and_the_best_other_way(
    prefill: str, other: tuple[str, str] | None, said: str
) -> None:
    way = other and (f"http://{other[0]}", f"http://{other[1]}", 0.768)
    spills = prefill == "decode-1"
    placed = Placement(f"http://{prefill}", "http://decode-1", 0.412, way, spills)
    assert str(placed) == said


def test_choices_count_as_the_rows_that_they_will_be() -> None:
    request = PlacementRequest(1_000, 800.0, 200.0, 20.0, choices=8)
    source, target = [node("p")], node("d")
    placed = placing(request, source, [target], spills=False)
    seven = node("d", running=7, context_tokens=7_000)
    one = placing(replace(request, choices=1), source, [seven], spills=False)
    assert placed.price == pytest.approx(one.price)
    target.add(taken_by(request, placed, source[0], target)[1])
    sums = {"row_weight": 8 / (20 * 100), "token_rate": 800 / MEMORY_MS}
    told = node("d", running=8, context_tokens=8 * 1_050, **sums)
    assert target.rows == 8
    assert price_parts(target) == pytest.approx(price_parts(told))


def test_a_leg_counts_once_whether_its_node_has_told_of_it_or_not() -> None:
    target = node("d")
    request = PlacementRequest(1_000, 100.0, 200.0, 20.0)
    placed = placing(request, [], [target])
    _, share = taken_by(request, placed, target, target)
    target.add(share)
    target.announced(Load(legs=1, block_size=16, free_blocks=1_000, total_blocks=1_000))
    assert (target.rows, target.kv_free) == (1, 16_000 - 1_100)  # the node did not know of it
    share.number = 2
    seen = Load(1, 0, 0, 990, 1_000, 16, 160, legs=2, backlog_ms=12.0, promised_tokens=940)
    target.announced(seen)
    assert (target.rows, target.kv_free, target.backlog_ms) == (1, 990 * 16 - 940, 12.0)
    target.announced(Load(1, 0, 0, 937, 1_000, 16, 1_000, legs=2, promised_tokens=100))
    target.first_token(share)  # the frame that told of it came with that load
    assert (target.rows, target.backlog_ms) == (1, 0)
    target.announced(Load(2, 0, 0, 937, 1_000, 16, 1_000, legs=3))
    target.remove(share)
    assert target.rows == 2


def test_a_node_that_numbers_no_legs_is_believed_beyond_what_was_placed_there() -> None:
    target = node("d", Load())
    request = PlacementRequest(1_000, 200.0, 200.0, 20.0, choices=2)
    placed = placing(request, [], [target])
    _, share = taken_by(request, placed, target, target)
    target.add(share)
    target.announced(Load(running=3))
    assert target.rows == 3
    target.announced(Load(running=0))
    assert target.rows == 2
    target.remove(share)
    assert target.is_idle


@pytest.mark.parametrize("tpots_ms", [[], [0.0], [0.0, 20.0]])
def test_what_is_left_to_a_limit_is_what_the_node_itself_gains_beyond_its_prompts(
    tpots_ms: list[float],
) -> None:
    sums, costs = Announced(), COSTS.scaled(2.0)
    for tpot_ms in tpots_ms:
        sums.came(tpot_ms, 500, 500, costs)
    for now in (0.0, 1.0):
        before = sums.spill_ms
        sums.go_on(now, costs, len(tpots_ms), 1_000)
    load = Load(
        running=len(tpots_ms),
        context_tokens=1_000,
        legs=1,
        pace=2.0,
        token_rate=sums.token_rate,
        prompt_share=0.7,
        strictest_tpot_ms=sums.strictest_tpot_ms,
    )
    assert node("d", load).limit_left == pytest.approx(sums.spill_ms - before - 0.7)


def test_a_prompt_spills_when_the_prefill_node_is_busy_and_not_beyond_the_limit() -> None:
    request = PlacementRequest(2_048, 64, 125, 20)
    busy, idle = node("p", running=9, backlog_ms=400.0), node("p")
    decoding = {
        "running": 20,
        "context_tokens": 40_000,
        "row_weight": 20 / 20 / 64,
        "token_rate": 2.0,
    }
    target = node("d", **decoding)
    waiter = node("d", **decoding)
    waiter.computes = False
    placed = placing(request, [busy], [target])
    assert placed.other is not None
    assert (placed.prefill, placed.spills, placed.other[:2]) == ("d", True, ("p", "d"))
    for none, spills in (
        (([busy], [target]), False),
        (([busy], [waiter]), True),
        (([busy], [node("d", **decoding | {"spill_ms": 10.0})]), True),
        (([idle], [target]), True),
    ):
        placed = placing(request, *none, spills=spills)
        assert (placed.prefill, placed.spills) == ("p", False)
    # The nearer the time per token is to what the strictest row wants, the more a prompt costs.
    near_limit, far = (node("d", **decoding, strictest_tpot_ms=ms) for ms in (8.0, 40.0))
    later = [node("p", running=9, backlog_ms=50.0)]
    assert not placing(request, later, [near_limit]).spills
    assert placing(request, later, [far]).spills
    alone = placing(request, [], [node("d", **decoding | {"spill_ms": 0.0})])
    assert (alone.prefill, alone.spills, alone.other) == ("d", False, None)


@pytest.mark.parametrize(
    ("ttft_ms", "limit_ms", "held", "spills"),
    [
        (60.0, math.inf, 0, False),
        (40.0, math.inf, 0, True),
        (60.0, 38.0, 0, True),
        (60.0, math.inf, 900, True),
    ],
)
def test_a_prompt_that_is_well_in_time_stays_on_a_prefill_node(
    ttft_ms: float, limit_ms: float, held: int, spills: bool
) -> None:
    prefill = [node("p", backlog_ms=15.0, prompt_share=0.3)]
    request = PlacementRequest(
        1_000,
        100,
        ttft_ms=ttft_ms,
        tpot_ms=20.0,
        ttft_limit_ms=limit_ms,
        cached={"d": held} if held else {},
    )
    # Its first token would come after 41 ms, from the decode node alone after 24.
    assert placing(request, prefill, [node("d")]).spills == spills


@pytest.mark.parametrize(
    ("peer_ms", "host_ms", "store_ms", "found"),
    [
        (1e-3, 1e-4, 1e-4, (3_000, "store")),
        (1.0, 1e-4, 1.0, (2_000, "host")),
        (1e-5, 1e-4, 1.0, (2_900, "d")),
        (0.0, 0.0, 1e-9, (1_000, "")),
        (1.0, 1.0, 1e-9, (1_000, "")),
    ],
)
def test_a_prompt_begins_with_what_is_cheapest_and_the_rest_is_computed(
    peer_ms: float, host_ms: float, store_ms: float, found: tuple[int, str]
) -> None:
    prices = {"pull_token_ms": peer_ms, "host_token_ms": host_ms, "store_token_ms": store_ms}
    request = PlacementRequest(
        4_000,
        64,
        300,
        20,
        cached={"p": 1_000},
        below={"p": (2_000, 3_000)},
        holder=("d", 2_900, {"p"}),
    )
    placed = placing(request, [node("p", **prices)], [node("d")])
    assert placed.prompt[1:] == found
    assert f" pulls from {found[1]}" in str(placed) or not found[1]
    other_kind = replace(request, holder=("d", 2_900, ()))
    assert other_kind.prompt(node("p", pull_token_ms=1e-5))[1:] == (1_000, "")


def test_what_a_node_has_of_the_prompt_is_worth_what_it_saves() -> None:
    request = PlacementRequest(4_000, 64, 300, 20, cached={"p0": 3_900})
    fresh, holder = node("p1"), node("p0", backlog_ms=60.0)
    placed = placing(request, [fresh, holder], [node("d")])
    assert placed.prefill == "p0"
    placed = placing(
        request,
        [fresh, node("p0", running=90, backlog_ms=900.0)],
        [node("d")],
        spills=False,
    )
    assert placed.prefill == "p1"


def test_a_short_prompt_is_computed_before_a_long_one_where_legs_are_numbered() -> None:
    short, long = (PlacementRequest(tokens, 64, 300, 20) for tokens in (200, 20_000))
    few, many = node("p0", running=1, backlog_ms=400.0), node("p1", running=30, backlog_ms=300.0)
    for request, chosen in ((short, "p0"), (long, "p1")):
        placed = placing(request, [few, many], [node("d")], spills=False)
        assert placed.prefill == chosen
    plain = node("p0", legs=0, waiting=1, waiting_tokens=20_000)
    assert place(short, [plain, many], [node("d")], spills=False).prefill == "p1"


def test_a_pair_that_failed_is_avoided() -> None:
    request = PlacementRequest(4_000, 64, 300, 20)
    both = [node("p0"), node("p1")], [node("d0", running=3), node("d1", running=2)]
    placed = placing(request, *both, apart)
    assert (placed.prefill, placed.decode) == ("p1", "d1")
    placed = placing(replace(request, cached={"p0": 3_900}), *both, apart)
    assert (placed.prefill, placed.decode) == ("p0", "d0")


def test_waiting_and_refusing_come_out_of_the_same_sum() -> None:
    request = PlacementRequest(2_000, 100, 200, 20)
    full = node("d", running=5, free_blocks=10)
    assert place(request, [node("p")], [full]) == Wait("no decode node has room for its KV")
    assert isinstance(
        place(request, [node("p", backlog_ms=1_001.0)], [node("d")], spills=False), Wait
    )
    late = place(
        replace(request, ttft_limit_ms=200),
        [node("p", backlog_ms=300.0)],
        [node("d")],
        spills=False,
    )
    assert isinstance(late, Refuse)
    assert (late.what, late.never) == ("ttft", False)
    assert late.expected_ms == pytest.approx(300 + 2 + 2 + 2_000 * 0.0215 + 8.7e-7 * 2e6, rel=0.01)
    never = place(replace(request, ttft_limit_ms=20), [node("p")], [node("d")])
    assert isinstance(never, Refuse)
    assert never.never
    rows = {"running": 100, "context_tokens": 100_000}
    slow = replace(request, tpot_limit_ms=8)
    assert isinstance(place(slow, [node("p")], [node("d", **rows)]), Wait)
    other = placing(slow, [node("p")], [node("d", **rows), node("d1")])
    assert other.decode == "d1"
    busy = node("d", **rows, max_num_seqs=101)
    token_ms = busy.row_ms + busy.context_ms * request.tokens
    close, enough = (replace(request, tpot_limit_ms=token_ms * by) for by in (1.02, 1.1))
    assert isinstance(place(close, [node("p")], [busy]), Wait)
    placing(enough, [node("p")], [busy])
    assert isinstance(place(replace(enough, choices=2), [node("p")], [busy]), Wait)
    busy.add(Share())  # which takes the last seat
    placing(replace(enough, tpot_limit_ms=math.inf), [node("p")], [busy])
    assert isinstance(place(replace(enough, tpot_limit_ms=1e3), [node("p")], [busy]), Wait)
    # Half of the seats are enough for any: an empty node would keep all others waiting.
    lax = replace(request, tpot_limit_ms=1e3, choices=128)
    placing(lax, [node("p")], [node("d", running=50, max_num_seqs=100)])
    assert isinstance(place(lax, [node("p")], [node("d", running=51, max_num_seqs=100)]), Wait)
    # Nobody waits for an idle node that could not keep it for sure.
    alone_ms = node("d").idle_ms(request.tokens)[1]
    never = place(replace(slow, tpot_limit_ms=alone_ms * 1.04), [node("p")], [node("d", **rows)])
    assert isinstance(never, Refuse)
    assert (never.what, never.never) == ("tpot", True)
    many = replace(slow, choices=60)
    never = place(many, [node("p")], [node("d")])
    assert isinstance(never, Refuse)
    assert never.expected_ms == pytest.approx(node("d").costs.decode_ms(60, 120_000) / 0.95)


def test_a_card_that_says_nothing_takes_no_router_down() -> None:
    """A card is fitted to noisy times: any of its values may be 0."""
    silent = StepCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert node("d", running=3, costs=silent).depth == 3
    assert node("d", row_weight=1.0, costs=msgspec.structs.replace(COSTS, step=0.0)).lost > 0
    placing(PlacementRequest(2_000, 100, 200, 20), [node("p", costs=silent)], [node("d")])
