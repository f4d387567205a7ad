"""Versions and completion on the command line: they work where there is no torch, and in the shells
themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay import cli
from kvrelay.machine import installed
from kvrelay.wire.versions import HANDOVER, LEGS, RELEASE

DRIVER = (
    "NVRM version: NVIDIA UNIX {} Kernel Module  {}  Wed Jan  1 00:00:00 UTC 2025\nGCC "
    "version: gcc 12.3.0\n"
)


def test_the_version_alone_and_with_all_that_matters_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["version"]) == 0
    assert capsys.readouterr().out == f"kvrelay  {RELEASE}\n"
    assert cli.run(["version", "--verbose", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kvrelay"] == RELEASE
    assert (told["handover protocol"], told["leg protocol"]) == (str(HANDOVER), str(LEGS))
    assert {"python", "torch", "cuda", "driver", "nixl", "nccl", "triton"} <= set(told)
    assert cli.run(["version", "-v"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == list(told)


@pytest.mark.parametrize("name", ["x86_64", "Open"])
def test_the_driver_says_its_version(name: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(DRIVER.format(name, "580.95.05"))
    assert installed(tmp_path / "version")["driver"] == "580.95.05"
    assert installed(tmp_path / "nothing")["driver"] is None


def test_versions_need_neither_torch_nor_what_it_brings(repository: Path) -> None:
    """In an interpreter that finds no package but those of the router."""
    script = """
import importlib.metadata, importlib.util, sys
absent = {"torch", "triton", "nixl", "tokenizers", "llguidance"}
version, find_spec = importlib.metadata.version, importlib.util.find_spec
def no_version(name):
    if name.partition("-")[0] in absent | {"nvidia"}:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = no_version
importlib.util.find_spec = lambda name, *rest: None if name in absent else find_spec(name, *rest)
from kvrelay.cli import run
code = run(["version", "--verbose", "--json"])
assert not absent & set(sys.modules)
sys.exit(code)
"""
    env = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [told[name] for name in ("torch", "cuda", "nccl", "nixl", "triton")] == [None] * 5
