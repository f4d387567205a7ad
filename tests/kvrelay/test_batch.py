"""`kvrelay batch`: files in OpenAI's format, what is wrong with them, retries, and a second run
that goes on.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from kvrelay import batch
from kvrelay.batch import Answered, Ask, BatchLine, over_http, read_batch, run_batch
from kvrelay.chat import Endpoint
from kvrelay.cli import run
from kvrelay.wire.errors import ConfigError, KvrelayError


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}]}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    } | fields


def write(path: Path, values: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def answers(path: Path) -> dict[str, Any]:
    values = [json.loads(raw) for raw in path.read_text().splitlines()]
    assert len({value["id"] for value in values}) == len(values)
    return {value["custom_id"]: value for value in values}


def quiet() -> Console:
    return Console(file=io.StringIO())


def asking(work: Callable[[BatchLine], Awaitable[Answered]]) -> Callable[[], Any]:
    @asynccontextmanager
    async def ask() -> AsyncIterator[Ask]:
        yield work

    return ask


async def well(asked: BatchLine) -> Answered:
    return Answered(200, json.dumps({"said": asked.custom_id}).encode(), "r")


def test_every_request_is_answered_with_at_most_so_many_at_once(tmp_path: Path) -> None:
    running, most = 0, 0

    async def work(asked: BatchLine) -> Answered:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await well(asked)

    source, target = write(tmp_path / "in", [line(str(i)) for i in range(20)]), tmp_path / "out"
    assert run_batch(source, target, asking(work), 3, quiet()) == 0
    told = answers(target)
    assert set(told) == {str(i) for i in range(20)}
    assert told["7"]["response"] == {"status_code": 200, "request_id": "r", "body": {"said": "7"}}
    assert told["7"]["error"] is None
    assert most == 3


def test_a_second_run_asks_only_for_what_was_not_answered_well(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [line("a"), line("b"), line("c")]), tmp_path / "out"

    async def b_is_wrong(asked: BatchLine) -> Answered:
        return await well(asked) if asked.custom_id != "b" else Answered(400, b'{"error": {}}', "r")

    assert run_batch(source, target, asking(b_is_wrong), 1, quiet()) == 1
    assert answers(target)["b"]["response"]["status_code"] == 400
    kept = target.read_text().splitlines()
    target.write_text(
        "\n".join(kept[:2]) + '\n{"id": "batch_req_torn", "custom'
    )  # killed while it wrote the last one
    asked_again: list[str] = []

    async def again(asked: BatchLine) -> Answered:
        asked_again.append(asked.custom_id)
        return await well(asked)

    assert run_batch(source, target, asking(again), 1, quiet()) == 0
    assert asked_again == ["b", "c"]
    assert {
        name: told["response"]["status_code"] for name, told in answers(target).items()
    } == dict.fromkeys("abc", 200)
    assert run_batch(source, target, asking(again), 1, quiet()) == 0
    assert asked_again == ["b", "c"]


def test_a_server_without_room_is_asked_again_and_a_silent_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_PAUSE_S", 0.0)
    tries = {"a": 0, "b": 0}

    async def work(asked: BatchLine) -> Answered:
        tries[asked.custom_id] += 1
        if asked.custom_id == "b":
            raise KvrelayError("nobody is there")
        return Answered(429, b"{}", "r", 0.0) if tries["a"] < 3 else await well(asked)

    source, target = write(tmp_path / "in", [line("a"), line("b")]), tmp_path / "out"
    assert run_batch(source, target, asking(work), 2, quiet()) == 1
    assert tries == {"a": 3, "b": batch.TRIES}
    told = answers(target)
    assert told["a"]["response"]["status_code"] == 200
    assert (told["b"]["response"], told["b"]["error"]) == (
        None,
        {"code": "no_answer", "message": "nobody is there"},
    )


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (line("a", url="/v1/embeddings"), "/v1/embeddings"),
        (line("a", method="GET"), "GET"),
        (line("a", body={"stream": True}), "stream"),
        (line("ok"), "repeats"),
        ({"custom_id": "a"}, "method"),
        ("text", "Expected"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    tmp_path: Path, wrong: Any, word: str
) -> None:
    source = write(tmp_path / "in", [line("ok"), wrong])
    with pytest.raises(ConfigError) as why:
        read_batch(source)
    assert "line 2" in why.value.message
    assert word in why.value.message


def test_no_file_of_something_else_is_overwritten(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [line("a")]), tmp_path / "out"
    for content in ("a diary\nof mine\n", json.dumps({"custom_id": "other"}) + "\n"):
        target.write_text(content)
        with pytest.raises(ConfigError, match="another output file"):
            run_batch(source, target, asking(well), 1, quiet())
        assert target.read_text() == content


async def test_a_running_server_is_asked_over_http() -> None:
    async def chat(request: web.Request) -> web.Response:
        asked = await request.json()
        if request.headers.get("authorization") != "Bearer key":
            return web.json_response({"error": {"message": "no"}}, status=401)
        if asked["messages"][0]["content"] == "busy":
            return web.json_response({}, status=503, headers={"retry-after": "7"})
        return web.Response(body=b'{\n "id": "x"\n}', headers={"x-request-id": "r1"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with over_http(Endpoint(url, "key")) as ask:
            assert await ask(BatchLine(**line("hi"))) == Answered(200, b'{"id":"x"}', "r1")
            assert (await ask(BatchLine(**line("busy")))).retry_after_s == 7
        async with over_http(Endpoint(url)) as ask:
            assert (await ask(BatchLine(**line("hi")))).status == 401
    finally:
        await runner.cleanup()
    async with over_http(Endpoint(url)) as ask:
        with pytest.raises(KvrelayError, match="does not answer"):
            await ask(BatchLine(**line("hi")))


def test_a_url_and_an_engine_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write(tmp_path / "in", [line("a")]))
    assert (
        run(["batch", source, str(tmp_path / "out"), "--url", "http://127.0.0.1:9", "--model", "x"])
        == 2
    )
    assert "--model" in capsys.readouterr().err
    assert run(["batch", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
