"""The references are current, and name all that there is."""

from __future__ import annotations

import re

from documents import DOCS
from fastapi.routing import APIRoute

from kvrelay.openai_api.types import ChatRequest, CompletionRequest
from kvrelay.router.serve import RouterApp
from kvrelay.wire.router_config import RouterConfig
from scripts.reference.pages import current


def page(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")


def test_all_generated_parts_are_current() -> None:
    stale = [
        path.name
        for path, text in current(DOCS).items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run: make reference"


def test_every_route_of_the_router_is_in_the_page_of_http() -> None:
    told = re.sub(r"\{[^}]+\}", "{}", page("http"))
    routes = [
        route.path for route in RouterApp(RouterConfig()).routes if isinstance(route, APIRoute)
    ]
    missing = {path for path in routes if re.sub(r"\{[^}]+\}", "{}", path) not in told}
    assert not missing


def test_fields_that_the_page_of_http_explains_are_fields_of_requests() -> None:
    section = page("http").partition("## Fields beyond OpenAI's\n")[2].partition("\n## ")[0]
    named = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert len(named) > 20
    assert not named - set(ChatRequest.__struct_fields__) - set(CompletionRequest.__struct_fields__)
