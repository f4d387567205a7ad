"""The console in a real browser (Debian's Chromium): it sees the nodes, drains one, chats, and
shows where time went.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from real_cluster import ADMIN_KEY, EMBEDDED_KEY, Cluster

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt install chromium)"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
]


@contextmanager
def page_of(cluster: Cluster) -> Iterator[Any]:
    """The console, loaded; whatever it complains about fails the test."""
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM) as browser,
        browser.new_context(reduced_motion="reduce") as opened,
    ):
        page, wrong, asked = opened.new_page(), [], []
        page.set_default_timeout(60_000)
        page.on(
            "console",
            lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda why: wrong.append(str(why)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{cluster.url}/console#key={ADMIN_KEY}")
        page.locator("#health[data-state=ok]").wait_for()
        yield page
        assert not wrong
        assert {
            url.partition("/console")[0].partition("/v1")[0].partition("/admin")[0] for url in asked
        } == {cluster.url}


def chat(page: Any, text: str, tokens: int) -> str:
    """Ask in the playground; the answer, and it was seen to grow."""
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("API key").fill(EMBEDDED_KEY)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens").fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(".turn.model").last
    answer.locator(".foot", has_text="TTFT").wait_for()
    begun = answer.locator(".words").inner_text()
    answer.locator(".foot .stages").wait_for()
    whole = str(answer.locator(".words").inner_text())
    assert len(whole) > len(begun)
    assert "tokens/s" in answer.locator(".foot").inner_text()
    return whole


def test_it_shows_the_nodes_drains_one_and_chats(embedded: Cluster) -> None:
    with page_of(embedded) as page:
        assert page.locator("#nodes tbody tr[data-state=up]").count() == len(embedded.nodes)
        assert page.locator("#flow-prefill .node").count() == len(embedded.of("prefill"))

        whole = chat(page, "What is a lease? Answer in one sentence.", 24)
        assert whole.strip()
        page.get_by_role("tab", name="Requests").click()
        row = page.locator("#log tbody tr").first
        row.get_by_role("button").press("Enter")
        assert "prefill" in page.locator("#log .detail .parts").inner_text()

        # By keyboard: tabs with arrows, then the button of the last node, and the dialog that it
        # opens.
        page.get_by_role("tab", name="Requests").focus()
        page.keyboard.press("ArrowLeft")
        assert page.get_by_role("tab", name="Cluster").get_attribute("aria-selected") == "true"
        decode = embedded.of("decode")[-1]
        name = f"decode node 127.0.0.1:{decode.port}"
        page.get_by_role("button", name=f"Drain {name}", exact=True).press("Enter")
        page.get_by_role("dialog").get_by_role("button", name="Drain").press("Enter")
        page.locator("#nodes tr[data-state=draining]", has_text=str(decode.port)).wait_for()
        said = httpx2.get(f"{decode.url}/health", timeout=60)
        assert said.json()["status"] == "draining"
        page.get_by_role("button", name=f"Undrain {name}", exact=True).press("Enter")
        page.locator("#nodes tr[data-state=up]", has_text=str(decode.port)).wait_for()
