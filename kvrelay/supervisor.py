"""Child processes: started, watched, started again with back-off, and ended without an orphan."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvrelay.node.process import PARENT_PID, describe_exit, open_log
from kvrelay.wire.errors import KvrelayError

__all__ = ["Backoff", "Child", "ChildFailed", "ChildSpec", "Supervisor", "until_stopped"]

_TICK_S = 0.1
_TAIL_LINES = 15
_SHOWN_LINES = 5
_NOTABLE = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^Traceback ")


class ChildFailed(KvrelayError):
    """A child ended, or did not get healthy, before it had been ready once."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child's command, and the address where it answers when it is ready.

    Without a `log` it writes to this process's own.
    """

    name: str
    command: tuple[str, ...]
    health_url: str
    log: Path | None
    env: Mapping[str, str] = field(repr=False)


@dataclass(slots=True)
class Backoff:
    """A wait before a child is started again: it doubles, until a life was long enough."""

    first_s: float = 0.5
    longest_s: float = 30.0
    reset_after_s: float = 60.0
    _next_s: float = 0.0

    def delay_s(self, lived_s: float) -> float:
        if lived_s >= self.reset_after_s or self._next_s == 0:
            self._next_s = self.first_s
        delay = self._next_s
        self._next_s = min(2 * delay, self.longest_s)
        return delay


@dataclass(slots=True)
class Child:
    """A supervised process; `ready` resolves when it was healthy once, or to why it never was."""

    spec: ChildSpec
    ready: asyncio.Future[float]
    """Seconds from its start to its first good health answer."""
    _offset: int = 0
    """Bytes of its log that were looked at, or that an earlier run has left."""
    backoff: Backoff = field(default_factory=Backoff)
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    given_up: bool = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def spawn(self) -> None:
        """Start the process in its own group, so that a terminal's Ctrl-C does not reach it.

        On the main thread: Linux reports the parent's death when the starting *thread* ends.
        """
        self.started_at, self.given_up = time.monotonic(), False
        with contextlib.ExitStack() as opened:
            log = None
            if self.spec.log is not None:
                log = opened.enter_context(os.fdopen(open_log(self.spec.log), "ab"))
            self.process = subprocess.Popen(
                self.spec.command,
                env={**self.spec.env, PARENT_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def new_lines(self) -> list[str]:
        if self.spec.log is None:
            return []
        with self.spec.log.open("rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace").splitlines()

    def ended(self) -> bool:
        """Return whether it has ended; if so, reap it and kill the rest of its process group."""
        if self.process is None or not self.running:
            return True
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.kill()
        self.process.wait()
        return True

    def kill(self) -> None:
        if self.process is not None and self.running:
            os.killpg(self.process.pid, signal.SIGKILL)

    def give_up(self) -> None:
        self.given_up = True
        self.kill()

    @property
    def fate(self) -> str:
        code = self.process.returncode if self.process else None
        if code is None:
            return "is running"
        return "was killed" if self.given_up else f"ended ({describe_exit(code)})"


class Supervisor:
    """A supervisor that keeps children alive between `async with` and its end.

    `healthy` says whether a child is ready; `say` shows a line to the user; `began` and `ended` are
    told of each process.
    """

    def __init__(
        self,
        healthy: Callable[[ChildSpec], Awaitable[bool]],
        say: Callable[[str], None],
        start_deadline_s: float = 600.0,
        stop_deadline_s: float = 45.0,
        began: Callable[[Child], None] = lambda _: None,
        ended: Callable[[Child], None] = lambda _: None,
    ) -> None:
        self._healthy, self._say, self._began, self._ended = healthy, say, began, ended
        self._start_deadline_s, self._stop_deadline_s = start_deadline_s, stop_deadline_s
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self, spec: ChildSpec) -> Child:
        """Start a child and keep it alive. Its `ready` raises ChildFailed."""
        old = spec.log.stat().st_size if spec.log and spec.log.exists() else 0
        child = Child(spec, asyncio.get_running_loop().create_future(), old)
        child.spawn()
        self._began(child)
        self._children.append(child)
        self._tasks.append(asyncio.create_task(self._keep(child), name=f"keep {spec.name}"))
        return child

    async def watch(self) -> None:
        """Wait for ever. Raises what ended the care for a child."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Send SIGTERM to all, SIGKILL to what is left at the deadline, and wait for all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self._children:
            if child.process is not None and child.running:
                child.process.terminate()
        deadline = time.monotonic() + self._stop_deadline_s
        while left := [child for child in self._children if not child.ended()]:
            if time.monotonic() >= deadline:
                names = ", ".join(child.spec.name for child in left)
                self._say(f"killing {names}: not stopped {self._stop_deadline_s:g} s after SIGTERM")
                for child in left:
                    child.kill()
                deadline += self._stop_deadline_s
            await asyncio.sleep(_TICK_S / 2)

    async def _keep(self, child: Child) -> None:
        while True:
            try:
                await self._live(child)
                self._ended(child)
                if not child.ready.done():
                    child.ready.set_exception(ChildFailed(_cause_of(child)))
                    return
                lived_s = time.monotonic() - child.started_at
                delay_s = child.backoff.delay_s(lived_s)
                self._say(
                    f"{child.spec.name} {child.fate} after {lived_s:.1f} s; starting it again in "
                    f"{delay_s:g} s"
                )
                await asyncio.sleep(delay_s)
                child.spawn()
                self._began(child)
            except OSError as why:  # no more processes or files, a full disk: that passes
                delay_s = child.backoff.delay_s(0.0)
                with contextlib.suppress(OSError):
                    self._say(
                        f"{child.spec.name} cannot be kept running ({why}); trying again in "
                        f"{delay_s:g} s"
                    )
                await asyncio.sleep(delay_s)

    async def _live(self, child: Child) -> None:
        probe = asyncio.create_task(self._until_healthy(child))
        try:
            while not child.ended():
                self._show_warnings(child)
                await asyncio.sleep(_TICK_S)
            self._show_warnings(child)
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    async def _until_healthy(self, child: Child) -> None:
        try:
            async with asyncio.timeout(self._start_deadline_s):
                while not await self._healthy(child.spec):
                    await asyncio.sleep(_TICK_S)
        except TimeoutError:
            self._say(
                f"{child.spec.name} is not healthy after {self._start_deadline_s:g} s; killing it"
            )
            child.give_up()
            return
        took_s = time.monotonic() - child.started_at
        if child.ready.done():
            self._say(f"{child.spec.name} is ready again after {took_s:.1f} s")
        else:
            child.ready.set_result(took_s)

    def _show_warnings(self, child: Child) -> None:
        notable = [line for line in child.new_lines() if _NOTABLE.search(line)]
        for line in notable[:_SHOWN_LINES]:
            self._say(f"[{child.spec.name}] {line}")
        if len(notable) > _SHOWN_LINES:
            self._say(
                f"[{child.spec.name}] {len(notable) - _SHOWN_LINES} more warnings in "
                f"{child.spec.log}"
            )


def _cause_of(child: Child) -> str:
    fate, log = f"{child.spec.name} {child.fate} before it was ready", child.spec.log
    if log is None:
        return f"{fate}; the lines above say why"
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] or ["(its log is empty)"]
    return f"{fate}; the end of {log}:\n" + "\n".join(f"    {line}" for line in lines)


async def until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run work until its end, or until SIGINT, SIGTERM or SIGHUP; then cancel it and wait."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    working = asyncio.create_task(work)
    tasks = working, asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not working.cancelled():
        working.result()  # raises also why its end failed
