"""The environment of a child process, in which Python finds this very package."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["child_environ"]


def child_environ() -> dict[str, str]:
    """Return our environment; for a checkout that is not installed, with its folder on the path."""
    environ = dict(os.environ)
    root = Path(__file__).resolve().parents[1]
    if root.name == "kvrelay" and (root / "cli.py").exists():  # not through a checkout's link
        root = root.parent
    if "site-packages" not in root.parts:
        paths = (str(root), environ.get("PYTHONPATH"))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environ
