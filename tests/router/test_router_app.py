"""The door of the router: what is answered without any node, and what is kept out."""

import asyncio
import io
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_doubles import cluster, decode, prefill, until


async def error_of(answer: Any) -> dict[str, Any]:
    error = (await answer.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_without_nodes_a_request_is_told_to_come_back() -> None:
    async with cluster() as c:
        async with c.post() as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await error_of(answer))["type"] == "service_unavailable"
        assert (await c.ask("GET", "/health")).status == 503


@pytest.mark.parametrize("header", [None, "Bearer wrong", "key", "Bearer kéy"])
async def test_a_wrong_api_key_is_refused_on_v1_only(header: str | None) -> None:
    p = prefill()
    async with cluster(p, decode(), api_key="key") as c:
        headers = {} if header is None else {"authorization": header}
        for request in (c.post(headers=headers), c.http.get(f"{c.url}/v1/models", headers=headers)):
            async with request as answer:
                assert answer.status == 401
                assert (await error_of(answer))["code"] == "invalid_api_key"
        assert p.calls == []
        assert (await c.ask("GET", "/health", headers=headers)).status == 200
        assert await c.text(headers={"authorization": "Bearer key"})


async def test_a_body_of_100_mb_is_refused_unread() -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield bytes(1 << 20)

    async with cluster(prefill(), decode(), max_body_bytes=1 << 20) as c:
        url = f"{c.url}/v1/chat/completions"
        async with c.http.post(url, data=chunks()) as answer:
            assert answer.status == 413
            assert (await error_of(answer))["code"] == "body_too_large"
        assert sent < 100
        async with c.http.post(url, data=io.BytesIO(bytes(100 << 20))) as answer:
            assert answer.status == 413
        assert await c.text()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_what_is_refused_at_the_door_has_its_id_too(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    headers = {"x-request-id": "mine-1"}
    async with (
        cluster(prefill(), decode()) as c,
        c.http.post(c.url + path, data=b"{", headers=headers) as answer,
    ):
        assert answer.status == 400
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == "mine-1"
    assert f"id=mine-1 path={path} status=400" in caplog.text


async def test_a_body_that_does_not_come_is_the_clients_fault() -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    async with (
        cluster(prefill(), decode(), request_deadline_s=0.2) as c,
        c.http.post(f"{c.url}/v1/completions", data=never()) as answer,
    ):
        assert answer.status == 408
        assert (await error_of(answer))["type"] == "invalid_request_error"


@pytest.mark.parametrize("asked", [False, True])
async def test_bodies_are_logged_only_when_asked(
    asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    async with cluster(prefill(), decode(), log_bodies=asked) as c:
        await c.text({"user": "the secret word"})
        await until(lambda: "status=200" in caplog.text)
    assert ("the secret word" in caplog.text) is asked


async def test_insane_ids_are_replaced() -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as c:
        for wanted in ("a b", "x" * 200):
            given = (await c.asked(headers={"x-request-id": wanted})).headers["x-request-id"]
            assert given != wanted
            assert (
                p.calls[-1].headers["x-request-id"] == d.calls[-1].headers["x-request-id"] == given
            )


async def test_a_body_names_its_request_where_no_header_does() -> None:
    p, d = prefill(), decode()
    async with cluster(p, d) as c:
        for path, fields in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/messages", {"max_tokens": 3}),
            ("/v1/responses", {"input": "x"}),
        ):
            for headers, given in (({}, "mine"), ({"x-request-id": "header"}, "header")):
                assert (
                    await c.asked({**fields, "request_id": "mine"}, path, headers=headers)
                ).headers["x-request-id"] == given
                assert d.calls[-1].headers["x-request-id"].startswith(f"{given}.")
