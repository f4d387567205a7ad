"""The console's page in a real browser, over fake nodes: the key it wants, what is hostile, what is
stopped or lost.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from router_doubles import Call, cluster, decode, event, prefill

from kvrelay.router.node_load import UNKNOWN
from kvrelay.router.roles import RolePlanner
from kvrelay.wire.config import Role
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load
from kvrelay.wire.step_costs import TARGET_USED

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
HOSTILE = "<img src=x onerror=alert(1)>"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt install chromium)"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
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


async def test_the_key_in_the_address_is_taken_and_does_not_stay_there() -> None:
    async with opened() as page, cluster(prefill(), decode()) as c:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for way in ("operator", "wrong", "operator"):  # also where the page is open already
            await page.goto(f"{c.url}/console#key={way}")
            if way == "wrong":
                await (
                    page.get_by_role("dialog", name="Admin key")
                    .get_by_text("missing or wrong")
                    .wait_for()
                )
            else:
                await page.locator("#health[data-state=ok]").wait_for()
            assert page.url == f"{c.url}/console#/cluster"
        assert not [url for url in asked if "operator" in url.partition("#")[0]]


async def test_a_node_is_given_another_role_and_the_last_of_a_role_only_if_one_insists() -> None:
    p, other, d = prefill(), prefill(), decode()
    async with opened() as page, cluster(p, other, d) as c:
        await page.goto(f"{c.url}/console#key=operator")
        name = p.url.removeprefix("http://")
        row = page.locator("#nodes tbody tr", has_text=name)
        await row.get_by_role("button", name=f"Make decode: prefill node {name}").press("Enter")
        dialog = page.get_by_role("dialog", name="Make it a decode node?")
        await dialog.get_by_role("button", name="Make it decode").press("Enter")
        await page.locator("#nodes tr[data-state=flipping]", has_text=name).wait_for()
        await row.get_by_role("button", name="Keep prefill").press("Enter")
        await page.locator("#nodes tr[data-state=up]", has_text=name).wait_for()
        assert p.flips_to is None

        await row.get_by_role("button", name="Make decode").press("Enter")
        await dialog.get_by_role("button", name="Make it decode").press("Enter")
        await page.locator("#nodes tr[data-state=flipping]", has_text=name).wait_for()
        p.flipped()
        await page.locator("#flow-decode .node[data-state=up]", has_text=name).wait_for()

        last = other.url.removeprefix("http://")
        await page.get_by_role("button", name=f"Make decode: prefill node {last}").press("Enter")
        await dialog.get_by_role("button", name="Make it decode").press("Enter")
        await dialog.get_by_text("is the last prefill node").wait_for()
        assert other.flips_to is None
        await dialog.get_by_role("button", name="anyway").press("Enter")
        await page.locator("#nodes tr[data-state=flipping]", has_text=last).wait_for()
        assert other.flips_to == "decode"


async def test_loads_limits_and_placements_are_shown() -> None:
    d = decode(load=Load(legs=1, prompt_share=0.25, strictest_tpot_ms=40.0))
    async with opened() as page, cluster(prefill(), d) as c:

        async def last(table: str, title: str) -> str:
            """Return what a table's last row has in the column of this title."""
            row = page.locator(f"#{table} tbody tr").last
            await row.wait_for(state="attached")  # an unseen tab has its rows, too
            titles = await page.locator(f"#{table} thead th").all_text_contents()
            return str(await row.locator("> *").nth(titles.index(title)).text_content())

        await c.text()
        await page.goto(f"{c.url}/console#key=operator")
        assert " price=" in await last("log", "Placed")
        left = 1 - 0.25 - UNKNOWN.step / (TARGET_USED * 40)
        assert await last("nodes", "Prompts / left") == f"25 % / {100 * left:.0f} %"


async def test_roles_are_shown() -> None:
    async with opened() as page, cluster(prefill(), decode()) as c:
        roles = RolePlanner()
        roles.look({Role.PREFILL: 1, Role.DECODE: 3}, {Role.PREFILL: 0.6, Role.DECODE: 0.3}, 1.0)
        c.router.roles = SimpleNamespace(models={"tiny": roles})  # type: ignore[assignment]
        await page.goto(f"{c.url}/console#key=operator")
        card = page.get_by_role("region", name="Roles", exact=True)
        await card.get_by_text(roles.why).wait_for()
        await card.get_by_text("60 %", exact=True).wait_for()
        assert await page.locator("img").count() == 0
