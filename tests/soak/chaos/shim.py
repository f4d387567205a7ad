"""A library that is preloaded into the processes under test: it moves their wall clocks, and leads
connections through proxies.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Shim"]

_SOURCE = Path(__file__).with_name("shim.c")


class Shim:
    """`there`: whether this machine could build it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._library = folder, folder / "shim.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        argv = [
            compiler or "cc",
            "-O2",
            "-shared",
            "-fPIC",
            "-o",
            str(self._library),
            str(_SOURCE),
            "-ldl",
        ]
        self.there = (
            compiler is not None
            and not subprocess.run(argv, capture_output=True, check=False).returncode
        )

    def environment(self, name: str, links: Mapping[int, int]) -> dict[str, str]:
        """Return the variables of a process; `links`: by a port, that of its proxy."""
        clock = self._clock(name)
        if not clock.exists():
            self.shift(name, 0.0)
        through = ",".join(f"{port}:{proxy}" for port, proxy in links.items())
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(clock), "CHAOS_LINKS": through}

    def shift(self, name: str, seconds: float) -> None:
        """The wall clock of this process is so far from the machine's, from now on."""
        value = struct.pack("=q", int(seconds * 1e9))
        with self._clock(name).open(
            "r+b" if self._clock(name).exists() else "wb", buffering=0
        ) as file:
            file.write(value)

    def _clock(self, name: str) -> Path:
        return self._folder / f"clock-{name.replace(':', '-')}"
