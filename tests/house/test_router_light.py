"""The router and the command line are light: they start without torch and all that comes with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.commands import output_of

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
    "paged_engine",
    "kernels",
}
_WALK = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
walk = pkgutil.iter_modules if package.__name__ == "kvrelay" else pkgutil.walk_packages
for module in walk(package.__path__, package.__name__ + "."):
    if not (module.ispkg and walk is pkgutil.iter_modules) and not module.name.endswith(("__main__", ".profile")):
        importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("package", ["kvrelay.wire", "kvrelay.router", "kvrelay"])
def test_importing_all_of_it_loads_nothing_heavy(package: str, repository: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(repository)}
    told = output_of(sys.executable, "-P", "-c", _WALK, package, env=env)
    loaded = json.loads(told.splitlines()[-1])
    assert not {name.removeprefix("kvrelay.").partition(".")[0] for name in loaded} & HEAVY
