"""What is installed on this machine, for `kvrelay version --verbose`: of each thing that matters
its version.

Looks at files and at what packages say of themselves, and imports none of them, so it works where
torch is missing or broken. What works is `kvrelay doctor`'s to say.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path

from kvrelay.wire.versions import HANDOVER, LEGS, RELEASE

__all__ = ["cuda_of_torch", "installed"]

_PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "pyzmq": ("pyzmq",),
    "msgspec": ("msgspec",),
    "uvloop": ("uvloop",),
    "tokenizers": ("tokenizers",),
    "llguidance": ("llguidance",),
}
"""Names of the distributions that bring it; the first one counts."""
_DRIVER = Path("/proc/driver/nvidia/version")


def installed(driver: Path = _DRIVER) -> dict[str, str | None]:
    """Names and versions, None for what is not there. `driver` is where an NVIDIA driver says its
    own.
    """
    return {
        "kvrelay": RELEASE,
        "handover protocol": str(HANDOVER),
        "leg protocol": str(LEGS),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": _of("torch"),
        "cuda": cuda_of_torch(),
        "driver": _driver(driver),
        **{name: _of(name) for name in _PACKAGES if name != "torch"},
    }


def _of(name: str) -> str | None:
    for distribution in _PACKAGES[name]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cuda_of_torch() -> str | None:
    """Read for which CUDA torch was built, in a file of its own that says so; None for none."""
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec else ():
        try:
            said = Path(folder, "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        found = re.search(r"^cuda\b[^=]*= *['\"](?P<version>[\d.]+)['\"]", said, re.MULTILINE)
        return found["version"] if found else None
    return None


def _driver(path: Path) -> str | None:
    try:
        said = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module[^\n]*?\s(?P<version>\d+(?:\.\d+)+)\s", said)
    return found["version"] if found else None
