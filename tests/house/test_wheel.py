"""A wheel has one top-level name, and all of our code and data."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path


def test_a_wheel_holds_one_package_with_everything(repository: Path, tmp_path: Path) -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=repository, capture_output=True, text=True, check=True)
    names = [name for name in found.stdout.split("\n") if name and (repository / name).exists()]
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
    subprocess.run([*build, "-q", "-w", tmp_path, source], check=True, timeout=120)
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
