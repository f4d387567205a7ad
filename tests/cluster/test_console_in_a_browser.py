"""The console in a real browser (Debian's Chromium): it sees the nodes, drains one, chats, and
shows where time went.

With KVRELAY_SCREENSHOTS=FOLDER it does so on 2P2D under load and leaves pictures there: those of
docs/images.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_cluster import ADMIN_KEY, EMBEDDED_KEY, Cluster, running, wait_until

from kvrelay.machine import embedded_model

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
SCREENSHOTS = os.environ.get("KVRELAY_SCREENSHOTS", "")
DEADLINE_MS = 60_000.0
QUESTIONS = (
    "What is a key-value cache?",
    "Name three rivers of Europe.",
    "Why is the sky blue? Answer in two sentences.",
    "Write one line about trains.",
    "What does a router do?",
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt install chromium)"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
]


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """The shared one; for pictures a larger one."""
    if not SCREENSHOTS:
        yield request.getfixturevalue("embedded")
        return
    flags = [
        "--model",
        str(embedded_model()),
        "--cpu",
        "--threads",
        "1",
        "--kv-cache-memory-bytes",
        str(96 << 20),
    ]
    folder = tmp_path_factory.mktemp("console")
    with running(
        folder, prefill=2, decode=2, flags=flags, router_flags=["--api-key", EMBEDDED_KEY]
    ) as ours:
        yield ours


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@contextmanager
def page_of(browser: Any, cluster: Cluster, **context: Any) -> Iterator[Any]:
    """The console, loaded; whatever it complains about fails the test."""
    size = {"width": 1360, "height": 940}
    with browser.new_context(**{"viewport": size, "reduced_motion": "reduce", **context}) as opened:
        page, wrong, asked = opened.new_page(), [], []
        page.set_default_timeout(DEADLINE_MS)
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


@contextmanager
def load(cluster: Cluster, clients: int) -> Iterator[None]:
    """So many clients, each with one question after the other."""
    over = threading.Event()

    def ask(mine: int) -> None:
        headers = {"authorization": f"Bearer {EMBEDDED_KEY}"}
        at = mine
        while not over.is_set():
            asked = {
                "role": "user",
                "content": QUESTIONS[at % len(QUESTIONS)] + " Please." * (at % 7),
            }
            body = {
                "model": "SmolLM2-135M-Instruct",
                "messages": [asked],
                "max_tokens": 12 + 7 * (at % 5),
                "stream": True,
            }
            httpx2.post(
                f"{cluster.url}/v1/chat/completions", json=body, headers=headers, timeout=120
            )
            at += clients

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(130)


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


def test_it_shows_the_nodes_drains_one_and_chats(browser: Any, cluster: Cluster) -> None:
    with page_of(browser, cluster) as page:
        assert page.locator("#nodes tbody tr[data-state=up]").count() == len(cluster.nodes)
        assert page.locator("#flow-prefill .node").count() == len(cluster.of("prefill"))

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
        decode = cluster.of("decode")[-1]
        name = f"decode node 127.0.0.1:{decode.port}"
        page.get_by_role("button", name=f"Drain {name}", exact=True).press("Enter")
        page.get_by_role("dialog").get_by_role("button", name="Drain").press("Enter")
        page.locator("#nodes tr[data-state=draining]", has_text=str(decode.port)).wait_for()
        said = httpx2.get(f"{decode.url}/health", timeout=10)
        assert said.json()["status"] == "draining"
        page.get_by_role("button", name=f"Undrain {name}", exact=True).press("Enter")
        page.locator("#nodes tr[data-state=up]", has_text=str(decode.port)).wait_for()


@pytest.mark.skipif(not SCREENSHOTS, reason="pictures are made with KVRELAY_SCREENSHOTS=FOLDER")
def test_pictures(browser: Any, cluster: Cluster) -> None:
    folder = Path(SCREENSHOTS)
    folder.mkdir(parents=True, exist_ok=True)

    def shoot(page: Any, name: str) -> None:
        page.screenshot(path=folder / f"console-{name}.png")

    def ended() -> bool:
        told = httpx2.get(f"{cluster.url}/console/state", headers=cluster.operator, timeout=10)
        return len(told.json()["requests"]) >= 40

    with load(cluster, 5):
        wait_until(ended, 300, "40 requests")
        for scheme in ("light", "dark"):
            with page_of(browser, cluster, color_scheme=scheme, device_scale_factor=1.5) as page:
                page.locator("#wires .busy").first.wait_for(state="attached")
                shoot(page, scheme)
                page.get_by_role("tab", name="Requests").click()
                page.locator("#log tbody button").nth(2).click()
                if scheme == "light":
                    shoot(page, "requests")
        phone = {
            "viewport": {"width": 390, "height": 844},
            "device_scale_factor": 2,
            "color_scheme": "light",
        }
        with page_of(browser, cluster, **phone) as page:
            page.locator("#wires .busy").first.wait_for(state="attached")
            shoot(page, "phone")
    with page_of(browser, cluster, color_scheme="dark", device_scale_factor=1.5) as page:
        chat(page, "In one or two sentences: what is a key-value cache?", 64)
        chat(page, "And why would one move it to another machine?", 64)
        shoot(page, "chat")
