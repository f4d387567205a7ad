"""A package of that name is Hugging Face's, and transformers looks for it; ours is kvrelay.kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SHOW = """
import importlib.util
from kvrelay.kernels import decoder_layer
from transformers.utils import is_kernels_available
print(decoder_layer.__file__, is_kernels_available(), importlib.util.find_spec("kernels").origin)
"""


def start(path: list[Path], code: str = _SHOW) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter whose path begins with these folders."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with a package and a distribution that look like Hugging Face's `kernels`."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("WHOSE = 'theirs'\nfrom kernels.layer import kernelize\n")
    (package / "layer.py").write_text("def kernelize(): ...\n")
    info = tmp_path / "site" / "kernels-0.17.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")
    return package


def test_transformers_does_not_take_the_folder_of_a_checkout_for_a_package(
    repository: Path,
) -> None:
    done = start([repository])
    ours = repository / "kvrelay" / "kernels" / "decoder_layer.py"
    assert done.stdout.split() == [str(ours), "False", "None"], done.stderr


@pytest.mark.parametrize("theirs_first", [True, False])
def test_both_packages_work_side_by_side(
    theirs_first: bool, theirs: Path, repository: Path
) -> None:
    path = [theirs.parent, repository] if theirs_first else [repository, theirs.parent]
    done = start(path)
    ours = repository / "kvrelay" / "kernels" / "decoder_layer.py"
    assert done.stdout.split()[::2] == [str(ours), str(theirs / "__init__.py")], done.stderr
