"""The references are current, and name all that there is."""

from __future__ import annotations

import dataclasses
import re

import pytest
from documents import DOCS
from fastapi.routing import APIRoute

from kvrelay.cluster_plan import ClusterConfig
from kvrelay.openai_api.types import ChatRequest, CompletionRequest
from kvrelay.router.app import create_app
from kvrelay.settings import settings_of
from kvrelay.wire.router_config import RouterConfig
from scripts.reference.command_line import commands
from scripts.reference.error_pieces import REMEDIES, tree
from scripts.reference.metric_families import metrics_reference
from scripts.reference.pages import current
from scripts.reference.setting_pieces import CONFIGS


def page(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")


def test_all_generated_parts_are_current() -> None:
    stale = [
        path.name
        for path, text in current(DOCS).items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run: make reference"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=lambda config: config.__name__)
def test_every_setting_has_its_row_with_default_and_meaning(config: type) -> None:
    rows = [line for line in page("configuration").splitlines() if line.startswith("| `")]
    for field in dataclasses.fields(config):
        if field.name in ("engine", "transfer", "role", "node") or (
            config is ClusterConfig and field.name == "router"
        ):
            continue  # others' settings; and what a command says
        setting = settings_of(config)[field.name]
        spelled = (f"| `{setting.flag}`", f"| `{field.name.replace('_', '-')}`")
        found = [
            row
            for row in rows
            if row.startswith(spelled) and " ".join(setting.help.split()).replace("|", "\\|") in row
        ]
        assert found, f"{config.__name__}.{field.name}"
        assert setting.help, f"{config.__name__}.{field.name} has no docstring"
        if not isinstance(field.default, (bool, str, tuple, type(None), type(dataclasses.MISSING))):
            assert any(f"`{field.default}`" in row for row in found), (
                f"{config.__name__}.{field.name}"
            )


def test_every_variable_of_a_flag_is_in_the_configuration_page() -> None:
    variables = {each.env for command in commands() for each in command.parameters if each.env}
    assert variables
    assert not [name for name in variables if f"`{name}`" not in page("configuration")]


def test_every_command_and_every_flag_is_in_the_page_of_commands() -> None:
    sections = dict(
        re.findall(r"^## kvrelay (\S+)\n(.*?)(?=^## |\Z)", page("commands"), re.M | re.S)
    )
    for command in commands():
        missing = [
            each.name
            for each in command.parameters
            if each.flags and f"`{each.flags[0]}`" not in sections[command.name]
        ]
        assert not missing, command.name


def test_every_error_has_a_row_and_a_remedy() -> None:
    names = [each.__name__ for each, _ in tree()]
    assert set(names) == set(REMEDIES)
    assert not [name for name in names if f"`{name}`" not in page("errors")]


def test_every_metric_is_there_with_words_and_labels() -> None:
    told = page("metrics")
    for fact in metrics_reference():
        assert f"| `{fact.name}` | {fact.kind} |" in told
        assert fact.about, fact.name


def test_every_route_of_the_router_is_in_the_page_of_http() -> None:
    told = re.sub(r"\{[^}]+\}", "{}", page("http"))
    routes = [
        route.path for route in create_app(RouterConfig()).routes if isinstance(route, APIRoute)
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
    assert len(named) > 30
    assert not named - set(ChatRequest.__struct_fields__) - set(CompletionRequest.__struct_fields__)
