"""What the processes log: through a small pipe each into a file."""

from __future__ import annotations

import fcntl
import os
import selectors
import threading
import time
from collections import Counter
from pathlib import Path

__all__ = ["Logs"]

_PIPE_BYTES = 4096
_READ_BYTES = 1 << 16


class Logs:
    """One thread for all pipes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._files: dict[int, Path] = {}
        self._stalled: Counter[Path] = Counter()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="chaos-logs", daemon=True)
        self._thread.start()

    def pipe(self, log: Path) -> int:
        """The end into which a new process writes; the caller closes it when the process has it."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(ours, False)
        with self._lock:
            self._files[ours] = log
            if not self._stalled[log]:
                self._selector.register(ours, selectors.EVENT_READ)
        return theirs

    def stall(self, log: Path) -> None:
        """Stop reading what goes into this file, until `go_on` has been called as often."""
        with self._lock:
            self._stalled[log] += 1
            if self._stalled[log] == 1:
                for ours in [ours for ours, of in self._files.items() if of == log]:
                    self._selector.unregister(ours)

    def go_on(self, log: Path) -> None:
        with self._lock:
            self._stalled[log] -= 1
            if not self._stalled[log]:
                for ours in [ours for ours, of in self._files.items() if of == log]:
                    self._selector.register(ours, selectors.EVENT_READ)

    def close(self) -> None:
        self._ended = True
        self._thread.join(5)
        for ours in list(self._files):
            os.close(ours)

    def _run(self) -> None:
        while True:
            ended = self._ended
            with self._lock:  # a short wait: who stalls or adds a pipe waits for it
                ready = [key.fd for key, _ in self._selector.select(0)]
                for ours in ready:
                    self._read(ours)
            if not ready:
                if ended:
                    return
                time.sleep(0.02)

    def _read(self, ours: int) -> None:
        try:
            came = os.read(ours, _READ_BYTES)
        except BlockingIOError:
            return
        with self._files[ours].open("ab") as file:
            file.write(came)
        if not came:
            self._selector.unregister(ours)
            os.close(ours)
            del self._files[ours]
