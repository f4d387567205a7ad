"""KV that simulated nodes read instead of computing: from others, from host memory, from files."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.roles import H200
from kvrelay.load.workloads import Arrival, Work, agents_of, sessions
from kvrelay.planner.rate_card import Point, RateCard
from kvrelay.planner.sessions import streams_of_sessions
from kvrelay.planner.setting import Setting, Stream
from kvrelay.planner.world import World, simulate
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.ladder import RUNGS

SIZE = 256


def agents(spec: str, count: int, clients: int, seed: str = "1") -> list[Stream]:
    drawn = itertools.islice(sessions(Work(agents=agents_of(spec)), Arrival(), seed), count)
    return streams_of_sessions([*drawn], clients, SIZE)


def card(**transfer: float) -> RateCard:
    """An H200 with so many milliseconds for each token of a transfer."""
    points = {name: [Point(0.0), Point(ms * 65_536, 65_536)] for name, ms in transfer.items()}
    return msgspec.structs.replace(H200, transfer=H200.transfer | points)


def test_a_turn_begins_with_what_was_said_and_a_sub_agent_with_a_part_of_it() -> None:
    made = agents("fleet,branch=0.4", 6, 2)
    assert sum(not stream.waits for stream in made) == 2, "each client begins one session"
    (first,) = [stream for stream in made if stream.session == "0" and not stream.waits]
    for stream in made:
        assert len(stream.blocks) == stream.prompt // SIZE
        assert len(stream.blocks + stream.answer) == (stream.prompt + stream.output - 1) // SIZE
        for later in stream.then:
            if later.session == stream.session and later.waits == 1:
                shared = sum(map(int.__eq__, later.blocks, stream.blocks + stream.answer))
                assert shared >= first.prompt // SIZE - 8, "the system prompt at least"
    joined = [stream for stream in made if stream.waits > 1]
    assert joined, "a parent waits for several sub-agents"


def test_the_next_turn_takes_its_answer_from_the_decode_node() -> None:
    made = agents("llm-d,systems=9,turns=8,system=20000,output=600", 9, 9)
    result = simulate(made, Setting(prefill=2, decode=2, block_size=SIZE, card=H200))
    assert all(stream.answered for stream in made)
    assert result.rungs["peer"] > 0
    assert result.found > 0.99
    before = agents("llm-d,systems=9,turns=8,system=20000,output=600", 9, 9)
    without = simulate(
        before, Setting(prefill=2, decode=2, block_size=SIZE, card=H200, pulls=False)
    )
    assert without.rungs["peer"] == 0
    assert without.rungs["placement"] > 0
    assert without.found < result.found


@pytest.mark.parametrize(("token_ms", "reads"), [(0.01, True), (0.05, False)])
def test_what_is_quicker_is_done(token_ms: float, reads: bool) -> None:
    """A token takes 0.02 ms to compute: nothing is read that takes longer, or computed else."""
    rates = card(direct=token_ms, host=1.0, store=1.0)
    made = agents("llm-d,systems=4,turns=6,system=8000,output=600", 4, 4)
    below = {"host": 1 << 22, "store": 1 << 22}
    setting = Setting(prefill=2, decode=2, block_size=SIZE, card=rates, below=below)
    rungs = simulate(made, setting).rungs
    assert rungs["host"] == rungs["store"] == 0
    assert (rungs["peer"] > 0) is reads
    assert (rungs["placement"] == 0) is reads


def test_a_block_that_only_passes_a_full_tier_was_never_there() -> None:
    long = Stream(0.0, 60_000, 2, tuple(range(234)))
    below = {"host": 10 * SIZE}
    setting = Setting(prefill=0, decode=1, block_size=SIZE, card=H200, below=below)
    simulate([long, *(Stream(300.0 + 100 * at, 300, 20) for at in range(8))], setting)
    assert long.rungs["new"] == long.prompt


def test_a_card_without_a_tier_is_refused() -> None:
    bare = msgspec.structs.replace(H200, transfer={})
    with pytest.raises(ConfigError, match="no two points of transfer 'host'"):
        simulate([], Setting(card=bare, below={"host": 1}))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.booleans())
def test_each_request_ends_once_and_gives_back_what_it_took_and_leased(
    seed: int, tight: bool
) -> None:
    rng = random.Random(seed)
    rates = msgspec.structs.replace(card(direct=0.004, host=0.002, store=0.01), max_num_seqs=6)
    rates = msgspec.structs.replace(rates, kv_tokens=24_000 if tight else 200_000)
    spec = "fleet,systems=2,system=1000:4000,turns=2:6,branch=0.4,branch_turns=1:3,gap_s=0.05:1"
    made = agents(spec, 8, 4, f"{seed}")
    below = {"host": rng.choice([0, 8_000, 90_000]), "store": rng.choice([0, 300_000])}
    world = World(made, Setting(prefill=2, decode=2, block_size=SIZE, below=below, card=rates))
    result = world.run()
    assert len({id(stream) for stream in made}) == len(made)
    for stream in made:
        assert stream.refused or stream.answered
        if stream.answered:
            assert sum(stream.rungs.values()) == stream.prompt
            assert sum(stream.read.values()) <= stream.cached < stream.prompt
    assert set(result.rungs) <= set(RUNGS)
    for node in map(world.router.engine, world.router.pool.nodes):
        assert node.idle
        assert node.tokens == node.running == node.waiting == 0
        for cache in (node.cache, *node.pulls.below):
            assert cache.free == cache.capacity


class Lru:
    """A cache of so many blocks: the least recently used goes first, of a prefix its end."""

    def __init__(self, most: int) -> None:
        self.most, self.blocks = most, OrderedDict[int, None]()

    def has(self, blocks: Sequence[int]) -> int:
        return len([*itertools.takewhile(self.blocks.__contains__, blocks)])

    def use(self, blocks: Sequence[int]) -> list[int]:
        """Put blocks in, and return the new ones."""
        new = [block for block in blocks if block not in self.blocks]
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.most:
            self.blocks.popitem(last=False)
        return new


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=30),
    st.integers(6, 12),
    st.integers(0, 20),
)
def test_other_sizes_of_tiers_find_what_an_oracle_finds(
    prompts: list[str], pool: int, host: int
) -> None:
    """One request after the other, on one node, whose tokens lie in pool and host memory."""
    names: dict[str, int] = {}
    asked = [
        tuple(names.setdefault(prompt[:end], 1 + len(names)) for end in range(1, len(prompt) + 1))
        for prompt in prompts
    ]
    rates = msgspec.structs.replace(card(host=0.0001), kv_tokens=(pool + 1) * SIZE)
    made = [
        Stream(5_000.0 * at, len(blocks) * SIZE + 1, 2, blocks) for at, blocks in enumerate(asked)
    ]
    below = {"host": host * SIZE}
    setting = Setting(prefill=0, decode=1, block_size=SIZE, card=rates, below=below)
    rungs = simulate(made, setting).rungs
    on_gpu, in_host, seen = Lru(pool), Lru(host), set[int]()
    expected = Counter[str]()
    for blocks in asked:
        gpu = on_gpu.has(blocks)
        tier = in_host.has(blocks[gpu:])
        expected["gpu"] += gpu * SIZE
        expected["host"] += tier * SIZE
        once = len([*itertools.takewhile(seen.__contains__, blocks)])
        expected["lost"] += max(0, once - gpu - tier) * SIZE
        in_host.use(blocks[gpu : gpu + tier])
        in_host.use(blocks[:gpu])
        in_host.use(on_gpu.use(blocks))
        seen.update(blocks)
    lost = rungs.total() - rungs["new"] - rungs["gpu"] - rungs["host"]
    assert (rungs["gpu"], rungs["host"], lost) == (
        expected["gpu"],
        expected["host"],
        expected["lost"],
    )
