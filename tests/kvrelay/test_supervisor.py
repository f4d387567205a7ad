"""Children are kept alive, their end is told, and none is left whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from process_state import alive

from kvrelay.supervisor import Backoff, Child, ChildFailed, ChildSpec, Supervisor, until_stopped

_SLEEP = "import time; time.sleep(60)"
_STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', "
    "flush=True); time.sleep(60)"
)
_WITH_CHILD = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, "
    "flush=True); time.sleep(60)"
)


def child_spec(tmp_path: Path, code: str, name: str = "child") -> ChildSpec:
    return ChildSpec(
        name,
        (sys.executable, "-c", code),
        "http://unused",
        tmp_path / f"{name}.log",
        dict(os.environ),
    )


async def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)


def pid_of(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


async def healthy(_: ChildSpec) -> bool:
    return True


def test_backoff_doubles_to_its_limit_and_starts_anew_after_a_long_life() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.delay_s(61) == 0.5
    assert backoff.delay_s(1) == 1


async def test_a_dead_child_is_started_again_and_that_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    async with Supervisor(healthy, said.append) as supervisor:
        child = supervisor.start(child_spec(tmp_path, _SLEEP, "decode-0"))
        await child.ready
        first = pid_of(child)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of(child) != first and any("ready again" in line for line in said))
        second = pid_of(child)
        assert alive(second)
    assert not alive(second)
    assert said[0].startswith("decode-0 ended (killed, probably out of memory) after")
    assert said[0].endswith("starting it again in 0.5 s")


async def test_a_child_that_cannot_be_started_again_is_tried_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    spawn, failures = Child.spawn, 2

    def refused(self: Child) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise BlockingIOError("Resource temporarily unavailable")
        spawn(self)

    async with Supervisor(healthy, said.append) as supervisor:
        child = supervisor.start(child_spec(tmp_path, _SLEEP))
        child.backoff.longest_s = 0.5
        await child.ready
        first = pid_of(child)
        monkeypatch.setattr(Child, "spawn", refused)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of(child) != first and any("ready again" in line for line in said))
    assert (
        sum("cannot be kept running (Resource temporarily unavailable)" in line for line in said)
        == 2
    )


@pytest.mark.parametrize(
    ("code", "deadline_s", "told"),
    [
        ("raise SystemExit('no such model')", 60.0, ["ended (exit code 1)", "no such model"]),
        (_SLEEP, 0.3, ["was killed", "its log is empty"]),
    ],
)
async def test_a_child_that_is_not_ready_in_time_is_told_with_the_end_of_its_log(
    code: str, deadline_s: float, told: list[str], tmp_path: Path
) -> None:
    async def never(_: ChildSpec) -> bool:
        return False

    async with Supervisor(never, lambda line: None, deadline_s) as supervisor:
        child = supervisor.start(child_spec(tmp_path, code, "prefill-0"))
        with pytest.raises(ChildFailed) as caught:
            await child.ready
    assert f"prefill-0 {told[0]} before it was ready" in caught.value.message
    assert told[1] in caught.value.message


async def test_a_child_deaf_to_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    said: list[str] = []
    async with Supervisor(healthy, said.append, stop_deadline_s=0.3) as supervisor:
        child = supervisor.start(child_spec(tmp_path, _STUBBORN))
        await until(lambda: "deaf" in child.spec.log.read_text())
    assert not alive(pid_of(child))
    assert "killing child: not stopped 0.3 s after SIGTERM" in said


async def test_what_a_dead_child_left_behind_is_killed_too(tmp_path: Path) -> None:
    async with Supervisor(healthy, lambda line: None) as supervisor:
        child = supervisor.start(child_spec(tmp_path, _WITH_CHILD))
        await until(lambda: child.spec.log.read_text().strip())
        grandchild = int(child.spec.log.read_text())
        assert alive(grandchild)
        os.kill(pid_of(child), signal.SIGKILL)
        await until(lambda: not alive(grandchild))


async def test_warnings_in_a_log_are_shown_and_other_lines_are_not(tmp_path: Path) -> None:
    said: list[str] = []
    lines = [
        "INFO all is well",
        "10:00 WARNING slow peer",
        *(f"ERROR number {index}" for index in range(8)),
    ]
    text = "\n".join([*lines, ""]).encode()
    code = f"import os; os.write(1, {text!r}); {_SLEEP}"  # at once, however Python buffers
    async with Supervisor(healthy, said.append) as supervisor:
        supervisor.start(child_spec(tmp_path, code))
        await until(lambda: len(said) >= 6)
    assert said[0] == "[child] 10:00 WARNING slow peer"
    assert said[5] == f"[child] 4 more warnings in {tmp_path / 'child.log'}"


async def test_who_watches_hears_why_a_child_is_no_longer_cared_for(tmp_path: Path) -> None:
    def refuse(line: str) -> None:
        raise UnicodeEncodeError("ascii", line, 0, 1, "ordinal not in range(128)")

    async with Supervisor(healthy, refuse) as supervisor, asyncio.timeout(60):
        child = supervisor.start(child_spec(tmp_path, _SLEEP))
        await child.ready
        os.kill(pid_of(child), signal.SIGKILL)
        with pytest.raises(UnicodeEncodeError):
            await supervisor.watch()


async def test_work_that_is_stopped_ends_first_and_tells_what_went_wrong_at_its_end() -> None:
    async def work(why: BaseException | None) -> None:
        signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(why)
            if why is not None:
                raise why

    ended: list[BaseException | None] = []
    broken = OSError("the terminal is gone")
    try:
        async with asyncio.timeout(60):
            await until_stopped(work(None))
            with pytest.raises(OSError, match="the terminal is gone"):
                await until_stopped(work(broken))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert ended == [None, broken]
