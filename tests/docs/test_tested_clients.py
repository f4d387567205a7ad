"""The table of tested clients in docs/guides/clients.md has the versions that are installed for
them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path


def pins(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", file.read_text(), re.MULTILINE))


def test_the_table_has_the_versions_that_are_tested(repository: Path) -> None:
    clients = repository / "tests" / "clients"
    python = pins(repository / "constraints.txt"), pins(clients / "requirements.txt")
    npm = json.loads((clients / "package.json").read_text())["dependencies"]
    page = (repository / "docs" / "guides" / "clients.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (npm: )?(`.*?`) \| (\d\S+(?:, \S+)*) \|", page, re.MULTILINE)
    scripts = [*clients.glob("*_client.py"), *clients.glob("*_client.mjs")]
    assert len(rows) == len(scripts) > 0
    for of_npm, cell, versions in rows:
        names = re.findall("`(.+?)`", cell)
        installed = [
            each[name] for name in names for each in ((npm,) if of_npm else python) if name in each
        ]
        assert versions.split(", ") == installed, cell


def test_the_lock_of_npm_names_no_registry(repository: Path) -> None:
    """Whoever installs uses their own; what comes must have the sums that are locked."""
    packages = json.loads((repository / "tests" / "clients" / "package-lock.json").read_text())[
        "packages"
    ]
    del packages[""]
    assert packages
    assert all(
        "resolved" not in package and "integrity" in package for package in packages.values()
    )
