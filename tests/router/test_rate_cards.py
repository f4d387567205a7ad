"""A router that was given rate cards decides by them before it has measured anything."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import MODEL, cluster, decode, prefill

from planning.rate_card import DecodePoint, PrefillPoint, RateCard, TransferPoint, write_card
from router.admission.admission import Admission
from router.admission.fair_queue import Entrant
from router.admission.saturation import Nodes
from router.nodes.cards import read_cards
from router.nodes.node import HealthReport, Node
from router.nodes.pool import Pool
from router.nodes.rates import NodeRates
from router.policies.policy import Ask, NodeView
from router.walk.conditional import decide
from wire.config import Role
from wire.errors import ConfigError
from wire.router_config import RouterConfig

LONG = {"messages": [{"role": "user", "content": "x" * 8_000}]}


def card(prefill_ms: float = 0.1, step_ms: float = 10.0, fetch_ms: float = 0.001, model: str = MODEL) -> RateCard:
    """Milliseconds per token of a prompt, per step of few requests, and per token of KV."""
    return RateCard(
        model, "test", "0", "", kv_tokens=100_000, block_size=16, max_num_seqs=64, step_tokens=2_048,
        prefill=[
            PrefillPoint(tokens, context, prefill_ms * tokens * (1 + context / 100_000))
            for tokens in (16, 256, 2_048) for context in (0, 8_192)
        ],
        decode=[
            DecodePoint(requests, context, step_ms * (1 + requests / 10 + requests * context / 1e6))
            for requests in (1, 8, 64) for context in (32, 1_024, 8_192)
        ],
        transfer={"direct": [TransferPoint(16, 0.2 + 16 * fetch_ms), TransferPoint(8_192, 0.2 + 8_192 * fetch_ms)]},
    )  # fmt: skip


def written(folder: Path, name: str, of: RateCard) -> str:
    write_card(of, folder / name)
    return str(folder / name)


def test_estimates_are_those_of_the_card_and_count_as_known() -> None:
    of = card(prefill_ms=3.0, step_ms=40.0, fetch_ms=0.01)
    fleet = NodeRates(card=of)
    rates = NodeRates(fleet)
    assert rates.measured
    assert not NodeRates(NodeRates()).measured
    for tokens in (100, 500, 2_048, 20_000):
        assert rates.prefill_ms(tokens) == pytest.approx(of.prompt_ms(tokens), rel=0.1)
        assert rates.transfer_ms("", tokens) == pytest.approx(of.fetch_ms(tokens), rel=0.1)
    for running in (1, 2, 5, 8, 30, 64):
        assert rates.step_ms(running) == pytest.approx(of.step_ms(running, running * 1_024), rel=0.05)


def test_what_is_seen_corrects_the_card_and_ages_back_to_it() -> None:
    rates = NodeRates(NodeRates(card=card(step_ms=10.0)))
    before = rates.step_ms(8)
    for _ in range(20):
        rates.stepped(8, 3 * before)
    assert rates.step_ms(8) == pytest.approx(3 * before, rel=0.15)
    for now in range(0, 3_600, 10):
        rates.age(float(now))
    assert rates.step_ms(8) == pytest.approx(before, rel=0.05)


def test_after_a_slow_spell_a_target_of_all_requests_is_no_dead_end() -> None:
    """Each would be refused, so that nothing is measured: what is known fades with health reports alone."""
    pool = Pool([], ["http://d0"], random.Random(1))
    node = reported(pool)[1][0]
    for spell_ms in (30.0, 300.0):
        for _ in range(20):
            node.rates.stepped(1, spell_ms)
    asked = Entrant("", 0.0, prompt_tokens=100, tpot_s=0.05)

    def refused(now: float) -> bool:
        return Admission(10).arrive(asked, Nodes([], pool.up(Role.DECODE)), now).refusal is not None

    assert refused(0.0)
    for now in range(900):
        pool.report(node, HealthReport(Role.DECODE, MODEL, generation="g"), float(now), float(now))
    assert not refused(900.0)


def test_a_fleet_that_is_faster_than_guessed_stays_known_while_nobody_asks() -> None:
    rates = NodeRates(NodeRates())
    for _ in range(20):
        rates.stepped(1, 2.0)
    for now in range(0, 7_200, 5):
        rates.age(float(now))
    assert rates.step_ms(1) == pytest.approx(2.0, rel=0.1)


@given(st.lists(st.floats(0, 1e4), min_size=4, max_size=4), st.lists(st.integers(0, 1 << 24), min_size=2, max_size=9))
def test_an_odd_card_still_gives_curves_that_never_fall(times: list[float], sizes: list[int]) -> None:
    odd = RateCard(
        "m", "h", "0", "", 5_000, 16, 8, 128,
        [PrefillPoint(16, 0, times[0]), PrefillPoint(128, 0, times[1])],
        [DecodePoint(1, 32, times[2]), DecodePoint(8, 32, times[3])],
    )  # fmt: skip
    rates = NodeRates(NodeRates(card=odd))
    assert not rates.measured  # of transfers it says nothing
    for of in (rates.prefill_ms, rates.step_ms):
        heights = [of(size) for size in sorted(sizes)]
        assert heights == sorted(heights)
        assert all(ms > 0 for ms, size in zip(heights, sorted(sizes), strict=True) if size)


def test_the_first_prompt_is_computed_where_the_card_says() -> None:
    """On its decode node, where three streams would wait for it, only if KV travels slowly."""
    local = []
    for fetch_ms in (0.001, 3.0):
        both = dict.fromkeys(((Role.PREFILL, MODEL), (Role.DECODE, MODEL)), card(fetch_ms=fetch_ms))
        pool = Pool(["http://p0"], ["http://d0"], random.Random(1), cards=both)
        source, target = (nodes[0] for nodes in reported(pool))
        assert target.rates.measured
        for _ in range(3):
            pool.hold(Ask(Role.DECODE), [target])
        local.append(decide(Ask(Role.PREFILL, tokens=300), source, target).local)
    assert local == [False, True]


def test_the_first_choice_weighs_a_queue_against_a_cache_by_the_card() -> None:
    """p0 has most of a prompt, and five others to compute before it."""
    chosen = []
    for prefill_ms, floor_ms in ((1.0, 0.0), (0.001, 60.0)):
        of = card(prefill_ms=prefill_ms)
        steps = [PrefillPoint(each.tokens, each.context, each.ms + floor_ms) for each in of.prefill]
        cards = {(Role.PREFILL, MODEL): msgspec.structs.replace(of, prefill=steps)}
        pool = Pool(["http://p0", "http://p1"], [], random.Random(1), cards=cards)
        p0 = reported(pool)[0][0]
        for _ in range(5):
            pool.hold(Ask(Role.PREFILL, tokens=100), [p0])
        ask = Ask(Role.PREFILL, tokens=2_000, cached={p0.url: 1_900}, informed=True)
        chosen.append(pool.choose(ask, pool.up(Role.PREFILL))[0].url)
    assert chosen == ["http://p0", "http://p1"]


def reported(pool: Pool) -> tuple[list[Node], list[Node]]:
    """The nodes of both roles, when they have said that they are up."""
    for node in pool.nodes:
        pool.report(node, HealthReport(node.role, MODEL, generation="g"), 0.0, 0.1)
    return pool.up(Role.PREFILL), pool.up(Role.DECODE)


def test_a_card_of_decode_nodes_says_how_fast_they_compute_prompts() -> None:
    pool = Pool(
        ["http://p0"], ["http://d0"], random.Random(1),
        cards={(Role.PREFILL, MODEL): card(prefill_ms=0.1), (Role.DECODE, MODEL): card(prefill_ms=1.0)},
    )  # fmt: skip
    source, target = (nodes[0] for nodes in reported(pool))
    assert target.rates.prefill_ms(1_000) == pytest.approx(10 * source.rates.prefill_ms(1_000), rel=0.05)


def test_another_model_is_not_what_the_card_is_about() -> None:
    pool = Pool(["http://p0"], [], random.Random(1), cards={(Role.PREFILL, "other"): card(model="other")})
    pool.report(pool.nodes[0], HealthReport(Role.PREFILL, MODEL, generation="g"), 0.0, 0.1)
    assert pool.nodes[0].rates.prefill_ms(1_000) == NodeView("n").rates.prefill_ms(1_000)


async def test_the_first_request_is_admitted_or_refused_by_the_card(tmp_path: Path) -> None:
    """A prompt of about 2,000 tokens."""
    slow = written(tmp_path, "slow.json", card(prefill_ms=2.0, step_ms=2.0))
    fast = written(tmp_path, "fast.json", card(prefill_ms=0.01, step_ms=2.0))
    for cards, headers, status, code in (
        ((), {"x-slo-ttft-ms": "1000"}, 200, None),  # a guess
        ((slow,), {"x-slo-ttft-ms": "1000"}, 429, "ttft_never"),
        ((fast,), {"x-slo-ttft-ms": "1000"}, 200, None),
        ((), {"x-slo-tpot-ms": "5"}, 200, None),  # nobody knows yet
        ((slow,), {"x-slo-tpot-ms": "5"}, 200, None),
        ((f"prefill={slow}", f"decode={fast}"), {"x-slo-tpot-ms": "1"}, 429, "tpot_never"),
    ):
        p = prefill()
        async with cluster(p, decode(), rate_card=cards) as c, c.post(LONG, headers=headers) as answer:
            body = await answer.json()
            assert (answer.status, body.get("error", {}).get("code")) == (status, code), (cards, headers)
            assert len(p.calls) == (status == 200)


def test_a_card_for_one_role_wins_over_one_for_both(tmp_path: Path) -> None:
    both, mine = (written(tmp_path, name, card(step_ms=ms)) for name, ms in (("both", 1.0), ("mine", 2.0)))
    config = RouterConfig(rate_card=(f"decode={mine}", both))
    cards = read_cards(config.rate_cards)
    assert cards[Role.DECODE, MODEL].step_ms(1, 32) > 1.5 * cards[Role.PREFILL, MODEL].step_ms(1, 32)


def test_two_cards_about_the_same_nodes_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    one, two = (written(tmp_path, name, card()) for name in ("one", "two"))
    with pytest.raises(ConfigError, match=r"both about all nodes of 'tiny'.*prefill=FILE"):
        read_cards(RouterConfig(rate_card=(one, two)).rate_cards)
    assert len(read_cards(RouterConfig(rate_card=(one, one)).rate_cards)) == 2
    with pytest.raises(ConfigError, match="kvrelay profile"):
        read_cards(RouterConfig(rate_card=(str(tmp_path / "none"),)).rate_cards)
