"""Tasks behind a router's requests."""

from __future__ import annotations

import pytest
from router_doubles import until

from kvrelay.router.background import repeat, running_task


async def test_a_look_that_fails_is_told_and_made_again(caplog: pytest.LogCaptureFixture) -> None:
    looks = list[int]()

    async def look() -> None:
        looks.append(1)
        raise ValueError("a mistake")

    async with running_task(repeat(0.001, look)):
        await until(lambda: len(looks) > 2)
    assert "look failed, and is tried again in 0.001 s" in caplog.text
