"""Files that no other user may open: a folder for each process, and folders and files for logs.

A process's folder is in kvrelay-UID in the temporary folder, and has a lock that the kernel frees
however the process ends. A folder that can be locked is a dead process's, and the next one that
starts removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from kvrelay.wire.errors import ConfigError

__all__ = ["ProcessFolder", "open_log", "private_folder"]

_FOLDER, _FILE = 0o700, 0o600
_PREFIX = "process-"
# A process that starts at the same time may take a folder for a dead one's before it is locked.
_TRIES = 8

_log = logging.getLogger("kvrelay.node")


class ProcessFolder:
    """A folder of this process at `path` until `close`. Raises ConfigError if there can be none.

    Removes the folders of processes that were killed.
    """

    def __init__(self) -> None:
        usual = parent = Path(tempfile.gettempdir()) / f"kvrelay-{os.geteuid()}"
        try:
            with contextlib.suppress(FileExistsError):
                parent.mkdir(mode=_FOLDER)
            try:
                _make_private(parent)
            except PermissionError as why:  # whoever was first must not keep nodes from starting
                parent = Path(tempfile.mkdtemp(prefix=f"{usual.name}-"))
                _log.warning(
                    "%s; this process uses %s, which the next one does not look for", why, parent
                )
            _remove_dead(parent)
            self.path, self._lock = _made(parent)
            self._ours = self.path if parent == usual else parent
        except OSError as why:
            raise ConfigError(
                f"cannot make a folder in {parent}: {why}; name another place with TMPDIR"
            ) from why

    def close(self) -> None:
        shutil.rmtree(self._ours, ignore_errors=True)
        os.close(self._lock)


def _make_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is somebody else's, or no folder")
    if stat.S_IMODE(found.st_mode) != _FOLDER:
        folder.chmod(_FOLDER)


def _made(parent: Path) -> tuple[Path, int]:
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
        with contextlib.suppress(OSError):
            lock = _locked(path)
            with contextlib.suppress(OSError):
                if path.stat().st_ino == os.fstat(lock).st_ino:
                    return path, lock
            os.close(lock)
    raise FileNotFoundError("all that were made were removed by others")


def _locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # a living one's, or removed by somebody else
            lock = _locked(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def private_folder(folder: Path) -> None:
    """Make a folder for logs that no other user may enter, or close one that has only logs.

    Raises ConfigError for any other folder: closing it may break what is in it.
    """
    try:
        for each in reversed((folder, *folder.parents)):
            each.mkdir(mode=_FOLDER, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & 0o077:
            return
        if any(each.suffix != ".log" for each in folder.iterdir()):
            raise ConfigError(
                f"log_dir {folder} may be opened by others (mode {mode:04o}) and has more than "
                f"logs in it; name a folder in it that is not there yet, or close it (chmod 700)"
            )
        _make_private(folder)
    except OSError as why:
        raise ConfigError(f"cannot make log_dir {folder}: {why.strerror or why}") from why


def open_log(path: Path) -> int:
    """Return a descriptor that appends to a log, which no other user may read from now on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not of /dev/null, which is everybody's
        os.fchmod(descriptor, _FILE)
    return descriptor
