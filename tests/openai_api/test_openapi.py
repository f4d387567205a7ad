"""The OpenAPI document names the routes that are served, and its schemas agree with what is
accepted.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.testclient import TestClient

from kvrelay.openai_api.openapi import document
from kvrelay.router.serve import RouterApp
from kvrelay.wire.router_config import RouterConfig
from tests.openai_api.answers import node

NOT_FOR_CLIENTS = (
    *("/kv/", "/admin/", "/drain", "/undrain", "/console"),
    "/reset_prefix_cache",
)
"""What the cluster itself asks, and who runs it; the document is of what clients may."""


@pytest.mark.parametrize("app", [RouterApp(RouterConfig()), node()], ids=["router", "node"])
def test_the_document_names_every_route_and_no_other(app: FastAPI) -> None:
    served = {
        (method.lower(), re.sub(r"\{(\w+)(:path)?\}", "{}", route.path))
        for route in app.routes
        if isinstance(route, Route) and not route.path.startswith(NOT_FOR_CLIENTS)
        if route.path != "/"  # leads to the console
        for method in (route.methods or set()) - {"HEAD"}
    }
    paths = document("x", "1")["paths"]
    assert {
        (method, re.sub(r"\{\w+\}", "{}", path)) for path in paths for method in paths[path]
    } == served


def test_the_page_and_the_document_are_served_without_a_key() -> None:
    client = TestClient(RouterApp(RouterConfig(api_key="key")))
    assert client.get("/openapi.json").json()["openapi"].startswith("3.1")
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "url: 'openapi.json'" in page.text


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    told = document("x", "1")
    names = set(re.findall('"#/components/schemas/([^"]+)"', json.dumps(told)))
    assert names == set(told["components"]["schemas"])
    assert "kv_transfer_params" not in told["components"]["schemas"]["ChatRequest"]["properties"]


def test_a_body_needs_a_model_unless_it_is_a_question_about_tokens() -> None:
    told = document("x", "1")["components"]["schemas"]
    required = {name: "model" in told[name].get("required", ()) for name in told}
    named = {name for name in told if "model" in told[name].get("properties", ())}
    assert {name for name in named if not required[name]} == {
        "DetokenizeRequest",
        "TokenizeChat",
        "TokenizePrompt",
    }


@pytest.mark.parametrize(
    ("schema", "name", "limits"),
    [
        ("ChatRequest", "temperature", {"minimum": 0, "maximum": 2}),
        ("Thinking", "type", {"enum": ["enabled", "adaptive", "disabled"]}),
    ],
)
def test_the_document_states_the_limits_of_fields(
    schema: str, name: str, limits: dict[str, Any]
) -> None:
    field = document("x", "1")["components"]["schemas"][schema]["properties"][name]
    assert limits.items() <= (field["anyOf"][0] if "anyOf" in field else field).items()
