"""What fuzz makes of sizes: every field and every limit is reached, all of it is JSON, and a seed
repeats it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from msgspec import inspect

from kvrelay.node.app import create_app as create_node
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import Node
from kvrelay.openai_api.structured import _KINDS
from kvrelay.openai_api.types import MAX_CHOICES
from kvrelay.router.app import create_app as create_router
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.sampling import _MAX_CONSTRAINT_CHARS, MAX_LISTED_TOKENS
from tests.soak.chaos.model import CONTEXT
from tests.soak.fuzz.languages import LANGUAGES, NUMBERED, sites
from tests.soak.fuzz.over_sizes import TARGETS, Case, cases, round_of
from tests.soak.fuzz.sizes import MAX_BODY, Generator, generators, ladder, limits, text
from tests.soak.fuzz.table import INSIDE, OPEN, ROUTES, Route, open_type, places

WITHOUT_BODY = {"/ping", "/drain", "/undrain", "/admin/reload", "/kv/legs"}
WITHOUT_BODY |= {"/reset_prefix_cache", "/start_profile", "/stop_profile"}
"""Nothing in a body, or (leg streams) messages that have a target of their own."""


def posts(app: FastAPI) -> set[str]:
    return {
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    }


def test_every_route_that_takes_a_body_is_in_the_table() -> None:
    config = NodeConfig(EngineConfig("nowhere"))
    node = create_node(
        Node(config, EngineClient(config), created=0), lambda _: contextlib.AsyncExitStack()
    )
    served = posts(create_router(RouterConfig())) | posts(node)
    assert {route.path for route in ROUTES} == served - WITHOUT_BODY


def test_every_field_has_generators() -> None:
    for route in ROUTES:
        found = {place.steps[0] for place in places(route)}
        assert found == {field.encode_name for field in msgspec.structs.fields(route.asks)}
        for place in places(route):
            assert len(generators(place.types)) > 2, place  # more than wrong nesting


def test_a_type_without_generators_is_an_error() -> None:
    with pytest.raises(TypeError, match="DateTimeType"):
        generators([inspect.DateTimeType()])


def test_what_a_type_leaves_open_is_described_or_named() -> None:
    for route in ROUTES:
        for place in places(route):
            if any(map(open_type, place.types)):
                assert {step for step in place.steps if isinstance(step, str)} & {*OPEN, *INSIDE}, (
                    place.name
                )
                assert place.steps[-1] == 0 or place.steps[-1] in OPEN, place.name


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_a_body_around_a_field_is_one_that_the_route_reads(route: Route) -> None:
    msgspec.json.decode(route.body({}), type=route.asks)
    for place in places(route):
        body: Any = json.loads(place.body(b'"mark"'))
        for step in place.steps:
            body = body[step]
        assert body == "mark"


def test_all_is_json_and_grows_with_its_size() -> None:
    for case in {
        case.generator.name: case for target in TARGETS for case in cases(target)
    }.values():
        make = case.generator.make
        for size in (1, 2, 7):
            if case.generator.name != "closing brackets":
                json.loads(make(size))
        assert len(make(1000)) > len(make(1)), case.name
        assert case.generator.most or 12_000 < len(make(case.generator.capped(20_000))) <= 20_000, (
            case.name
        )


def test_sizes_reach_every_limit_and_one_beyond() -> None:
    generator = Generator("text", lambda n: text("a", n))
    most = 200_000
    drawn = {size for seed in range(300) for size in ladder(random.Random(seed), generator, most)}
    top = generator.capped(most)
    assert len(generator.make(top)) == most
    assert {
        limit + beyond for limit in (*limits(), top) if limit <= top for beyond in (0, 1)
    } <= drawn
    assert {
        MAX_BODY,
        CONTEXT,
        MAX_CHOICES,
        MAX_LISTED_TOKENS,
        *_MAX_CONSTRAINT_CHARS.values(),
    } <= set(limits())


def test_every_ladder_has_all_orders_of_magnitude() -> None:
    generator = Generator("text", lambda n: text("\n", n))
    for seed in range(5):
        steps = ladder(random.Random(seed), generator)
        assert steps[0] == 1
        assert all(later <= 30 * sooner for sooner, later in itertools.pairwise(steps))
        assert steps[-1] * 30 > generator.capped(MAX_BODY)
        assert steps == ladder(random.Random(seed), generator)


@pytest.mark.parametrize("target", TARGETS)
def test_rounds_play_every_generator_before_any_again_and_a_seed_repeats_them(target: str) -> None:
    names = {case.generator.name for case in cases(target) if not case.goes_on}
    played: list[Case] = []
    rounds = itertools.count()
    while len(played) < len(names):
        played += [case for case in round_of(target, 1, next(rounds)) if not case.goes_on]
    assert {case.generator.name for case in played[: len(names)]} == names
    assert round_of(target, 3, 2) == round_of(target, 3, 2) != round_of(target, 4, 2)
    assert all("/v1/responses" in case.name for case in round_of(target, 1, 0, "/v1/responses"))


def test_lists_hold_every_role_and_type_that_a_translation_reads() -> None:
    names = {
        case.generator.name
        for case in cases("sizes")
        if case.name.startswith("/v1/responses input: ")
    }
    kinds = (
        "user messages",
        "assistant messages",
        "function calls",
        "function outputs",
        "reasonings",
    )
    assert {f"list of {kind}" for kind in kinds} <= names
    long = next(
        case.generator
        for case in cases("sizes")
        if case.generator.name == "list of long assistant messages"
    )
    assert long.capped(MAX_BODY) > 30_000


def test_every_round_of_sizes_goes_on_from_stored_responses() -> None:
    for number in range(3):
        (case,) = (case for case in round_of("sizes", 1, number) if case.goes_on)
        assert case.route.path == "/v1/responses"
        assert len(json.loads(case.generator.make(1))["input"]) == 2
    assert not any(case.goes_on for case in round_of("sizes", 1, 0, "/v1/messages"))


def test_every_kind_of_structured_output_has_programs_and_fields() -> None:
    spoken = {
        "json": "schema",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
        "tags": "tags",
    }
    assert set(spoken) == set(_KINDS.values())
    held = Counter(site.language for route in ROUTES for site in sites(route))
    assert set(held) == set(LANGUAGES) >= set(NUMBERED) | set(spoken.values())
    chat = " ".join(site.name for site in sites(ROUTES[0]))
    assert all(f'"{kind}":' in chat for kind in _KINDS if kind != "json_object")
    for name in msgspec.structs.fields(ROUTES[0].asks):
        if name.name.startswith("guided_"):
            assert name.name in chat
