"""What a soak test tells in the end: its report, and how it exits."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


def reported(name: str, run: Callable[[Path], dict[str, Any]]) -> int:
    """Run in a new folder and print the report as JSON; 1, and the folder stays, if it is broken.

    `broken` of the report lists what is.
    """
    folder, broken = Path(tempfile.mkdtemp(prefix=f"{name}-")), True
    try:
        report = run(folder)
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
        broken = bool(report["broken"])
    finally:
        print(f"logs: {folder}", file=sys.stderr) if broken else shutil.rmtree(folder)
    return int(broken)
