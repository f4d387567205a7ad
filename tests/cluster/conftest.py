"""An environment of its own for client libraries that want other versions than we do."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL_DEADLINE_S = 500.0


@pytest.fixture(scope="session")
def clients(repository: Path) -> Path:
    """The folder of its commands. Who asks first installs tests/clients/requirements.txt: half a minute."""
    requirements = Path(__file__).parents[1] / "clients" / "requirements.txt"
    folder = repository / ".venv-clients"
    stamp, wanted = folder / "installed", hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_DEADLINE_S)
        # Pinned as a whole: to resolve what these libraries want of each other takes pip a quarter of an hour.
        install = [str(folder / "bin" / "pip"), "install", "-q", "--no-deps", "-r", str(requirements)]
        subprocess.run(install, check=True, timeout=INSTALL_DEADLINE_S)
        stamp.write_text(wanted)
    return folder / "bin"
