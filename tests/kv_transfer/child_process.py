"""A child process that answers calls, for tests that stop and kill it. Speaks JSON lines on its
stdin and stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from pathlib import Path
from typing import Any

from forked import Forked


class ChildProcess:
    """The parent's end."""

    answer_s = 60.0
    """How long an answer may take, unless a call says otherwise."""

    def __init__(self, script: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        root = Path(__file__).parents[2]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self.process = Forked([script, *arguments], environment)

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method there."""
        self.tell(method, *arguments)
        return self.answer(timeout_s)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method there; its answer is fetched later."""
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float | None = None) -> Any:
        within_s = self.answer_s if timeout_s is None else timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(within_s), f"no answer within {within_s} s"
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        """SIGSTOP, and wait until it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        while (
            Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
        ):
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
