"""The licence, the locked versions and the commands of the house are what they say they are."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tomllib
from pathlib import Path


def names(requirements: list[str]) -> set[str]:
    """The distribution names in requirement lines, normalised."""
    return {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0]).lower() for line in requirements}  # type: ignore[index]


def test_the_licence_is_apache_2_in_full(repository: Path) -> None:
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"


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


def test_ci_runs_the_test_command_of_the_readme(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme


def test_scripts_parse(repository: Path) -> None:
    for script in (".ci/run", "tests/containers/run.sh", *(repository / "scripts").glob("*.sh")):
        subprocess.run(["bash", "-n", script], cwd=repository, check=True, timeout=10)
