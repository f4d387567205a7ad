"""The console's page in a real browser, over fake nodes: the key it wants, what is hostile, what is stopped or lost."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from router_doubles import Call, cluster, decode, event, prefill

from wire.frames import Frame, FrameKind

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=alert(1)>"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt install chromium)"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]


@asynccontextmanager
async def opened() -> AsyncIterator[Any]:
    """A page."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            page = await browser.new_page(reduced_motion="reduce")
            page.set_default_timeout(30_000)
            yield page
        finally:
            await browser.close()


async def test_it_wants_the_admin_key_shows_only_text_and_says_what_was_stopped_or_lost() -> None:
    async def endless(call: Call) -> None:
        await call.send(Frame(FrameKind.TOKENS, event(HOSTILE), [12], 30))
        await d.resume.wait()

    d = decode(endless, model=HOSTILE)
    async with opened() as page:
        alerts: list[str] = []
        page.on("dialog", lambda dialog: alerts.append(dialog.message))
        async with cluster(prefill(model=HOSTILE), d, admin_key="operator") as c:
            await page.goto(f"{c.url}/console")
            dialog = page.get_by_role("dialog", name="Admin key")
            for key in ("wrong", "operator"):
                await dialog.get_by_label("Key").fill(key)
                await dialog.get_by_role("button", name="Use it").click()
                if key == "wrong":
                    await dialog.get_by_text("missing or wrong").wait_for()
            await page.locator("#nodes tbody tr[data-state=up]").nth(1).wait_for()
            assert HOSTILE in await page.locator("#nodes").inner_text()
            await page.reload()  # the key is kept in this tab
            await page.locator("#health[data-state=ok]").wait_for()

            await page.get_by_role("tab", name="Chat").click()
            await page.get_by_label("Message").fill("hello")
            await page.keyboard.press("Enter")
            answer = page.locator(".turn.model .words", has_text=HOSTILE)
            await answer.wait_for()
            await page.get_by_role("button", name="Stop").press("Enter")
            await page.locator(".turn.model .foot", has_text="stopped").wait_for()
            await page.get_by_role("tab", name="Requests").click()
            await page.locator("#log [data-status=odd]", has_text="left").wait_for()
        await page.locator("#notice", has_text="does not answer").wait_for()
        assert await page.locator("#health").get_attribute("data-state") == "lost"
        assert await page.locator("img").count() == 0
        assert not alerts
