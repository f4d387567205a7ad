"""A wheel has one top-level name, and all of our code and data."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

from tests.commands import output_of


def test_a_wheel_holds_one_package_with_everything(repository: Path, tmp_path: Path) -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = output_of(*listed, cwd=repository)
    names = [name for name in found.split("\n") if name and (repository / name).exists()]
    source = tmp_path / "source"
    for name in names:
        if not name.startswith(("tests/", "benchmarks/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, source / name, follow_symlinks=False)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    output_of(*build, "-q", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in packed if ".dist-info" not in name} == {"kvrelay"}
    folders = {link.name for link in (repository / "kvrelay").iterdir() if link.is_symlink()}
    folders.remove("monitoring")
    for name in names:
        folder = name.partition("/")[0]
        if folder in folders:
            assert f"kvrelay/{name}" in packed
        elif folder == "kvrelay" and name.endswith(".py"):
            assert name in packed
    assert "kvrelay/monitoring/prometheus/prometheus.yml" in packed
