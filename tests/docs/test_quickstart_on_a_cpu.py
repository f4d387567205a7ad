"""docs/quickstart/cpu.md and the README do what they say: their blocks run, with another port and
this interpreter.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documents import DOCS, ROOT, Block, blocks

from tests.commands import output_of

pytestmark = [pytest.mark.cluster, pytest.mark.model]

START_DEADLINE_S = 300.0

PAGE = DOCS / "quickstart" / "cpu.md"

Run = Callable[..., str]


def block(name: str, page: Path = PAGE) -> Block:
    return next(each for each in blocks(page) if (each.kind, each.name) == ("run", name))


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }


def as_script(text: str, url: str) -> str:
    """A block for the shell, of this interpreter's `kvrelay` and the cluster at `url`."""
    text = text.replace("http://127.0.0.1:8000", url)
    for command, flags in (
        ("up", "--port 0"),
        ("chat", f"--url {url}"),
    ):
        text = text.replace(
            f".venv/bin/kvrelay {command}", f"{sys.executable} -m kvrelay.cli {command} {flags}"
        )
    assert ".venv/bin/kvrelay" not in text
    return text


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The router of the cluster that the page starts."""
    folder = tmp_path_factory.mktemp("quickstart")
    said = folder / "up.log"
    script = as_script(block("start").text, "").strip()
    with said.open("w") as out:
        up = subprocess.Popen(
            ["bash", "-c", f"exec {script}"],
            stdout=out,
            stderr=out,
            cwd=folder,
            env=environment() | {"COLUMNS": "200"},
        )
    try:
        end = time.monotonic() + START_DEADLINE_S
        while not (
            found := re.search(r"kvrelay is ready: (http://127\.0\.0\.1:\d+)", said.read_text())
        ):
            assert up.poll() is None, said.read_text()
            assert time.monotonic() < end, said.read_text()
            time.sleep(0.1)
        yield found[1]
        assert "WARNING" not in said.read_text()
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)


@pytest.fixture
def run(url: str, tmp_path: Path) -> Run:
    """Run a block of the page, or of another one, to its end: what it prints."""

    def run_block(name: str, page: Path = PAGE) -> str:
        found = block(name, page)
        program = (
            [sys.executable, "-c"]
            if found.language == "python"
            else ["bash", "-euo", "pipefail", "-c"]
        )
        text = (
            found.text.replace("http://127.0.0.1:8000", url)
            if found.language == "python"
            else as_script(found.text, url)
        )
        return output_of(*program, text, cwd=tmp_path, env=environment())

    return run_block


@pytest.mark.parametrize("page", [PAGE, ROOT / "README.md"], ids=lambda page: page.stem)
def test_curl_gets_a_stream(page: Path, run: Run) -> None:
    said = run("curl", page)
    assert said.count('"content":"') >= 2
    assert said.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("page", [PAGE, ROOT / "README.md"], ids=lambda page: page.stem)
def test_the_client_of_openai_gets_an_answer(page: Path, run: Run) -> None:
    assert len(run("openai", page)) > 3


def test_the_terminal_gets_an_answer(run: Run) -> None:
    assert len(run("chat")) > 3


def test_an_answer_tells_its_stages(run: Run) -> None:
    stages = json.loads(run("stages"))["kvrelay"]
    assert stages["total_ms"] > stages["decode_ms"] > 0
    assert "transfer_ms" in stages
