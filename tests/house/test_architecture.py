"""ARCHITECTURE.md names no file that is not there, and every module says what it holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest


@pytest.fixture
def packages(repository: Path) -> list[str]:
    """Return the packaged folders."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    names = project["tool"]["setuptools"]["packages"]
    return [name.removeprefix("kvrelay.").replace(".", "/") for name in names]


@pytest.fixture
def page(repository: Path) -> str:
    """The text of ARCHITECTURE.md."""
    return (repository / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_every_named_file_exists(packages: list[str], page: str, repository: Path) -> None:
    named = re.findall(rf"\b((?:{'|'.join(packages)})/[\w/]+\.py)\b", page)
    assert not [name for name in named if not (repository / name).exists()]


def test_every_module_opens_with_its_door_plate(packages: list[str], repository: Path) -> None:
    files = [file for name in packages for file in (repository / name).rglob("*.py")]
    bare = [
        str(file.relative_to(repository))
        for file in files
        if not file.read_text().startswith(('"""', 'r"""'))
    ]
    assert not bare


def test_the_spine_is_short(page: str, repository: Path) -> None:
    """A reader walks it once."""
    section = page.partition("## The spine")[2].partition("\n## ")[0]
    spine = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    lines = {name: len((repository / name).read_text().splitlines()) for name in spine}
    assert 10 <= len(lines) <= 14
    assert sum(lines.values()) <= 3_500, lines


def test_architecture_is_a_page_and_results_are_a_table(repository: Path) -> None:
    assert (repository / "ARCHITECTURE.md").stat().st_size <= 14_000
    assert (repository / "benchmarks" / "RESULTS.md").stat().st_size <= 12_000
