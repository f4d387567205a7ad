"""The `kernels` trap: transformers looks for a package of that name, and Hugging Face's own hides
ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SHOW = """
import importlib.util, sys
from wire.errors import ConfigError
try:
    import paged_engine
except ConfigError as why:
    sys.exit(f"ConfigError: {why}")
import kernels
print(getattr(kernels, "WHOSE", "ours"), importlib.util.find_spec("kernels.philox").origin)
"""


def start(path: list[Path], code: str = _SHOW) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter whose path begins with these folders."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60
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


def test_our_folder_has_no_init(repository: Path) -> None:
    assert not (repository / "kernels" / "__init__.py").exists()
    assert list((repository / "kernels").glob("*.py"))


def test_our_kernels_are_found_when_nobody_else_has_the_name(repository: Path) -> None:
    done = start([repository])
    assert done.stdout.split() == ["ours", str(repository / "kernels" / "philox.py")], done.stderr


@pytest.mark.parametrize("theirs_first", [True, False])
def test_both_packages_work_side_by_side(
    theirs_first: bool, theirs: Path, repository: Path
) -> None:
    """A regular package wins over a folder without __init__ in either order of the path; ours is
    found all the same.
    """
    path = [theirs.parent, repository] if theirs_first else [repository, theirs.parent]
    done = start(path, _SHOW + "from kernels import kernelize")
    assert done.stdout.split() == ["theirs", str(repository / "kernels" / "philox.py")], done.stderr
    assert done.returncode == 0, done.stderr


def test_transformers_sees_theirs_and_not_ours(theirs: Path, repository: Path) -> None:
    ask = "\nfrom transformers.utils import is_kernels_available\nprint(is_kernels_available())"
    both = start([repository, theirs.parent], _SHOW + ask)
    ours = start([repository], _SHOW + ask)
    assert both.returncode == 0, both.stderr
    assert both.stdout.startswith("theirs")
    assert ours.stdout.splitlines()[-1] == "False", ours.stderr


@pytest.mark.parametrize("broken", ["import no_such_dependency", "raise RuntimeError('too old')"])
def test_a_broken_foreign_package_is_told_in_one_sentence(
    broken: str, theirs: Path, repository: Path
) -> None:
    (theirs / "__init__.py").write_text(broken)
    done = start([repository, theirs.parent])
    assert done.returncode == 1
    assert "another package named kernels" in done.stderr
    assert "pip uninstall kernels" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_node_refuses_to_start_with_that_sentence(theirs: Path, repository: Path) -> None:
    (theirs / "__init__.py").write_text("import no_such_dependency")
    done = start(
        [repository, theirs.parent],
        "import sys; from kvrelay.cli import run; sys.exit(run(['serve', '--model=.', '--port=0']))",
    )
    assert done.returncode == 2
    assert "pip uninstall kernels" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_foreign_module_in_place_of_ours_is_refused(theirs: Path, repository: Path) -> None:
    (theirs / "philox.py").write_text("")
    done = start([repository, theirs.parent])
    assert done.returncode == 1
    assert str(theirs / "philox.py") in done.stderr
    assert "pip uninstall kernels" in done.stderr


def test_a_foreign_file_named_kernels_is_refused(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "kernels.py").write_text("")
    done = start([tmp_path, repository])
    assert done.returncode == 1
    assert "rename it" in done.stderr
