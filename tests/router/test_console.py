"""The console's routes: its page, who may look, and the JSON that the page reads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from router_doubles import MODEL, OPERATOR, Call, Cluster, cluster, decode, prefill, until

from kvrelay.router.state import Snapshot
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load

FOLDER = Path(__file__).parents[2] / "router" / "console" / "static"
SECRET = "the plan of the treasure island"


async def picture(c: Cluster) -> Snapshot:
    answer = await c.ask("GET", "/console/state", headers=OPERATOR)
    return msgspec.json.decode(answer.body, type=Snapshot)


async def decode_with_kv(call: Call) -> None:
    """Tokens 12 and 13, and the times of a fetch."""
    await call.tokens(12, "b", 2)
    timing = {
        "transfer": 8.0,
        "exposed": 0.5,
        "decode_queue": 1.0,
        "decode": 20.0,
        "transfer_bytes": 4096.0,
    }
    await call.send(Frame(FrameKind.END, b"{}", [13], 3, usage=(3, 3, 1), timing=timing))


# The page.


async def test_the_page_and_its_files_come_from_the_router_alone_and_are_asked_for_again() -> None:
    async with cluster(admin_key="operator", api_key="client") as c:
        for name in ["", *(f"/{file.name}" for file in FOLDER.iterdir())]:
            answer = await c.ask("GET", f"/console{name}")
            assert answer.body == (FOLDER / (name[1:] or "index.html")).read_bytes()
            headers = answer.headers
            policy = dict(
                part.split(" ", 1) for part in headers["content-security-policy"].split("; ")
            )
            assert policy.pop("default-src") == "'none'"
            assert set(policy.values()) == {"'self'", "'none'"}
            assert headers["x-content-type-options"] == "nosniff"
            tag = headers["etag"]
            again = await c.ask("GET", f"/console{name}", headers={"if-none-match": tag})
            assert (again.status, again.headers["etag"], again.body) == (304, tag, b"")


async def test_no_other_file_is_served() -> None:
    async with cluster() as c:
        for path in ("nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "routes.py", "a/b.js"):
            answer = await c.ask("GET", f"/console/{path}")
            assert (answer.status, answer.error["type"]) == (404, "not_found_error"), path


def test_the_page_names_only_files_that_are_there_and_no_other_host() -> None:
    files = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    page = files["index.html"]
    asked = set(re.findall(r'(?:src|href)="console/([^"]+)"', page))
    for name, text in files.items():
        if name.endswith(".js"):
            asked |= set(re.findall(r'from "\./([^"]+)"', text))
    assert asked | {"index.html"} == set(files)
    everything = "".join(files.values()).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?://\w|url\(|@import|import\(|eval|innerHTML|document\.write", everything
    )
    assert not re.search(
        r"<style|\sstyle=|\son\w+=|<script>", page
    )  # the policy would not let them


def test_the_page_is_in_the_wheel(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["kvrelay.router.console"]
    packaged = {file for each in globs for file in (FOLDER.parent).glob(each)}
    assert packaged == set(FOLDER.iterdir())


# What there is to see.


async def test_a_request_that_has_ended_is_told_with_its_stages_and_without_its_text() -> None:
    p, d = prefill(), decode(decode_with_kv)
    async with cluster(p, d) as c:
        asked = {"messages": [{"role": "user", "content": SECRET}]}
        await c.text(asked, headers={"x-request-id": "mine"})
        assert SECRET not in (await c.ask("GET", "/console/state", headers=OPERATOR)).text
        seen = await picture(c)
        request = seen.requests[0]
        assert (request.id, request.status, request.path) == ("mine", 200, "/v1/chat/completions")
        assert (request.prefill, request.decode, request.local) == (p.url, d.url, False)
        assert (request.prompt_tokens, request.output_tokens, request.cached_tokens) == (3, 3, 1)
        assert request.kv_bytes == 4096
        assert request.stages_s["transfer"] == 0.008
        assert request.stages_s["total"] >= (request.ttft_s or 0.0) > 0
        counts = {"output_tokens": 3, "requests": 1, "failed": 0, "new": 3}
        assert seen.counts == counts | {"running": 0, "waiting": 0, "waiting_for_room": 0}


async def test_the_nodes_are_told_as_the_router_sees_them() -> None:
    load = Load(
        running=2, waiting=1, waiting_tokens=40, free_blocks=30, total_blocks=40, block_size=16
    )
    p, d = prefill(load=load), decode(health_status=500)
    async with cluster(p, d, ready=False) as c:
        await until(lambda: c.node(p).up and "500" in c.node(d).reason)
        seen = await picture(c)
        first, second = sorted(seen.nodes, key=lambda node: node.role, reverse=True)
        assert (first.url, first.up, first.up_in, first.model) == (p.url, True, 1, MODEL)
        assert first.load == msgspec.structs.asdict(load)
        assert first.sources == ["static"]
        assert (second.url, second.up, second.up_in, second.draining) == (d.url, False, 0, False)
        assert seen.health == "unavailable"


async def test_a_request_that_fails_is_told_with_what_a_log_may_say() -> None:
    async def refused(call: Call) -> Any:
        await call.send(Frame(FrameKind.ERROR, status=500))

    async with cluster(prefill(refused), decode(refused)) as c:
        assert (await c.asked({"messages": [{"role": "user", "content": SECRET}]})).status >= 500
        seen = await picture(c)
        assert seen.requests[0].status >= 500
        assert seen.requests[0].error
        assert seen.counts["failed"] == 1
