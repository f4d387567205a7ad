"""Where a process of ours writes its log, and in which form: stderr, as text or JSON. Its children
do the same.

Nobody who logs waits for who takes the log: a thread writes it, and what has no room while a disk
or a pipe is slow is counted and left out. Owns the variable by which children hear of the form. How
a line looks is wire/log_lines.py's.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from typing import get_args

from kvrelay.wire.config_checks import LogFormat, require
from kvrelay.wire.log_lines import JsonLines, formatter

__all__ = ["LOG_FORMAT", "LogThread", "log_as", "log_is_written", "log_to_stderr"]

LOG_FORMAT = "KVRELAY_LOG_FORMAT"
MOST_LINES = 10_000
"""That are kept while nobody takes them."""
_STDERR = 2  # sys.stderr may be something else by now, in a test for one
_BATCH_S = 0.01
"""Lines are written together, at most so often: a wake-up for each would cost more than the line."""
_LOOK_S = 0.001
_END_S = 1.0
"""The last lines may take this long."""


def log_to_stderr(process: str, log_format: str = "", worker: int | None = None) -> None:
    """Log from INFO on. `log_format` empty: as the parent process does, or as text. Raises
    ConfigError.

    `worker`: the number of one of several processes that do the same.
    """
    log_format = log_format or os.environ.get(LOG_FORMAT) or "text"
    known = get_args(LogFormat)
    require(log_format in known, f"log_format {log_format!r} is not one of {', '.join(known)}")
    os.environ[LOG_FORMAT] = log_format
    handler = LogThread(_STDERR)
    handler.setFormatter(formatter(log_format, process, worker))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def log_as(process: str) -> None:
    """From now on lines that name their process say this."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines):
            handler.setFormatter(formatter("json", process))


def log_is_written() -> None:
    """Wait until it is, a second at most: for who is about to be ended by somebody else."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class LogThread(logging.Handler):
    """Writes lines to a file, on a thread of its own. `flush`, and so the end of the process, waits
    for it a little.

    Not by way of sys.stderr: who holds its lock in a write that does not end would hold up the end
    of the process.
    """

    def __init__(self, number: int) -> None:
        """`number`: of the open file."""
        super().__init__()
        self._number = number
        self._lines: collections.deque[str] = collections.deque()
        self._lost = self._taken = self._over = 0
        """Lines that were left out; that were taken, and of these that were written."""
        self._news = threading.Event()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Takes microseconds, whoever reads the log."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  as logging does with a template that does not fit its values
            self.handleError(record)
            return
        if len(self._lines) >= MOST_LINES:
            self._lost += 1
            return
        self._lines.append(line)
        self._taken += 1
        if not self._news.is_set():
            self._news.set()

    def flush(self) -> None:
        """Wait until all is written that was taken by now, a second at most."""
        taken, until = self._taken, time.monotonic() + _END_S
        while self._over < taken and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            self._write()
            time.sleep(_BATCH_S)

    def _write(self) -> None:
        lost, self._lost = self._lost, 0
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        over = self._over + len(lines)
        if lost:
            lines.append(f"{lost} lines of this log are left out: nobody took it for a while")
        rest = memoryview("".join([f"{line}\n" for line in lines]).encode(errors="replace"))
        with contextlib.suppress(OSError):  # nobody will read it any more
            while rest:
                rest = rest[os.write(self._number, rest) :]
        self._over = over
