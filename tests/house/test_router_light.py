"""The router and the command line are light: they start without torch and all that comes with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "triton",
    "nixl",
    "transformers",
    "tokenizers",
    "numpy",
    "gguf",
    "safetensors",
    "llguidance",
    "kubernetes",
    "paged_engine",
    "kernels",
}
_WALK = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("package", ["wire", "router", "kvrelay"])
def test_importing_all_of_it_loads_nothing_heavy(package: str, repository: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-P", "-c", _WALK, package]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert not loaded & HEAVY


def test_the_router_server_imports_in_a_second_of_cpu_time(repository: Path) -> None:
    """CPU time and not wall time, because others share the cores; measured 0.4 s, so 1 s is generous."""
    code = "import time, router.server; print(time.process_time())"
    env = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1
