"""What happens to nodes of a simulated cluster: every request ends once, with all of its tokens."""

from __future__ import annotations

import dataclasses
import functools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.roles import H200, slowed
from kvrelay.load.measures import Targets
from kvrelay.planner.rate_card import Point
from kvrelay.planner.setting import Result, Setting, Stream
from kvrelay.planner.world import World, simulate
from kvrelay.router.roles import OTHER
from kvrelay.wire.step_costs import TARGET_USED

on_h200 = functools.partial(Setting, card=H200)


def streams(
    count: int, rate_s: float, prompt: int = 1_000, output: int = 100, seed: int = 1
) -> list[Stream]:
    rng, now, made = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate_s) * 1e3
        made.append(Stream(now, rng.randrange(1, 2 * prompt), rng.randrange(1, 2 * output)))
    return made


def test_a_mixed_step_takes_as_long_as_was_measured() -> None:
    """4 ms more than its parts say beside 16 decodes, 8 ms beside 128, whatever the chunk."""
    measured = [
        Point(
            H200.mixed_ms(requests, requests * 1_024, [(tokens, 0)]) + more, tokens, 1_024, requests
        )
        for requests, more in ((16, 4.0), (128, 8.0))
        for tokens in (64, 8_000)
    ]
    card = msgspec.structs.replace(H200, mixed=measured)
    for requests, more in ((1, 4.0), (16, 4.0), (72, 6.0), (128, 8.0), (256, 8.0)):
        for pieces in ([(30, 0)], [(500, 0)], [(400, 0), (300, 1_000)]):
            of = requests, requests * 700, pieces
            assert card.mixed_ms(*of) == pytest.approx(H200.mixed_ms(*of) + more)
            assert slowed(card, 2.0).mixed_ms(*of) == pytest.approx(2 * card.mixed_ms(*of))


def test_a_colocated_server_makes_its_streams_wait_for_prompts() -> None:
    """One stream decodes; a prompt that comes beside it stands in its steps, as far as the longest
    gap allows.
    """
    first, second = Stream(0.0, 1_000, 400), Stream(500.0, 6_000, 2)
    result = simulate([first, second], on_h200(prefill=0, decode=1))
    step = H200.step_ms(1, 1_100)
    assert result.gap_ms(1.0) == pytest.approx(TARGET_USED * H200.max_gap_ms, rel=0.03)
    assert second.ttft > H200.prompt_ms(6_000), "its chunks share their steps"
    first, second = Stream(0.0, 1_000, 400), Stream(500.0, 6_000, 2)
    result = simulate([first, second], on_h200(prefill=1, decode=1))
    assert result.gap_ms(1.0) < 2 * step
    assert second.ttft == pytest.approx(H200.prompt_ms(6_000))


