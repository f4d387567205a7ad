"""Request streams on a node: requests as tasks, credit, cancelling, and the end of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvrelay.node import request_stream
from kvrelay.node.request_stream import KvEvents, RequestStreams, check_version
from kvrelay.wire.errors import Overloaded, RequestError
from kvrelay.wire.frames import (
    LEGS_VERSION_HEADER,
    WINDOW_BYTES,
    Answer,
    Frame,
    FrameKind,
    Kind,
    MessageReader,
    Open,
    credit,
    frame_message,
    frame_of,
    message,
)
from kvrelay.wire.kv_events import CacheChanges
from kvrelay.wire.outputs import Load
from kvrelay.wire.versions import LEGS

LARGE = Frame(FrameKind.TOKENS, bytes(WINDOW_BYTES // 4))
END = Frame(FrameKind.END, b"end")


class Router:
    """The router's end: what it says is put, what it hears is taken."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.heard: asyncio.Queue[tuple[int, int, bytes]] = asyncio.Queue()
        self.writes = 0
        self.over = False
        self._reader = MessageReader()

    def say(self, *said: bytes) -> None:
        self.says.put_nowait({"type": "http.request", "body": b"".join(said), "more_body": True})

    def open(self, number: int, path: str = "ok") -> None:
        self.say(message(Kind.OPEN, number, msgspec.msgpack.encode(Open(path, {}, b"{}"))))

    async def hear(self) -> tuple[int, int, bytes]:
        return await asyncio.wait_for(self.heard.get(), 60)

    async def frames(self, number: int, count: int) -> list[Frame]:
        """The next messages, which must be the answer and frames of a number."""
        assert (await self.hear())[:2] == (number, Kind.ANSWER)
        told = [await self.hear() for _ in range(count)]
        assert {each[:2] for each in told} <= {(number, Kind.FRAME)}
        return [frame_of(body) for _, _, body in told]

    async def send(self, said: Any) -> None:
        self.writes += 1
        for number, kind, body in self._reader.feed(said.get("body", b"")):
            self.heard.put_nowait((number, kind, bytes(body)))
        self.over |= said["type"] == "http.response.body" and not said["more_body"]


class Requests:
    """Frames by the path of a request."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.kv_events = KvEvents()

    async def __call__(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Load, AsyncGenerator[Frame, None]]:
        if path == "full":
            raise Overloaded("no room")
        if path == "bug":
            raise LookupError("a bug")
        frames = self.kv_events.frames() if path == "events" else self._frames(path)
        return Load(running=2), frames

    async def _frames(self, path: str) -> AsyncGenerator[Frame, None]:
        try:
            if path == "large":
                for _ in range(8):
                    yield LARGE
            elif path == "hang":
                await asyncio.sleep(30)
            elif path != "nothing":
                yield Frame(FrameKind.TOKENS, path.encode(), [1])
            if path == "break":
                raise LookupError("a bug")
            if path != "nothing":
                yield END
        finally:
            self.ended.append(path)


@asynccontextmanager
async def served(
    requests: Requests,
) -> AsyncIterator[tuple[Router, RequestStreams, asyncio.Task[None]]]:
    router, streams = Router(), RequestStreams(requests.kv_events)
    stream = streams.open(requests, 1 << 20)
    task = asyncio.create_task(stream({"type": "http"}, router.says.get, router.send))
    try:
        assert (await router.hear())[1] == Kind.PONG
        yield router, streams, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("path", "status"), [("full", Overloaded.status), ("bug", 500)])
async def test_what_does_not_begin_is_answered_with_its_error(path: str, status: int) -> None:
    async with served(Requests()) as (router, _, _):
        router.open(1, path)
        number, kind, body = await router.hear()
        answer = msgspec.msgpack.decode(body, type=Answer)
        assert (number, kind, answer.status) == (1, Kind.ANSWER, status)
        assert answer.error is not None
        assert "a bug" not in str(answer.error)
        for malformed in (b"\xc1", b"\x94\xa1a\x80\xc4\x00" + b"\x91" * 100_000 + b"\xc0"):
            router.say(message(Kind.OPEN, 2, malformed))
            assert msgspec.msgpack.decode((await router.hear())[2], type=Answer).status == 400


@pytest.mark.parametrize("path", ["break", "nothing"])
async def test_frames_without_an_end_are_said_to_be_over(path: str) -> None:
    async with served(Requests()) as (router, _, _):
        router.open(1, path)
        await router.frames(1, 1 if path == "break" else 0)
        assert (await router.hear())[:2] == (1, Kind.OVER)


async def test_a_request_waits_for_credit_and_others_do_not() -> None:
    async with served(Requests()) as (router, _, _):
        router.open(1, "large")
        assert len(await router.frames(1, 4)) == 4
        router.open(2)
        await router.frames(2, 2)
        assert router.heard.empty()
        router.say(credit(1, 2 * len(frame_message(1, LARGE))))
        for _ in range(2):
            assert (await router.hear())[:2] == (1, Kind.FRAME)
        router.say(credit(1, WINDOW_BYTES))
        assert [frame_of((await router.hear())[2]) for _ in range(3)] == [LARGE, LARGE, END]


async def test_a_cancelled_request_ends_and_says_nothing_more() -> None:
    requests = Requests()
    async with served(requests) as (router, streams, _):
        router.open(1, "hang")
        await router.frames(1, 0)
        assert streams.running() == 1
        router.say(message(Kind.CANCEL, 1))
        router.open(2)
        await router.frames(2, 2)
        assert requests.ended == ["hang", "ok"]
        router.say(message(Kind.PING))
        assert (await router.hear())[1] == Kind.PONG
        await asyncio.sleep(0)
        assert streams.running() == 0


async def test_a_router_that_follows_and_reads_nothing_keeps_no_node_from_draining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_stream, "_QUEUED", 2)
    async with served(requests := Requests()) as (router, streams, _):
        router.open(1, "events")
        await router.frames(1, 1)
        for _ in range(5):
            requests.kv_events.publish(CacheChanges([bytes(WINDOW_BYTES)], []))
            await asyncio.sleep(0)
            assert streams.running() == 0


@pytest.mark.parametrize("how", ["disconnect", "close", "end", "too long"])
async def test_the_end_of_the_stream_ends_all_requests(how: str) -> None:
    requests = Requests()
    async with served(requests) as (router, streams, task):
        router.open(1, "hang")
        router.open(2, "large")
        for _ in range(6):
            await router.hear()
        if how == "close":
            streams.close()
        elif how == "too long":
            router.say((1 << 30).to_bytes(4, "little") + bytes(5))
        else:
            kind = "http.disconnect" if how == "disconnect" else "http.request"
            router.says.put_nowait({"type": kind, "body": b""})
        await asyncio.wait_for(task, 60)
        assert sorted(requests.ended) == ["hang", "large"]
        assert router.over
        assert not streams._streams


def test_a_version_that_is_not_spoken_is_refused_and_none_is_the_first() -> None:
    check_version({LEGS_VERSION_HEADER: str(LEGS.newest)})
    if LEGS.oldest == 1:
        check_version({})
    for asked in (str(LEGS.newest + 1), "0", "-1", "two", "9" * 400):
        with pytest.raises(RequestError, match=f"speaks version {LEGS} of the request stream"):
            check_version({LEGS_VERSION_HEADER: asked})
