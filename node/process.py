"""Processes of kvrelay: how they start, log, end with their parent, and report a crash."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import queue
import re
import resource
import signal
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, get_args

from kvrelay.wire.config_checks import LogFormat, require
from kvrelay.wire.errors import ConfigError, KvrelayError
from kvrelay.wire.log_lines import JsonLines, formatter

__all__ = [
    "LOG_FORMAT",
    "PARENT_PID",
    "LogThread",
    "crash_report",
    "describe_exit",
    "die_with_parent",
    "exit_now",
    "flush_log",
    "freeze_imports",
    "log_to_stderr",
    "open_log",
    "private_folder",
    "python_command",
    "raise_file_limit",
    "set_log_process",
]

PARENT_PID = "KVRELAY_PARENT_PID"
LOG_FORMAT = "KVRELAY_LOG_FORMAT"
MAX_QUEUED_LINES = 10_000
# The kernel's default hard limit. Some systems allow 2**30, and libraries loop over all.
_MAX_OPEN_FILES = 1 << 20
_PR_SET_PDEATHSIG = 1
_PRIVATE = 0o700
_STDERR = 2
_BATCH_S = 0.01  # a wake-up for each line would cost more than the line
_FLUSH_POLL_S = 0.001
_FLUSH_DEADLINE_S = 1.0
# torch (AcceleratorError and NCCL), our own runtime calls, Triton's launcher, cuBLAS.
_GPU_FAILURE = re.compile(
    r"CUDA error|\bcuda[A-Z]\w+ failed|Triton Error \[CUDA\]|CUBLAS_STATUS_\w+", re.IGNORECASE
)


def python_command(module: str, *flags: str) -> list[str]:
    """Return the command that runs `main` of a module, which must call `freeze_imports`.

    Garbage collection among torch's half million objects took 0.3 s of the start.
    """
    code = f"import gc; gc.disable(); from {module} import main; main()"
    # With -P nothing is imported from the working directory.
    return [sys.executable, "-P", *flags, "-c", code]


def freeze_imports() -> None:
    gc.freeze()
    gc.enable()


def raise_file_limit() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, if PARENT_PID is set."""
    parent = os.environ.pop(PARENT_PID, None)  # or our own children would compare it, too
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the call above
        os._exit(1)


def crash_report(why: BaseException) -> str:
    """Return one sentence on why this process ends; a CUDA error among the causes comes first."""
    if isinstance(why, KvrelayError):
        return why.message
    cause: BaseException | None = why
    failure = None
    while cause is not None:
        if _GPU_FAILURE.search(str(cause)):
            failure = _first_line(cause)
        cause = cause.__cause__ or cause.__context__
    if failure is None:
        return _first_line(why)
    return (
        f"the GPU has failed in this process ({failure}); only a new process can use it again, "
        f"so this one ends"
    )


def _first_line(why: BaseException) -> str:
    return str(why).partition("\n")[0].strip() or type(why).__name__


def describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:  # only the kernel kills a process that we have not given up
        return "killed, probably out of memory"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def exit_now(code: int) -> NoReturn:
    """End the process without teardown, which may wait for a failed GPU forever."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def log_to_stderr(process: str, log_format: str = "", worker: int | None = None) -> None:
    """Log from INFO on, on a thread. Raises ConfigError. An empty format is the parent's."""
    log_format = log_format or os.environ.get(LOG_FORMAT) or "text"
    known = get_args(LogFormat)
    require(log_format in known, f"log_format {log_format!r} is not one of {', '.join(known)}")
    os.environ[LOG_FORMAT] = log_format
    handler = LogThread(_STDERR)
    handler.setFormatter(formatter(log_format, process, worker))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def set_log_process(process: str) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines):
            handler.setFormatter(formatter("json", process))


def flush_log() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()


class LogThread(logging.Handler):
    """A log handler whose callers never wait: a thread writes to a file descriptor.

    Lines that find MAX_QUEUED_LINES before them are dropped and counted.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        # Not a Queue: a finaliser that logs while its lock is held would wait for itself.
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._dropped = self._queued = self._written = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  a template that does not fit its values
            self.handleError(record)
            return
        if self._lines.qsize() >= MAX_QUEUED_LINES:
            self._dropped += 1
            return
        self._queued += 1
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until all lines queued by now are written, a second at most."""
        queued, until = self._queued, time.monotonic() + _FLUSH_DEADLINE_S
        while self._written < queued and time.monotonic() < until:
            time.sleep(_FLUSH_POLL_S)

    def _run(self) -> None:
        while True:
            lines = [self._lines.get()]
            lines += [self._lines.get() for _ in range(self._lines.qsize())]
            self._write(lines)
            self._written += len(lines)
            time.sleep(_BATCH_S)

    def _write(self, lines: list[str]) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            left_out = f"{dropped} lines of this log are left out: nobody took it for a while"
            lines = [*lines, left_out]
        rest = memoryview("".join([f"{line}\n" for line in lines]).encode(errors="replace"))
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


def private_folder(folder: Path) -> None:
    """Make a folder for logs that no other user may enter, or close one that has only logs.

    Raises ConfigError for any other folder.
    """
    try:
        for each in reversed((folder, *folder.parents)):
            each.mkdir(mode=_PRIVATE, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & 0o077:
            return
        if any(each.suffix != ".log" for each in folder.iterdir()):
            raise ConfigError(
                f"log_dir {folder} may be opened by others (mode {mode:04o}) and has more than "
                f"logs in it; name a folder in it that is not there yet, or close it (chmod 700)"
            )
        folder.chmod(_PRIVATE)
    except OSError as why:
        raise ConfigError(f"cannot make log_dir {folder}: {why.strerror or why}") from why


def open_log(path: Path) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not of /dev/null, which is everybody's
        os.fchmod(descriptor, 0o600)
    return descriptor