def test_prompts_that_come_together_are_shared_with_the_decode_node_unless_roles_are_strict() -> (
    None
):
    def served(*, strict: bool) -> Result:
        burst = [Stream(at // 8 * 1_000.0, 2_000, 8) for at in range(80)]
        setting = on_h200(prefill=1, decode=1, prefixes=False, strict_roles=strict)
        result = simulate(burst, setting)
        assert all(stream.answered for stream in burst)
        return result

    shared, strict = served(strict=False), served(strict=True)
    assert sum(stream.local for stream in shared.streams) > 20
    assert not any(stream.local for stream in strict.streams)
    assert max(s.ttft for s in shared.streams) < 0.8 * max(s.ttft for s in strict.streams)


def test_who_finds_no_room_waits_at_the_router_and_is_refused_when_it_takes_too_long() -> None:
    tight = msgspec.structs.replace(H200, kv_tokens=4_096)
    long, later = Stream(0.0, 2_000, 1_900), Stream(100.0, 2_000, 50)
    simulate([long, later], Setting(prefill=1, decode=1, card=tight, block_size=64))
    assert long.last < later.first < later.last
    assert later.preempted == long.preempted == 0
    huge = Stream(0.0, 4_000, 100)
    simulate([huge], Setting(prefill=1, decode=1, card=tight))
    assert huge.refused


def test_with_targets_admission_refuses_who_would_miss_them() -> None:
    """At twice what the prefill node computes, half of them are answered, none later than its
    target and a prompt.
    """
    targets = Targets(300.0, 15.0)
    setting = on_h200(prefill=1, decode=1, prefixes=False, strict_roles=True, targets=targets)
    most_s = 1e3 / H200.prompt_ms(2_000)

    def asked() -> list[Stream]:
        return [Stream(at * 500.0 / most_s, 2_000, 20) for at in range(600)]

    refusing, patient = asked(), asked()
    simulate(refusing, setting)
    simulate(patient, dataclasses.replace(setting, targets=None))
    later = [stream for stream in refusing[300:] if not stream.refused]
    assert 0.35 < len(later) / 300 < 0.65
    assert max(stream.ttft for stream in later) < 300.0 + H200.prompt_ms(2_000)
    assert sum(stream.ttft <= 300.0 for stream in patient[300:]) == 0


AHEAD = msgspec.structs.replace(
    H200,
    prefill=[
        *(Point(15.0, tokens) for tokens in (16, 64, 256, 512)),
        *(Point(tokens / 40, tokens) for tokens in (1_000, 4_000, 8_000)),
    ],
    mixed=[
        Point(ms, tokens, 1_000, 64) for tokens, ms in ((64, 30.0), (512, 30.0), (8_000, 206.0))
    ],
    ahead=True,
)


def test_steps_of_few_tokens_wait_for_their_launch_and_not_for_the_device() -> None:
    decode_ms = H200.step_ms(1, 0)
    assert AHEAD.chunk_ms([(4_000, 0)]) == 100.0
    assert AHEAD.chunk_ms([(512, 0)]) == 15.0  # nothing ran before it
    assert AHEAD.chunk_ms([(512, 0)], 5.0) == pytest.approx(max(512 / 40, 10.0))
    assert AHEAD.chunk_ms([(16, 0)], 50.0) == pytest.approx(decode_ms)  # the weights are read
    parts = AHEAD.step_ms(64, 64_000) + 512 / 40 - decode_ms
    assert parts < 24.0
    assert AHEAD.mixed_ms(64, 64_000, [(512, 0)]) == 30.0
    assert AHEAD.mixed_ms(64, 64_000, [(512, 0)], 6.0) == 24.0
    assert AHEAD.mixed_ms(64, 64_000, [(512, 0)], 20.0) == pytest.approx(parts, abs=8)
    assert msgspec.structs.replace(AHEAD, ahead=False).mixed_ms(64, 64_000, [(512, 0)], 6.0) == 30.0


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(0, 2),
    st.sampled_from(["price", "least_queue", "round_robin"]),
    st.booleans(),
    st.booleans(),
)
def test_whatever_happens_each_request_ends_once_and_nothing_is_left(
    seed: int, prefill: int, policy: str, tight: bool, ahead: bool
) -> None:
    rng = random.Random(seed)
    card = AHEAD if ahead else H200
    card = msgspec.structs.replace(card, kv_tokens=9_000, max_num_seqs=8) if tight else card
    made = streams(60, 20.0, seed=seed)
    for stream in made[::2]:  # which begin alike
        stream.blocks = tuple(range(stream.prompt // 128))
    world = World(made, Setting(policy, prefill, 2, card=card))
    nodes, changed = world.router.pool.nodes, []

    def change(now: float) -> None:
        if not world.switching:
            node = rng.choice(nodes)
            changed.append(node)
            world.change_role(node, OTHER[node.role], now)

    for _ in range(rng.randrange(8)):
        world.clock.later(rng.uniform(0, 4_000), change)
    result = world.run()
    answered = [stream for stream in made if not stream.refused]
    assert all(stream.at <= stream.begun < stream.first <= stream.last for stream in answered)
    assert all(0 <= stream.cached < stream.prompt for stream in answered)
    # A time between tokens for each token after the first, and what was waited beside.
    assert sum(result.gaps.values()) >= sum(stream.output - 1 for stream in answered)
    for stream in made:
        assert not (stream.refused and stream.first >= 0)
    for node in nodes:
        engine = world.router.engine(node)
        assert engine.idle
        assert engine.tokens == engine.running == engine.waiting == 0
        assert engine.cache.free == engine.cache.capacity
        assert not node.leases
    assert changed or not any(stream.refused for stream in made)
