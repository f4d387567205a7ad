"""Keys that a router or `kvrelay up` draws, and the files in which its own user finds them.

A folder of somebody else, one that others may enter, or a link is neither written to nor read.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from kvrelay.wire.config_checks import is_base_url, is_loopback

__all__ = ["Kind", "drawn_key", "stored_key"]

Kind = Literal["admin", "nodes"]
"""A router's admin routes, or the nodes that `kvrelay up` has started behind it."""

_WITHOUT = MappingProxyType(
    {
        "admin": "the admin routes and the console are closed; start the router with "
        "KVRELAY_ADMIN_KEY",
        "nodes": "our commands cannot ask the nodes; start it with KVRELAY_NODE_API_KEY",
    }
)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAX_BYTES = 256

_log = logging.getLogger("kvrelay.router")


@contextmanager
def drawn_key(kind: Kind, port: int) -> Iterator[str]:
    """Draw a key and keep it in a file for this port during the block; empty without a file."""
    key, name, failures = secrets.token_urlsafe(32), _name(kind, port), list[str]()
    with ExitStack() as opened:
        for path in _folders():
            try:
                with suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                folder = opened.enter_context(_folder(path))
                # systemd-tmpfiles leaves a locked folder alone, however old the files in it are.
                fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
                _write(folder, name, key)
            except OSError as why:
                failures.append(f"{path}: {why.strerror or why}")
                continue
            _log.info("the %s key of port %d is in %s", kind, port, path / name)
            try:
                yield key
            finally:
                with suppress(OSError):  # it is gone, or the folder is
                    if (
                        _read(folder, name) == key
                    ):  # else another router of this port has begun since
                        os.unlink(name, dir_fd=folder)
            return
        _log.warning(
            "no file for the %s key can be written (%s), so %s, or with XDG_RUNTIME_DIR set to a "
            "folder of its user",
            kind,
            "; ".join(failures),
            _WITHOUT[kind],
        )
        yield ""


def stored_key(kind: Kind, router: str) -> str:
    """Return the key that our own router on loopback has drawn, else an empty text."""
    at = urlsplit(router) if is_base_url(router) else None
    if at is None or not is_loopback(at.hostname or ""):
        return ""
    name = _name(kind, at.port or (443 if at.scheme == "https" else 80))
    for path in _folders():
        with suppress(OSError), _folder(path) as folder:
            return _read(folder, name)
    return ""


def _name(kind: Kind, port: int) -> str:
    return f"{kind}-{port}.key"


def _folders() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    temporary = Path(os.environ.get("TMPDIR") or "/tmp", f"kvrelay-{os.geteuid()}")
    return [Path(runtime, "kvrelay"), temporary] if runtime.startswith("/") else [temporary]


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_ours(folder)
        yield folder
    finally:
        os.close(folder)


def _check_ours(opened: int) -> None:
    seen = os.fstat(opened)
    if seen.st_uid != os.geteuid() or seen.st_mode & _OTHERS:
        raise PermissionError(
            f"it belongs to user {seen.st_uid} and has mode {stat.S_IMODE(seen.st_mode):o}, not to "
            f"user {os.geteuid()} with no access for others"
        )


def _write(folder: int, name: str, key: str) -> None:
    part = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(part, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(file, "w") as writing:
            writing.write(f"{key}\n")
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def _read(folder: int, name: str) -> str:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        _check_ours(file)
        return os.read(file, _MAX_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(file)
