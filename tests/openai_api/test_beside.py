"""Where work on a body is done, by the body's size."""

from __future__ import annotations

import asyncio
import threading

from kvrelay.openai_api.json_body import off_loop


async def test_short_bodies_are_worked_on_at_once_and_longer_ones_on_threads() -> None:
    here = threading.get_ident()
    assert await off_loop(16 << 10, threading.get_ident) == here
    assert await off_loop((16 << 10) + 1, threading.get_ident) != here


async def test_very_long_bodies_are_worked_on_one_by_one() -> None:
    at_once, most, lock = 0, 0, threading.Lock()
    done = threading.Event()

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        done.wait(0.02)
        with lock:
            at_once -= 1

    await asyncio.gather(*(off_loop((1 << 20) + 1, work) for _ in range(5)))
    assert most == 1
