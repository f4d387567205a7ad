"""What fuzz makes of sizes: every field and every limit is reached, all of it is JSON, and a seed
repeats it.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from kvrelay.node.app import create_app as create_node
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import Node
from kvrelay.router.serve import RouterApp
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.router_config import RouterConfig
from tests.soak.fuzz.languages import LANGUAGES, NUMBERED, sites
from tests.soak.fuzz.over_sizes import TARGETS, cases
from tests.soak.fuzz.sizes import generators
from tests.soak.fuzz.table import INSIDE, OPEN, ROUTES, Route, open_type, places

WITHOUT_BODY = {"/reset_prefix_cache", "/ping", "/drain", "/undrain", "/admin/reload", "/kv/legs"}
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
    served = posts(RouterApp(RouterConfig())) | posts(node)
    assert {route.path for route in ROUTES} == served - WITHOUT_BODY


def test_every_field_has_generators() -> None:
    for route in ROUTES:
        found = {place.steps[0] for place in places(route)}
        assert found == {field.encode_name for field in msgspec.structs.fields(route.asks)}
        for place in places(route):
            more = len(generators(place.types)) > 2  # than wrong nesting
            assert more or not place.types, place


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


def test_every_kind_of_structured_output_has_programs_and_fields() -> None:
    spoken = {
        "json": "schema",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
    }
    held = Counter(site.language for route in ROUTES for site in sites(route))
    assert set(held) == set(LANGUAGES) >= set(NUMBERED) | set(spoken.values())
    chat = " ".join(site.name for site in sites(ROUTES[0]))
    assert all(f'"{kind}":' in chat for kind in spoken)
