"""KV of prompts is shared among the requests of one key, if the router is to keep keys apart; else
among all.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import MODEL, Cluster, cluster, decode, parse_job, prefill

from kvrelay.router.admission.keys import hash_of
from kvrelay.router.nodes.node import NodeKind
from kvrelay.router.placement import Placement
from kvrelay.router.request.job import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    Job,
    begun,
    decode_body,
    parts_of,
    prefill_body,
)
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery, Placer
from kvrelay.wire.errors import ConfigError, RequestError
from kvrelay.wire.kv_events import chain, root_of
from kvrelay.wire.router_config import KeyConfig, RouterConfig

ANN, BOB = hash_of("ann"), hash_of("bob")
KEYS = (KeyConfig("ann", ANN), KeyConfig("bob", BOB))
PROMPT = "The ship had been at sea for forty days. " * 12


def job(salt: Any = None, prompt: Any = PROMPT, key: str = "") -> Job:
    body = {"model": MODEL, "prompt": prompt} | ({} if salt is None else {"cache_salt": salt})
    return parse_job(msgspec.json.encode(body), COMPLETIONS_PATH, key_hash=key)


def told(body: bytes) -> Any:
    return msgspec.json.decode(body)["cache_salt"]


# The salt.


def test_it_is_of_the_key_and_of_the_clients_own_and_always_the_same() -> None:
    salts = [job(own, key=key).cache_salt for key in (ANN, BOB) for own in (None, "a", "b")]
    assert len(set(salts)) == 6
    assert all(len(salt) == 64 for salt in salts)
    assert salts == [job(own, key=key).cache_salt for key in (ANN, BOB) for own in (None, "a", "b")]
    # Written down: another release must make the same one, or it would find nothing in the caches
    # of this one.
    assert salts[0] == "6346a68ced61fd46bb874206b19c06073e0c89d925e20573cc842181d5779f90"
    assert not any(ANN in salt or BOB in salt for salt in salts)


@given(st.text(min_size=1, max_size=80) | st.sampled_from([ANN, BOB]))
def test_no_salt_of_ones_own_makes_that_of_another_key(own: str) -> None:
    victim = job(key=BOB).cache_salt
    for tried in (own, victim, BOB + own):
        assert job(tried, key=ANN).cache_salt != victim


def test_no_two_keys_salts_or_adapters_have_the_name_of_a_block_in_common() -> None:
    salts = [
        "",
        "a",
        BOB,
        *(job(own, key=key).cache_salt for key in (ANN, BOB) for own in (None, "a")),
    ]
    roots = {root_of(salt, adapter) for salt in salts for adapter in ("", "a", BOB)}
    assert len({chain(root, range(16)) for root in roots}) == 3 * len(salts)


def test_every_leg_of_every_kind_of_node_has_it_for_each_prompt() -> None:
    salted = job("mine", ["one", "two"], key=ANN)
    parts = parts_of(salted)
    assert len(parts) == 2
    for part in parts:
        assert part.cache_salt == salted.cache_salt
        for kind in NodeKind:
            legs = msgspec.structs.replace(part, kind=kind)
            for body in (prefill_body(legs, ()), decode_body(legs, begun(legs, prefill=False))):
                assert told(body) == salted.cache_salt


async def test_a_node_hears_whose_budget_pays_and_of_a_session_in_the_headers() -> None:
    p, d = prefill(), decode()
    async with cluster(p, d, keys=(KeyConfig("ann", ANN, pin_share=0.5),)) as c:
        body = {"model": MODEL, "prompt": PROMPT, "session_id": "own"}
        headers = {"authorization": "Bearer ann", "x-session-id": "s" * 300}
        assert (await c.ask("POST", COMPLETIONS_PATH, json=body, headers=headers)).status == 200
    (heard,) = (call.body for call in p.calls)
    assert heard["kv_transfer_params"]["pin"] == {"owner": "ann", "share": 0.5}
    assert heard["session_id"] == "s" * 256


@pytest.mark.parametrize(
    ("salt", "said"),
    [
        (7, "wrong type"),
        ("", "at least 1 char"),
        ("s" * 1025, "at most 1024"),
        (["a"], "wrong type"),
    ],
)
def test_a_salt_that_no_node_would_take_is_refused_and_not_replaced(salt: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as why:
        job(salt)
    assert why.value.param == "cache_salt"


def test_without_keys_there_is_nothing_to_keep_apart() -> None:
    with pytest.raises(ConfigError, match="isolate_keys"):
        RouterConfig(isolate_keys=True)
    assert RouterConfig(isolate_keys=True, api_key="k").isolate_keys
    assert not RouterConfig(api_key="k").isolate_keys


# In a router.

ASKED = (
    (CHAT_PATH, {"messages": [{"role": "user", "content": PROMPT}]}),
    (COMPLETIONS_PATH, {"prompt": PROMPT}),
    (COMPLETIONS_PATH, {"prompt": [PROMPT, PROMPT + "And then"]}),
    ("/v1/responses", {"input": PROMPT}),
    ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5}),
)


async def ask(c: Cluster, key: str, path: str, body: Any, **more: Any) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (
        await c.ask("POST", path, json={"model": MODEL, **body, **more}, headers=headers)
    ).status


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_every_route_sends_the_salt_of_the_key_on_both_legs(path: str, body: Any) -> None:
    p, d = prefill(), decode()
    async with cluster(p, d, api_key="all", keys=KEYS, isolate_keys=True) as c:
        found: dict[str, set[Any]] = {}
        for key in ("ann", "bob", "all"):
            before = len(p.calls), len(d.calls)
            await ask(c, key, path, body)
            calls = [*p.calls[before[0] :], *d.calls[before[1] :]]
            assert len(calls) >= 2
            found[key] = {call.body.get("cache_salt") for call in calls}
        assert found == {
            "ann": {job(key=ANN).cache_salt},
            "bob": {job(key=BOB).cache_salt},
            "all": {job(key=hash_of("all")).cache_salt},
        }


@pytest.mark.parametrize("isolate", [False, True])
async def test_the_routers_own_index_tells_a_key_of_no_other_keys_prompts(
    monkeypatch: pytest.MonkeyPatch, isolate: bool
) -> None:
    shared, take = list[bool](), Placer.take

    def noted(placer: Placer, wanted: PlacementQuery, found: Placement) -> PlacementLeases:
        shared.append(found.prefill in wanted.cached)
        return take(placer, wanted, found)

    monkeypatch.setattr(Placer, "take", noted)
    p, d = prefill(), decode()
    async with cluster(p, d, keys=KEYS, isolate_keys=isolate) as c:
        body = {"prompt": PROMPT, "max_tokens": 3}
        for key in ("ann", "bob", "bob"):
            assert await ask(c, key, COMPLETIONS_PATH, body) == 200
        assert shared == [False, not isolate, True]
