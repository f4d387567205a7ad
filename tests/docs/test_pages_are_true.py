"""What pages name is there: commands, flags, settings, metrics, routes, variables, links; and
figures were measured.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from documents import DOCS, ROOT, Block, blocks, commands, pages, words
from starlette.routing import Route

from kvrelay.router.serve import RouterApp
from kvrelay.settings import convert
from kvrelay.wire.router_config import RouterConfig
from scripts.reference.command_line import Command, general_flags
from scripts.reference.command_line import commands as all_commands
from scripts.reference.metric_families import metrics_reference
from tests.commands import output_of

KNOWN: dict[str, Command] = {each.name: each for each in all_commands()}
ALWAYS = general_flags()
ALL_FLAGS = {
    flag for each in KNOWN.values() for one in each.parameters for flag in one.flags
} | ALWAYS
OURS = [page for page in pages() if page.name != "migration.md"]
"""migration.md also has flags and routes of others."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_blocks_exist_with_their_flags(page: Path) -> None:
    for block in blocks(page):
        if block.language in ("sh", "bash"):
            for command in commands(block):
                check(command)


def check(command: list[str]) -> None:
    """Whether a command of ours is one, with these flags."""
    command = command[
        next((at for at, word in enumerate(command) if "=" not in word), len(command)) :
    ]  # variables
    if command and command[0].split("/")[-1] == "kvrelay":
        if command[1] in ALWAYS:
            return
        known = KNOWN.get(command[1])
        assert known is not None, command
        flags = {flag for each in known.parameters for flag in each.flags} | ALWAYS
        wrong = [
            word for word in command[2:] if word.startswith("-") and word.split("=")[0] not in flags
        ]
        assert not wrong, command
    elif "make" in command[:1]:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert all(word in targets or "=" in word for word in command[1:]), command
    elif "-m" in command and command[command.index("-m") + 1].startswith(
        ("benchmarks", "tests.soak")
    ):
        module = ROOT / command[command.index("-m") + 1].replace(".", "/")
        text = (
            module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        ).read_text()
        assert not [
            word for word in command if word.startswith("--") and f'"{word}"' not in text
        ], command


@pytest.mark.parametrize("page", OURS, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_in_sentences_exist(page: Path) -> None:
    of_chaos = {"--streams", "--prefill", "--decode", "--seconds"}
    of_chaos |= {"--each-once", "--kind", "--rolling", "--from", "--seed"}
    others = {*of_chaos, "--no-...", "--check"}
    named = {word.split()[0].split("=")[0] for word in words(page) if word.startswith("--")}
    assert not named - ALL_FLAGS - others


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_in_sentences_exist(page: Path) -> None:
    families = {each.name for each in metrics_reference()}
    named = {
        found
        for word in words(page)
        for found in re.findall(r"^(?:kvrelay_|vllm:)[a-z_]+\b(?!\*)", word)
    }
    assert not named - families


@pytest.mark.parametrize("page", OURS, ids=lambda page: str(page.relative_to(ROOT)))
def test_routes_in_sentences_exist(page: Path) -> None:
    served = {route.path for route in RouterApp(RouterConfig()).routes if isinstance(route, Route)}
    own = {*served, "/kv/legs", "/kv/release", "/kv/renew"}
    own |= {"/drain", "/undrain", "/admin/role"}
    known = {re.sub(r"\{[^}]+\}", "{}", path) for path in own} | {"/v1", "/admin", "/proc"}
    for word in words(page):
        found = re.fullmatch(r"(?:(?:GET|POST|DELETE) )?(/[a-z][\w/{}.]*)(?:\?.*)?", word)
        if found:
            assert re.sub(r"\{[^}]+\}", "{}", found[1]) in known, word


def test_variables_are_read_somewhere() -> None:
    code = "".join(
        file.read_text(encoding="utf-8")
        for name in ("wire", "kvrelay", "node", "router", "deploy")
        for file in (ROOT / name).rglob("*")
        if file.suffix in (".py", ".yaml", ".yml") or file.name == ".env"
    )
    named = {
        name
        for page in pages()
        for name in re.findall(r"\bKVRELAY_[A-Z_]+\b", page.read_text(encoding="utf-8"))
    }
    assert named
    assert not [name for name in named if name not in code]


@pytest.mark.parametrize(
    "block",
    [block for page in pages() for block in blocks(page) if block.kind == "settings"],
    ids=lambda block: f"{block.page.stem}-{block.name}",
)
def test_configuration_files_in_pages_are_valid(block: Block, tmp_path: Path) -> None:
    from kvrelay.cluster_plan import ClusterConfig
    from kvrelay.settings import settings_of

    known = settings_of({"up": ClusterConfig, "router": RouterConfig}[block.name])
    content = yaml.safe_load(block.text)
    assert content
    for key, value in content.items():
        convert(known[key.replace("-", "_")], value, key)


@pytest.mark.parametrize(
    ("page", "reckoned"),
    [("operations/tuning.md", {"6,180", "13,530", "3,950"}), ("numbers.md", set())],
)
def test_figures_in_pages_were_measured(page: str, reckoned: set[str]) -> None:
    """Those with a decimal point or a thousands comma; what is reckoned from them is named here."""
    lengths = {"4,096", "1,024", "8,192", "2,048"}
    told = (DOCS / page).read_text(encoding="utf-8")
    figures = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)|(?<![\w,])\d{1,3},\d{3}\b", told))
    pages = [ROOT / "benchmarks" / "RESULTS.md", *(ROOT / "benchmarks" / "results").iterdir()]
    measured = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert len(figures) > 40
    assert not [each for each in figures - reckoned - lengths if each not in measured]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built documentation; the build itself refuses links that lead nowhere, and pages that no
    menu names.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir"]
    output_of(*command, folder, cwd=ROOT)
    return folder


def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    built = sorted(site.rglob("*.html"))
    assert len(built) > 20
    for page in built:
        text = page.read_text(encoding="utf-8")
        loads = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\"\s>]+)", text)
        loads += re.findall(
            r"<link\b(?=[^>]*rel=\"?(?:stylesheet|icon|preload|preconnect))[^>]*href=\"?([^\"\s>]+)",
            text,
        )
        assert not [url for url in loads if re.match(r"(https?:)?//", url)], page.name
        assert "mermaid" not in text  # drawn by a script of another host
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")
        ), sheet.name


def test_links_of_the_readme_lead_somewhere() -> None:
    told = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)", told)
    assert links
    assert not [
        link for link in links if not re.match(r"https?://", link) and not (ROOT / link).exists()
    ]
