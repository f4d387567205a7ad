"""Every dependency is locked, and the scripts of the house are ones."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from pathlib import Path


def names(requirements: list[str]) -> set[str]:
    """The distribution names in requirement lines, normalised."""
    return {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0]).lower() for line in requirements}  # type: ignore[index]


def test_every_dependency_is_locked(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = names(
        [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    )
    lines = [
        line
        for line in (repository / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==(\d+!)?[\w.]+", line) for line in lines), (
        "exact versions without local suffix"
    )
    assert wanted <= names(lines)


def test_scripts_parse(repository: Path) -> None:
    for script in (".ci/run", "tests/containers/run.sh", *(repository / "scripts").glob("*.sh")):
        subprocess.run(["bash", "-n", script], cwd=repository, check=True, timeout=10)
