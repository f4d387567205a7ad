"""Settings that a running router may change, and the signal that has it read them again.

A configuration that cannot be read, is wrong, or changes a fixed setting changes nothing. Requests
that have begun keep the one before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from collections.abc import Callable

from kvrelay.wire.errors import ConfigError, KvrelayError
from kvrelay.wire.router_config import LIVE, RouterConfig

__all__ = ["Reread", "changes", "reload_on_hangup"]

Reread = Callable[[], RouterConfig]
"""Reads the configuration again, as the process was started: flags over file over defaults. Raises
ConfigError.
"""

_log = logging.getLogger("kvrelay.router")


def changes(old: RouterConfig, new: RouterConfig) -> list[str]:
    """Return the names of settings that differ. Raises ConfigError if some are fixed.

    Also if no API key were left: half a file must not open the router to everybody.
    """
    differ = [
        field.name
        for field in dataclasses.fields(old)
        if getattr(old, field.name) != getattr(new, field.name)
    ]
    fixed = [name for name in differ if name not in LIVE]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)} cannot change while the router runs, so nothing was changed; "
            f"restart it for that, or "
            f"set {'them' if len(fixed) > 1 else 'it'} back"
        )
    if (old.api_key or old.keys) and not (new.api_key or new.keys):
        raise ConfigError(
            "the new configuration has no API keys, and without any the router would answer "
            "everybody, so nothing was "
            "changed and the old keys stay; restart it to serve without keys"
        )
    return differ


def reload_on_hangup(reload: Callable[[], list[str]]) -> None:
    """Reload on SIGHUP, and log the result. Call it on the event loop."""

    def hung_up() -> None:
        try:
            changed = reload()
        except KvrelayError as why:
            _log.error("the configuration is not reloaded: %s", why.message)
        else:
            _log.info(
                "the configuration is reloaded: %s",
                f"new {', '.join(changed)}" if changed else "nothing is new",
            )

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)
