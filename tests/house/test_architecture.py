"""ARCHITECTURE.md names every file of the packages, and no file that is not there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest


@pytest.fixture
def packages(repository: Path) -> list[str]:
    """The packaged folders."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    return list(project["tool"]["setuptools"]["packages"])


@pytest.fixture
def page(repository: Path) -> str:
    """The text of ARCHITECTURE.md."""
    return (repository / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_every_file_is_named(packages: list[str], page: str, repository: Path) -> None:
    files = [
        file.relative_to(repository)
        for name in packages
        for file in sorted((repository / name).rglob("*.py"))
    ]
    assert files
    missing = [str(file) for file in files if file.name != "__init__.py" and str(file) not in page]
    assert not missing


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
