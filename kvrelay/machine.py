"""What this machine has: cores, GPUs, free ports, and the environment for children. Never imports torch for it."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

from kvrelay.plan import ClusterConfig, Machine
from wire.errors import ConfigError

__all__ = ["check_port", "environ", "this_machine"]

_NVIDIA_SMI_DEADLINE_S = 20.0


def this_machine(config: ClusterConfig) -> Machine:
    """Look at the machine for a cluster of that size. Raises ConfigError if the router's port is taken."""
    with ExitStack() as held:
        # All are held at once, so that no port is found twice.
        wanted = [(config.host, config.port)] + [("127.0.0.1", 0)] * (config.prefill + config.decode)
        ports = tuple(held.enter_context(_bound(*address)).getsockname()[1] for address in wanted)
    gpus = () if config.engine.device == "cpu" else _gpus()
    return Machine(len(os.sched_getaffinity(0)), gpus, ports, environ())


def check_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises ConfigError if nobody can listen there now: before a model is loaded."""
    with _bound(host, port) as held:
        return int(held.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    """A socket that holds a port until it is closed."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
    try:
        held.bind((host, port))
    except OSError as why:
        held.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {why.strerror}; choose another with --port") from why
    return held


def _gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that this process may use, as values for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(str(index) for index in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines())))


def environ() -> dict[str, str]:
    """Our environment, in which children find the packages where we found them: a checkout need not be installed."""
    environ = dict(os.environ)
    root = Path(__file__).resolve().parent.parent
    if "site-packages" not in root.parts:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environ.get("PYTHONPATH"))))
    return environ
