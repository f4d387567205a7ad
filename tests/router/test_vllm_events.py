"""KV events of vLLM nodes: their blocks are found by the text of a prompt, and requests go to where
they are.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.prefix.block_contents import BlockContents, keys_of_prompt
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.kv_events import AllBlocksCleared, BlockStored, read_batch
from kvrelay.wire.router_config import RouterConfig
from tests.router.router_doubles import Cluster, router_over, until
from tests.router.vllm_doubles import MODEL, Store, VllmNode
from tests.router.vllm_events_double import (
    BLOCK,
    VllmCache,
    VllmEvents,
    counted,
    packed,
    prompt_of,
    tokens_of,
)

VERSIONS = ["0.9.2", "0.13.0", "0.25.1"]
DOCUMENT = "".join(f"Sentence {at} of a long document. " for at in range(60))


def text(name: Any, size: int = 1_600) -> str:
    """A prompt that shares nothing with those of other names."""
    return "".join(f"{name}:{at} " for at in range(size))[:size]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.router.prefix.kv_events.LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr("kvrelay.router.prefix.kv_events.RETRY_S", 0.1)


# --- pure
# -------------------------------------------------------------------------------------------------------------

prompts = st.tuples(
    st.lists(st.integers(0, 2), max_size=5).map(
        lambda blocks: [each for each in blocks for _ in range(BLOCK)]
    ),
    st.sampled_from(["", "lora"]),
    st.sampled_from(["", "salt"]),
    st.booleans(),
)


@settings(max_examples=80)
@given(
    st.lists(st.one_of(prompts, st.just("reset")), max_size=30),
    st.sampled_from(["0.13.0", "0.25.1"]),
)
def test_keys_are_held_as_the_node_holds_blocks(steps: list[Any], version: str) -> None:
    """However blocks come and go, twice or once, with adapters and salts; by the bytes of each
    version.
    """
    cache, contents = VllmCache(blocks=9), BlockContents(whole=True)
    held: set[int] = set()
    for step in steps:
        if step == "reset":
            cache.reset()
        else:
            tokens, adapter, salt, reads = step
            cache.run([*tokens, 9], adapter, salt if version == "0.25.1" else "", reads=reads)
        for event in read_batch(packed(cache.events, version, 1.0)).events:
            if isinstance(event, AllBlocksCleared):
                contents.clear(whole=True)
                held.clear()
            elif isinstance(event, BlockStored):
                held.update(contents.stored(event))
            else:
                held.difference_update(contents.removed(event))
        cache.events = []
        expected = {
            keys_of_prompt(tokens, BLOCK, adapter, salt)[-1]
            for tokens, adapter, salt in cache.held()
        }
        assert held == expected
        assert contents.whole
        assert len(contents) == len(expected)


def test_the_same_text_has_the_same_keys_on_all_nodes_and_another_context_has_not() -> None:
    prompt = prompt_of({"prompt": DOCUMENT})
    keys = []
    for seed in (b"one", b"two"):
        cache, contents = VllmCache(seed=seed), BlockContents(whole=True)
        cache.run(prompt)
        (event,) = read_batch(packed(cache.events, "0.25.1", 1.0)).events
        assert isinstance(event, BlockStored)
        keys.append(contents.stored(event))
    assert keys[0] == keys[1] == list(keys_of_prompt(prompt, BLOCK))
    assert len(keys[0]) == len(prompt) // BLOCK
    for other in (keys_of_prompt(prompt, BLOCK, "lora"), keys_of_prompt(prompt, BLOCK, "", "salt")):
        assert not set(other) & set(keys[0])
    assert not keys_of_prompt([1 << 70] * BLOCK, BLOCK)


def test_what_cannot_be_told_apart_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.router.prefix.block_contents.LIMIT", 2)
    contents = BlockContents(whole=True)
    for event in (
        BlockStored([1], 99, list(range(BLOCK)), BLOCK),  # nobody has told of its parent
        BlockStored([1], None, list(range(BLOCK - 1)), BLOCK),
        BlockStored([1], None, [1 << 70] * BLOCK, BLOCK),
        BlockStored([1], None, [], 0),
        BlockStored([1], None, list(range(BLOCK)), BLOCK, lora_id=3),  # an older version's adapter
    ):
        contents.clear(whole=True)
        assert contents.stored(event) == []
        assert not contents.whole
    contents.clear(whole=True)
    assert len(contents.stored(BlockStored([1, 2, 3], None, list(range(3 * BLOCK)), BLOCK))) == 2
    assert not contents.whole


@pytest.mark.parametrize(
    "given", ["x", "0", "5557:70000", "5557:1:2", "p:8100=5557", "http://p:1=", "a=b"]
)
def test_ports_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="vllm_kv_events"):
        RouterConfig(vllm_kv_events=(given,))


def test_ports_are_for_all_nodes_or_for_one() -> None:
    config = RouterConfig(vllm_kv_events=("5557:5558", "http://p:1/=7"))
    assert config.vllm_event_ports == {"": (5557, 5558), "http://p:1": (7, 0)}
    with pytest.raises(ConfigError, match="twice"):
        RouterConfig(vllm_kv_events=("1", "2"))


# --- the router
# -------------------------------------------------------------------------------------------------------


class Rig:
    """Two prefill nodes with caches, a decode node, and a router over them."""

    def __init__(self, cluster: Cluster, nodes: list[VllmNode], events: list[VllmEvents]) -> None:
        self.cluster, self.nodes, self.all, self.events = cluster, nodes[:2], nodes, events
        self.index = cluster.router.pool.prefixes

    async def ask(self, prompt: str | list[int], **fields: Any) -> int:
        """Through the router; which node computed it."""
        before = [len(node.calls) for node in self.nodes]
        await self.cluster.text(
            {"prompt": prompt, "max_tokens": 3, **fields}, path="/v1/completions"
        )
        (which,) = [at for at, node in enumerate(self.nodes) if len(node.calls) > before[at]]
        return which

    def elsewhere(self, node: int, prompt: str) -> int:
        """Another router has a node compute a prompt; what it had of it."""
        cached = self.events[node].cache.run(prompt_of({"prompt": prompt}))
        self.events[node].publish()
        return cached

    async def taken(self) -> None:
        """All that was told is known."""
        sources = self.cluster.router.pool.prefixes.contents
        count = [each.cache for each in self.events]
        await until(lambda: len(sources) == len(self.events))
        wanted = [len(each._held) for each in count]
        await until(lambda: [len(sources[node.url]) for node in self.nodes] == wanted)

    def error(self) -> float:
        """Tokens by which estimates of what is cached were off, in all."""
        return self.cluster.metric("kvrelay_router_cached_prompt_tokens_error_sum")

    def cached(self, by: str) -> float:
        return self.cluster.metric("kvrelay_router_cached_prompt_tokens_total", by=by)


@asynccontextmanager
async def rig(
    version: str = "0.25.1",
    *,
    follow: bool = True,
    replays: bool = True,
    blocks: int = 10_000,
    named: bool = True,
    **config: Any,
) -> AsyncIterator[Rig]:
    """`named`: nodes tell which process they are."""
    store = Store()
    async with AsyncExitStack() as stack:
        events = [
            await stack.enter_async_context(VllmEvents(VllmCache(blocks, seed), version).running())
            for seed in (b"one", b"two")
        ]
        nodes = [
            VllmNode(
                "prefill",
                each.script(),
                store,
                version if version in ("0.9.2", "0.13.0") else "0.25.1",
                engines=1,
            )
            for each in events
        ]
        decode = VllmNode("decode", counted, store, nodes[0].version, engines=1)
        for node in (*nodes, decode):
            node.started *= named
            await stack.enter_async_context(node.running())
        ports = tuple(
            f"{node.url}={each.port}" + (f":{each.replay_port}" if replays else "")
            for node, each in zip(nodes, events, strict=True)
        )
        given = RouterConfig(
            prefill=tuple(node.url for node in nodes),
            decode=(decode.url,),
            vllm_kv_events=ports if follow else (),
            health_interval_s=0.05,
            health_deadline_s=10.0,
            request_deadline_s=10.0,
            **{"prefill_policy": "prefix", **config},
        )
        cluster = await stack.enter_async_context(router_over(given))
        started = Rig(cluster, [*nodes, decode], events)
        await until(lambda: all(node.up for node in cluster.router.pool.nodes))
        if follow:
            await until(lambda: all(started.index.trusts(node.url) for node in nodes))
        yield started


@pytest.mark.parametrize("policy", ["price", "prefix"])
@pytest.mark.parametrize("version", VERSIONS[1:])
async def test_a_request_goes_to_where_the_blocks_of_its_text_are(
    version: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvrelay.router.request.vllm_run.learn_prefill_cost", lambda *_: None
    )  # a pause of this machine is no speed of a node
    async with rig(version, blocks=400, prefill_policy=policy) as r:
        one = await r.ask(DOCUMENT + "What is sentence 7?")
        other = 1 - one
        assert r.nodes[one].calls[0].body["return_token_ids"] is True
        await r.taken()
        # It goes where it was; and what has been evicted there, and is elsewhere now, is sought
        # elsewhere.
        assert await r.ask(DOCUMENT + "And sentence 9?") == one
        r.elsewhere(other, DOCUMENT)
        for at in range(20):
            r.elsewhere(one, text(at))
        assert r.elsewhere(one, text(0)) == 0, "the cache is small"
        await r.taken()
        assert await r.ask(DOCUMENT + "Why?") == other
        assert r.error() <= 3 * 2 * BLOCK
        # Known text is not asked for again.
        await r.ask(DOCUMENT + "Why?")
        assert "return_token_ids" not in r.nodes[other].calls[-1].body


async def test_hits_that_events_are_worth() -> None:
    """Twelve documents, caches that hold five each, and as many requests that other routers send.

    Of the tokens that the better of both nodes had at each request, with events nearly all are
    found: what is missed are texts that this router has not seen before.
    """

    async def hits(*, follow: bool) -> tuple[float, float]:
        rng, had = random.Random(5), 0
        documents = [text(at) for at in range(12)]
        async with rig(blocks=5 * 26, follow=follow) as r:
            r.cluster.router.placer._rng.seed(3)
            for _ in range(40):
                prompt = rng.choice(documents)
                had += max(each.cache.has(prompt_of({"prompt": prompt})) for each in r.events)
                await r.ask(prompt)
                r.elsewhere(rng.randrange(2), rng.choice(documents))
                if follow:
                    await r.taken()
            return r.cached("report") / had, r.error()

    (found, error), (found_blind, blind_error) = await hits(follow=True), await hits(follow=False)
    assert found > 0.9
    assert found_blind < found - 0.05
    assert error < 0.5 * blind_error


async def test_adapters_salts_chats_and_prompts_of_ids_are_kept_apart() -> None:
    async with rig() as r:
        ids = tokens_of(DOCUMENT)
        for prompt, salt in ((DOCUMENT, "s"), (DOCUMENT, None), (ids, None), (DOCUMENT, "t")):
            for _ in range(2):
                await r.ask(prompt, cache_salt=salt)
                await r.taken()
        # The second time each was found, but for less than a block and the last one, which is
        # computed always.
        assert r.cached("report") >= 4 * (len(ids) - 2 * BLOCK)
        assert r.error() <= 8 * 2 * BLOCK
        chat = {"messages": [{"role": "user", "content": DOCUMENT}]}
        for _ in range(2):
            await r.cluster.text(chat)
            await r.taken()
        assert r.error() <= 10 * 2 * BLOCK


async def test_an_adapter_s_blocks_are_not_the_model_s() -> None:
    async with rig() as r:
        for node in r.all:
            node.adapters = ("lora",)
        await until(lambda: all("lora" in each.adapters for each in r.cluster.router.pool.nodes))
        for model in (MODEL, "lora", "lora"):
            await r.ask(DOCUMENT, model=model)
            await r.taken()
        size = len(prompt_of({"prompt": DOCUMENT}))
        assert size - 2 * BLOCK <= r.cached("report") < size
        assert r.error() <= 2 * BLOCK


async def test_a_version_that_tells_no_tokens_is_known_by_what_it_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig("0.9.2") as r:
        one = await r.ask(DOCUMENT)
        await r.taken()
        assert "tells no tokens of prompts" in caplog.text
        assert [await r.ask(DOCUMENT + "x") for _ in range(3)] == [one] * 3
        assert sum("return_token_ids" in call.body for call in r.nodes[one].calls) == 1


async def test_a_router_that_comes_late_goes_by_what_it_has_sent_too() -> None:
    """The replay reaches back too little, so blocks have unknown parents."""
    async with rig(follow=True) as first:
        store_urls = [node.url for node in first.nodes]
        for number, each in enumerate(first.events):
            each._buffer = type(each._buffer)(maxlen=1)
            for at in range(3):
                first.elsewhere(number, DOCUMENT + text(at))
        config = first.cluster.router.config
        async with router_over(config) as late:
            index = late.router.pool.prefixes
            await until(lambda: all(index.trusts(url) for url in store_urls))
            assert not any(index.contents[url].whole for url in store_urls)
            for _ in range(2):
                await late.text({"prompt": DOCUMENT, "max_tokens": 3}, path="/v1/completions")
            assert late.metric("kvrelay_router_cached_prompt_tokens_total", by="estimate") > 300


async def test_a_node_without_replays_is_listened_to_from_now_on() -> None:
    async with rig(replays=False) as r:
        assert not r.index.contents[r.nodes[0].url].whole
        one = await r.ask(DOCUMENT)
        other = 1 - one

        async def heard() -> bool:
            r.elsewhere(other, text(random.random()))
            await asyncio.sleep(0.01)
            return len(r.index.contents[r.nodes[other].url]) > 0

        async with asyncio.timeout(10):
            while not await heard():
                pass
        assert all(each.replays == 0 for each in r.events)


@pytest.mark.parametrize("told", [True, False])
async def test_a_restarted_node_has_nothing(told: bool) -> None:
    """Whether its health tells that it is another process or not."""
    async with rig(named=told) as r:
        one = await r.ask(DOCUMENT)
        for at in range(3):
            r.elsewhere(one, text(at))
        await r.taken()
        r.events[one].restart()
        r.nodes[one].started += 5.0 if told else 0.0
        r.elsewhere(one, text("new"))
        await r.taken()
        await until(lambda: r.index.trusts(r.nodes[one].url))
        r.elsewhere(1 - one, DOCUMENT)
        await r.taken()
        assert await r.ask(DOCUMENT) == 1 - one


async def test_a_cache_that_was_reset_is_empty_and_engines_behind_one_address_are_not_followed() -> (
    None
):
    async with rig() as r:
        one = await r.ask(DOCUMENT)
        r.elsewhere(1 - one, DOCUMENT)
        r.events[one].cache.reset()
        r.events[one].publish()
        await r.taken()
        assert await r.ask(DOCUMENT) == 1 - one
        r.nodes[0].engines = 2
        await until(lambda: r.nodes[0].url not in r.index.contents)
        assert not r.index.trusts(r.nodes[0].url)
