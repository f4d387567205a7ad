"""`kvrelay supervise`: one kvrelay command on this machine, started again whenever it fails.

For nodes that are started by hand: what `kvrelay up` does for its own, and systemd, compose or Kubernetes for theirs.
The child writes to our output, gets our signals, and dies with us.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Sequence

from kvrelay.machine import environ
from kvrelay.supervisor import Backoff
from node.last_words import fate_of
from node.parent import PARENT_PID
from wire.errors import ConfigError
from wire.router_config import MAX_DRAIN_S

__all__ = ["supervise"]

WRONG = 2
"""The exit code of a command that was typed wrongly: to start it again is of no use."""
# A node drains for 30 s, and then ends what is left; a router for as long as its settings say.
_STOP_DEADLINE_S = 60.0
_ROUTER_STOP_DEADLINE_S = MAX_DRAIN_S + 30.0
_SERVE = ("prefill", "decode", "serve", "rank", "router")

_log = logging.getLogger("kvrelay.supervise")


def supervise(words: Sequence[str]) -> int:
    """Keep `kvrelay words...` running until a signal ends it; its last exit code.

    It is not started again if it ends with 0, or with 2 at the first start. Raises ConfigError for a command that ends
    by itself, or looks after its processes already.
    """
    if not words or words[0] not in _SERVE:
        raise ConfigError(
            f"supervise keeps {', '.join(_SERVE)} running, not {words[0] if words else 'nothing'!r}; give one of them "
            "with its flags"
        )
    return asyncio.run(_keep([sys.executable, "-P", "-u", "-m", "kvrelay.cli", *words], words[0]))


async def _keep(command: Sequence[str], name: str, backoff: Backoff | None = None) -> int:
    child: Process | None = None
    stopped = asyncio.Event()

    def pass_on(number: signal.Signals) -> None:
        if number is not signal.SIGHUP:
            stopped.set()
        if child is not None and child.returncode is None:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, pass_on, number)
    backoff, first = backoff or Backoff(), True
    while True:
        began = time.monotonic()
        # A group of its own: Ctrl-C reaches it through us, once, and it drains.
        child = await asyncio.create_subprocess_exec(
            *command, process_group=0, env={**environ(), PARENT_PID: str(os.getpid())}
        )
        if stopped.is_set():  # while it was being started
            child.terminate()
        code = await _end_of(child, stopped, _ROUTER_STOP_DEADLINE_S if name == "router" else _STOP_DEADLINE_S)
        if stopped.is_set() or code == 0 or (code == WRONG and first):
            return max(code, 0)
        first = False
        lived_s = time.monotonic() - began
        delay_s = backoff.delay_s(lived_s)
        _log.error("%s ended (%s) after %.1f s; starting it again in %g s", name, fate_of(code), lived_s, delay_s)
        try:
            await asyncio.wait_for(stopped.wait(), delay_s)
        except TimeoutError:
            continue
        return 0


async def _end_of(child: Process, stopped: asyncio.Event, deadline_s: float) -> int:
    """Its exit code; killed if it does not end in time when it is told to."""
    ended, told = asyncio.create_task(child.wait()), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.wait_for(asyncio.shield(ended), deadline_s)
    except TimeoutError:
        _log.error("killing it: it has not ended %g s after it was told to", deadline_s)
        os.killpg(child.pid, signal.SIGKILL)
        return await ended
    finally:
        told.cancel()
