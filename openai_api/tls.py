"""TLS contexts that read their changed files again, at most once a second.

Unusable files change nothing.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.wire.config import NodeConfig
    from kvrelay.wire.router_config import RouterConfig

__all__ = ["load_chain", "renewed", "server_context"]

_LOOK_S = 1.0

_log = logging.getLogger("kvrelay.http")

_Stamp = list[tuple[int, int, int] | None]


def server_context(config: RouterConfig | NodeConfig) -> ssl.SSLContext | None:
    """Return the context for https, None for http. Raises ConfigError."""
    if not config.ssl_certfile:
        return None

    def make() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_chain(context, config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_cert_reqs:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        return context

    authorities = config.ssl_ca_certs if config.ssl_cert_reqs else ""
    return renewed(
        make,
        {
            "ssl_certfile": config.ssl_certfile,
            "ssl_keyfile": config.ssl_keyfile,
            "ssl_ca_certs": authorities,
        },
    )


def renewed(make: Callable[[], ssl.SSLContext], files: dict[str, str]) -> ssl.SSLContext:
    """Return a context that is made again when a file (by setting) changes. Raises ConfigError."""
    files = {setting: path for setting, path in files.items() if path}
    stamp = _stamp(files.values())
    try:
        made = make()
    except (OSError, ValueError) as why:
        named = " and ".join(f"{setting} {path!r}" for setting, path in files.items())
        raise ConfigError(
            f"{named} cannot be used: {_words(why)}; they must be PEM files, a certificate and its "
            "key must belong together, and the key have no password"
        ) from why
    return _Renewed(made, make, list(files.values()), stamp)


class _Renewed(ssl.SSLContext):
    def __new__(cls, made: ssl.SSLContext, *_: Any) -> _Renewed:
        return super().__new__(cls, made.protocol)

    def __init__(
        self,
        made: ssl.SSLContext,
        make: Callable[[], ssl.SSLContext],
        paths: Sequence[str],
        stamp: _Stamp,
    ) -> None:
        self._made, self._make, self._paths, self._stamp = made, make, paths, stamp
        self._looked_at = time.monotonic()

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        # Event loops begin a connection with this call.
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._look()
        return self._made.wrap_bio(*args, **kwargs)

    def _look(self) -> None:
        stamp = _stamp(self._paths)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        names = ", ".join(self._paths)
        try:
            self._made = self._make()
        except (OSError, ValueError) as why:
            _log.error(
                "%s changed and cannot be used: %s; the certificates from before stay",
                names,
                _words(why),
            )
        else:
            _log.info("%s changed and are used from now on", names)


def load_chain(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    """Give a context its certificate and key. Raises OSError."""
    # Never asks at a terminal for a password.
    context.load_cert_chain(certfile, keyfile or None, password=lambda: "")


def _stamp(paths: Iterable[str]) -> _Stamp:
    return [_file_stamp(path) for path in paths]


def _file_stamp(path: str) -> tuple[int, int, int] | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def _words(why: Exception) -> str:
    return " ".join(str(why).split()) or type(why).__name__
