"""`kvrelay prefetch`: files are brought and found whole, or it is said why not."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from process_state import TINY

from kvrelay import cli

CONFIG = json.dumps(TINY).encode()
_HEADER = json.dumps(
    {"__metadata__": {}, "w": {"dtype": "F32", "shape": [25_000], "data_offsets": [0, 100_000]}}
)
WEIGHTS = struct.pack("<Q", len(_HEADER)) + _HEADER.encode() + bytes(100_000)
FILES = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}


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
