"""`kvrelay prefetch`: files are brought and found whole, or it is said why not; without torch."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "paged_engine"))
from fake_hub import FakeHub, Repository, fake_hub

from kvrelay import cli

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 100,
}
CONFIG = json.dumps(_CONFIG).encode()
_HEADER = json.dumps(
    {"__metadata__": {}, "w": {"dtype": "F32", "shape": [25_000], "data_offsets": [0, 100_000]}}
)
WEIGHTS = struct.pack("<Q", len(_HEADER)) + _HEADER.encode() + bytes(100_000)
FILES = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
_RUN = """
import sys
from kvrelay.cli import run
code = run(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


def write(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def test_a_folder_that_is_whole_is_told_with_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    (tmp_path / "README.md").write_text("a node reads no such thing")
    assert cli.run(["prefetch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n0.1 MB in 3 files\n"
    assert cli.run(["prefetch", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["bytes"]) == (str(tmp_path), sum(map(len, FILES.values())))
    assert {Path(file).name for file in told["files"]} == set(FILES)


@pytest.mark.parametrize(
    ("name", "content", "code", "said"),
    [
        ("model.safetensors", WEIGHTS[:-1], 1, "is damaged (Error while deserializing header: inc"),
        ("model.safetensors", None, 1, "lacks model.safetensors"),
        (
            "config.json",
            b'{"architectures": ["Mamba"]}',
            2,
            "architecture 'Mamba' is not supported",
        ),
        ("tokenizer.json", None, 2, "holds no tokenizer.json"),
    ],
)
def test_what_is_damaged_is_1_and_what_is_not_served_is_2(
    name: str,
    content: bytes | None,
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    assert cli.run(["prefetch", str(tmp_path)]) == code
    assert said in capsys.readouterr().err


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as server:
        server.repositories["org/Tiny-1B"] = Repository(FILES)
        yield server


def kvrelay(
    hub: FakeHub, home: Path, repository: Path, *words: str, **more: str
) -> subprocess.CompletedProcess[str]:
    here = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        **more,
    }
    env = {**os.environ, "PYTHONPATH": str(repository), **here}
    command = [sys.executable, "-P", "-c", _RUN, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_a_hub_that_is_down_is_1_and_what_is_downloaded_needs_no_hub(
    hub: FakeHub, tmp_path: Path, repository: Path
) -> None:
    hub.broken = 500
    down = kvrelay(hub, tmp_path, repository, "prefetch", "org/Tiny-1B")
    assert (down.returncode, down.stdout) == (1, "")
    hub.broken = 0
    done = kvrelay(hub, tmp_path, repository, "prefetch", "org/Tiny-1B", "--json")
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)["path"]
    assert Path(path, "model.safetensors").read_bytes() == WEIGHTS
    offline = kvrelay(hub, tmp_path, repository, "prefetch", "org/Tiny-1B", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout.splitlines()[0]) == (0, path)
