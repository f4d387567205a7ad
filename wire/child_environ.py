"""The environment of a child process, in which Python finds this very package."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["child_environ"]


def child_environ() -> dict[str, str]:
    """Return our environment, with a checkout's folder on Python's path."""
    environ = dict(os.environ)
    # Not resolved: a checkout's link kvrelay/wire leads out of the folder kvrelay.
    root = Path(__file__).absolute().parents[2]
    if "site-packages" not in root.parts:
        paths = (str(root), environ.get("PYTHONPATH"))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environ
