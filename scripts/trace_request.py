"""Files that one streamed request runs, from POST to last byte, in a cluster of 1P1D.

    python -m scripts.trace_request [--check]

Starts `kvrelay up`, has it answer once, and traces the second answer in all processes
(`scripts/trace/sitecustomize.py`). Files that run as much without a request are left out. With
`--check` it fails if a coroutine of a file ran that ARCHITECTURE.md does not list as the spine, or
more than 60 files did.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 60
_START_S, _ANSWER_S, _TELL_S = 180.0, 60.0, 10.0
_IDLE_S = 6.0  # longer than the period of any loop (router/roles.py: 5 s)


def spine() -> list[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = re.search(r"^## The spine$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section[1], re.MULTILINE) if section else []


def _ask(url: str, model: str) -> None:
    body = {"model": model, "stream": True, "max_tokens": 24}
    body["messages"] = [{"role": "user", "content": f"Count to ten. {time.time()}"}]
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        if b"data: [DONE]" not in answer.read():
            raise SystemExit("the answer did not end")


def _model(url: str) -> str:
    began = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as answer:
                if models := json.load(answer)["data"]:
                    return str(models[0]["id"])
        except (OSError, urllib.error.HTTPError):
            pass
        if time.monotonic() > began + _START_S:
            raise SystemExit(f"no model is served within {_START_S:g} s")
        time.sleep(0.5)


class Tracer:
    """A switch for all traced processes, and what they tell."""

    def __init__(self, folder: Path) -> None:
        self._on, self._to = folder / "on", folder / "told"
        self._to.mkdir()
        self.environ = {
            **os.environ,
            "TRACE_ON": str(self._on),
            "TRACE_TO": str(self._to),
            "TRACE_OF": f"{ROOT}{os.sep}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts" / "trace"), str(ROOT)]),
        }

    def ran_in(self, call: Callable[[], None]) -> dict[str, bool]:
        """Return the files that run during a call, and for each whether a coroutine of it did."""
        for old in self._to.iterdir():
            old.unlink()
        self._on.touch()
        time.sleep(0.2)
        call()
        self._on.unlink()
        time.sleep(_TELL_S / 4)
        found: dict[str, bool] = {}
        for told in self._to.iterdir():
            for line in told.read_text().splitlines():
                name, _, star = line.partition(" ")
                if (ROOT / name).is_file() and not name.startswith(("scripts/", ".venv")):
                    found[name] = found.get(name, False) or bool(star)
        return found


def main() -> int:
    """Trace a request and print its files. Returns 1 if a check fails."""
    parser = argparse.ArgumentParser("scripts.trace_request", description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        tracer = Tracer(Path(folder))
        command = [sys.executable, "-m", "kvrelay", "up", "--prefill=1", "--decode=1"]
        log = Path(folder) / "log"
        with (
            log.open("wb") as said,
            subprocess.Popen(
                [*command, f"--port={port}"], cwd=ROOT, env=tracer.environ, stdout=said, stderr=said
            ) as cluster,
        ):
            try:
                model = _model(url)
                _ask(url, model)
                idle = tracer.ran_in(lambda: time.sleep(_IDLE_S))
                ran = tracer.ran_in(lambda: _ask(url, model))
            finally:
                cluster.terminate()
    listed = spine()
    files = sorted(name for name in ran if name not in idle or name in listed)
    for name in files:
        lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
        mark = "spine" if name in listed else "awaits" if ran[name] else ""
        print(f"{name:44}{lines:>6}  {mark}")
    stray = [name for name in files if ran[name] and name not in listed]
    print(
        f"{len(files)} files ran, {len(listed)} in the spine; awaits elsewhere: {stray or 'none'}"
    )
    return int(check and (bool(stray) or len(files) > MOST_FILES or not listed))


if __name__ == "__main__":
    sys.exit(main())
