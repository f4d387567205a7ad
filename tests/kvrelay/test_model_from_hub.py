"""A model from the Hub on the command line: downloaded once, before any child, which is given a
path and no token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_state import TINY

sys.path.insert(0, str(Path(__file__).parent.parent / "paged_engine"))
from fake_hub import FakeHub, Repository, fake_hub


def weights(note: str) -> bytes:
    header = json.dumps({"__metadata__": {"note": note}}).encode()
    return len(header).to_bytes(8, "little") + header


FILES = {
    "config.json": json.dumps(TINY).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": weights("new"),
}
# Runs one command with stand-ins behind it, which print what they are started with.
_RUN = """
import json, sys
from pathlib import Path
from types import ModuleType

def stand_in(name, function, run):
    module = sys.modules[name] = ModuleType(name)
    setattr(module, function, run)

def show(config):
    print(json.dumps([config.engine.model, config.engine.revision, config.engine.hf_token, sorted(sys.modules)]))
    return 0

def show_children(config):
    from kvrelay.cluster_plan import Machine, plan
    machine = Machine(2, (), (1, 2, 3), {})
    print(json.dumps([config.node.engine.model, "", "", [word for s in plan(config, machine, Path("/logs"))
                                                    for word in (*s.command, *s.env, *s.env.values())]]))
    return 0

stand_in("kvrelay.node.server", "run", show)
stand_in("kvrelay.node.ranks", "run_ranks", show)
stand_in("kvrelay.cluster", "up", show_children)
from kvrelay.cli import run
code = run(sys.argv[1:])
assert sys.argv[1] != "prefetch" or "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""
COMMANDS = {
    "up": ["--port=0"],
    "serve": ["--port=0"],
    "rank": [
        "--tensor-parallel-size=2",
        "--tensor-parallel-size-local=1",
        "--tensor-parallel-address=127.0.0.1:5000",
    ],
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as server:
        server.repositories["org/Tiny-1B"] = Repository(FILES)
        yield server


def kvrelay(
    hub: FakeHub, home: Path, repository: Path, *words: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line against that Hub, with its cache in `home`."""
    here = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    env = {**os.environ, "PYTHONPATH": str(repository), **here, **more}
    command = [sys.executable, "-P", "-c", _RUN, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_downloads_and_goes_on_with_a_path(
    command: str, hub: FakeHub, tmp_path: Path, repository: Path
) -> None:
    hub.repositories["org/Tiny-1B"] = Repository(FILES, token="a-secret")
    words = [
        command,
        "--model=org/Tiny-1B",
        "--revision=main",
        "--hf-token=a-secret",
        *COMMANDS[command],
    ]
    done = kvrelay(hub, tmp_path, repository, *words)
    assert done.returncode == 0, done.stderr
    path, revision, token, rest = json.loads(done.stdout)
    assert Path(path, "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert (revision, token) == ("", "")
    assert "downloading" in done.stderr
    assert "a-secret" not in done.stdout + done.stderr
    if command == "up":
        assert f"--model={path}" in rest
        assert not [word for word in rest if "hf-token" in word or "revision" in word]


def test_prefetch_tells_a_hub_that_is_down_and_needs_none_for_what_is_downloaded(
    hub: FakeHub, tmp_path: Path, repository: Path
) -> None:
    words = ("prefetch", "org/Tiny-1B", "--json")
    hub.broken = 500
    down = kvrelay(hub, tmp_path, repository, *words)
    assert (down.returncode, down.stdout) == (1, "")
    hub.broken = 0
    done = kvrelay(hub, tmp_path, repository, *words)
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    offline = kvrelay(hub, tmp_path, repository, *words, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, done.stdout)
