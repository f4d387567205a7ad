"""One process of the client by itself: what it says is whole."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import time
from asyncio.subprocess import PIPE

import msgspec
import pytest
from openai_double import paced, serving

from kvrelay.load.records import Asking, Load, ProcessReport, Progress, Share, pack, size_of
from kvrelay.load.sender import Sender
from kvrelay.load.sessions import Arrival, Spelling, Work

DEADLINE_S, UNREAD_S = 60.0, 2.0
PIPE_BYTES = 4096


async def test_a_result_that_is_read_late_is_whole() -> None:
    """More than the pipe holds, and less than what is written without being waited for."""
    async with serving(paced(0, 0)) as double, asyncio.timeout(DEADLINE_S):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "kvrelay.load.sender",
            stdin=PIPE,
            stdout=PIPE,
            limit=PIPE_BYTES // 2,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        fcntl.fcntl(
            process.stdout._transport.get_extra_info("pipe"), fcntl.F_SETPIPE_SZ, PIPE_BYTES
        )  # type: ignore[attr-defined]
        asking = Asking(double.url, "", "double", False, Spelling())
        process.stdin.write(pack(Share(asking, Load(Work(16, 400), Arrival(), "s", 4, 12), 0, 1)))
        process.stdin.write(pack(0.0))
        waiting = asyncio.create_task(process.wait())
        await asyncio.wait(
            {waiting}, timeout=UNREAD_S
        )  # it must not end before all of that is read
        said: Progress | ProcessReport = Progress(0, 0, 0, 0)
        while isinstance(said, Progress):
            size = size_of(await process.stdout.readexactly(4))
            said = msgspec.msgpack.decode(
                await process.stdout.readexactly(size), type=Progress | ProcessReport
            )
        await waiting
    assert len(said.records) == 12
    assert all(record.output_tokens == 400 for record in said.records)


async def test_a_request_that_breaks_the_client_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "half a character")

    load = Load(Work(16, 2), Arrival("constant", 50.0), "s", sending_s=0.1, judged_s=0.1)
    sender = Sender(
        Share(Asking("http://127.0.0.1:9", "", "double", False, Spelling()), load, 0, 1)
    )
    monkeypatch.setattr(sender, "_ask", broken)
    sender.prepare()
    with pytest.raises(UnicodeEncodeError, match="half a character"):
        async with asyncio.timeout(DEADLINE_S):
            await sender.run(0.0)


async def test_a_timer_that_fires_early_makes_no_request_that_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop's do, by up to a millisecond."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(max(0.0, seconds - 0.002)))
    async with serving(paced(0, 0)) as double:
        asking = Asking(double.url, "", "double", False, Spelling())
        load = Load(Work(16, 2), Arrival(), "s", clients=1, requests=4)
        told = await Sender(Share(asking, load, 0, 1)).run(time.monotonic() + 0.05)
    assert len(told.records) == 4
