"""What modules share: a cluster of the embedded model, and an environment for clients that want
other libraries.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import (
    EMBEDDED_KEY,
    SMALL_LEASE_S,
    SMALL_LONGEST_BODY,
    Cluster,
    running,
    tiny_model,
)

from kvrelay.machine import embedded_model

INSTALL_DEADLINE_S = 500.0
CLIENTS = Path(__file__).parents[1] / "clients"


def install(folder: Path, wanted: Path, *commands: list[str]) -> None:
    """Run these commands, unless they have run already for what the file `wanted` says."""
    stamp, digest = folder / "installed", hashlib.sha256(wanted.read_bytes()).hexdigest()
    with wanted.open() as door:
        fcntl.flock(door, fcntl.LOCK_EX)  # tests may run in several processes
        if not stamp.exists() or stamp.read_text() != digest:
            for command in commands:
                subprocess.run(command, check=True, timeout=INSTALL_DEADLINE_S, cwd=wanted.parent)
            stamp.write_text(digest)


@pytest.fixture(scope="session")
def clients(repository: Path) -> Path:
    """The folder of its commands. Who asks first installs tests/clients/requirements.txt: a few
    seconds.
    """
    requirements, folder = CLIENTS / "requirements.txt", repository / ".venv-clients"
    create = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
    # Pinned as a whole: to resolve what these libraries want of each other takes pip a quarter of
    # an hour.
    fill = [str(repository / "scripts" / "install.sh"), sys.prefix, str(folder), "-q", "--no-deps"]
    install(folder, requirements, create, [*fill, "-r", str(requirements)])
    return folder / "bin"


@pytest.fixture(scope="session")
def node_clients() -> str:
    """Find the command `node`. Who asks first installs tests/clients/package-lock.json: a few
    seconds.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("no node and npm here: the clients of npm cannot run")
    install(
        CLIENTS / "node_modules",
        CLIENTS / "package-lock.json",
        [npm, "ci", "--ignore-scripts", "--no-audit"],
    )
    return node


@pytest.fixture
def nothing_is_lost(cluster: Cluster) -> Iterator[None]:
    """Check that a test leaves all blocks of its module's cluster free, sooner than a lease ends."""
    yield
    cluster.all_blocks_free()


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1P1D of the embedded model, for modules whose clients change nothing of it. Both nodes
    propose tokens, which must make no difference to any answer.
    """
    model = str(embedded_model())
    flags = ["--model", model, "--cpu", "--threads=1", "--kv-cache-memory-bytes", str(128 << 20)]
    flags += ["--speculative-config", '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}']
    folder, router_flags = tmp_path_factory.mktemp("embedded"), ["--api-key", EMBEDDED_KEY]
    with running(folder, flags=flags, router_flags=router_flags) as ours:
        yield ours
        ours.all_blocks_free()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1P1D of a tiny model, for modules whose clients change nothing of it. Its decode node
    proposes tokens, which must make no difference to any answer.
    """
    folder = tmp_path_factory.mktemp("small")
    flags = tiny_model(folder, kv_mib=16)
    flags += f"--lease-s {SMALL_LEASE_S} --heartbeat-s 0.4".split()
    decode_flags = [
        "--speculative-config",
        '{"num_speculative_tokens": 4, "prompt_lookup_min": 1}',
        "--max-body-bytes",
        str(SMALL_LONGEST_BODY),
    ]
    with running(folder, flags=flags, decode_flags=decode_flags) as ours:
        yield ours
        ours.all_blocks_free()
