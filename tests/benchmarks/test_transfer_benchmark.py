"""`python -m benchmarks.transfer`: tiny transfers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ["direct", "nixl"] if importlib.util.find_spec("nixl") else ["direct"]


def run(repository: Path, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "benchmarks.transfer", *arguments]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.stderr.count("Traceback"), done.stderr
    return done.returncode, done.stdout.splitlines()[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_for_each_size_and_one_that_grows(kind: str, repository: Path) -> None:
    status, rows = run(
        repository,
        f"--connectors={kind}",
        "--sizes=1,2",
        "--block-bytes=65536",
        "--checksums=1",
    )
    assert status == 0, rows
    assert [row.split()[:5] for row in rows] == [
        [kind, "0.0625", "MiB", size, "MiB"] for size in ("1", "2", "2")
    ]
    assert rows[2].endswith("in 4 chunks")
    assert all(float(row.split()[6]) > 0 for row in rows)
