"""Leg streams: many legs over one connection, each on its own; what breaks with the connection and
what does not.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from router_doubles import STREAM, Call, cluster, decode, decode_ok, event, prefill, until

from kvrelay.router.nodes.node import HealthReport, Lease, Node
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_stream import (
    AttemptFailed,
    NodeStream,
    OnFrame,
    Refused,
    deliver_last,
)
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ErrorBody
from kvrelay.wire.frames import (
    Answer,
    Frame,
    FrameKind,
    Kind,
    MessageReader,
    frame_message,
    message,
)
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.versions import LEGS

MEGABYTE = 1 << 20


class Transport:
    """What a NodeStream says to its node."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.aborted = True

    def said(self) -> list[tuple[int, int, bytes]]:
        """The messages, without the HTTP around them."""
        body, left = b"", self.written.partition(b"\r\n\r\n")[2]
        while left:
            size, _, left = left.partition(b"\r\n")
            body, left = body + left[: int(size, 16)], left[int(size, 16) + 2 :]
        return [(leg, kind, bytes(said)) for leg, kind, said in MessageReader().feed(body)]


class Stream:
    """A NodeStream without a network."""

    def __init__(self) -> None:
        self.end = NodeStream(b"POST /kv/legs HTTP/1.1\r\n\r\n")
        self.transport = Transport()
        self.end.connection_made(cast(asyncio.Transport, self.transport))
        self.node = Node("http://n", role=Role.DECODE)

    def leg(self, take: OnFrame) -> asyncio.Task[FrameKind]:
        return asyncio.ensure_future(
            self.end.run(Lease(self.node), "/v1/completions", b"{}", {}, take)
        )

    def hear(self, *messages: bytes) -> None:
        self.end.data_received(answer(*messages))


def answer(*messages: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in messages)


HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.kvrelay.legs\r\ntransfer-encoding: "
    b"chunked\r\n\r\n"
)
TAKEN = message(Kind.ANSWER, 1, msgspec.msgpack.encode(Answer(200, Load(running=3))))
FRAMES = [
    Frame(FrameKind.TOKENS, b"a", [1], 1),
    Frame(FrameKind.TOKENS, b"b" * 300, [2], 2),
    Frame(FrameKind.END, b"c"),
]


@pytest.fixture
async def stream() -> Stream:
    made = Stream()
    made.end.data_received(HEAD + answer(message(Kind.PONG)))
    assert made.end.ready.done()
    return made


async def test_a_stream_that_is_cut_anywhere_says_the_same() -> None:
    said = HEAD + answer(
        message(Kind.PONG), TAKEN, b"".join(frame_message(1, frame) for frame in FRAMES)
    )
    for at in range(len(said)):
        stream, taken = Stream(), list[Frame]()
        leg = stream.leg(lambda frame, taken=taken: taken.append(frame))  # type: ignore[misc]
        await asyncio.sleep(0)
        stream.end.data_received(said[:at])
        stream.end.data_received(said[at:])
        assert await leg is FrameKind.END
        assert taken == FRAMES
        assert stream.node.state.load == Load(running=3)
        await asyncio.sleep(0)
        assert [kind for _, kind, _ in stream.transport.said()] == [Kind.OPEN]


async def test_a_leg_without_an_end_has_failed_and_its_stream_has_not(stream: Stream) -> None:
    leg = stream.leg(lambda _: None)
    await asyncio.sleep(0)
    stream.hear(message(Kind.OVER, 1))
    with pytest.raises(AttemptFailed, match="cut before its end"):
        await leg
    assert not stream.transport.aborted


@pytest.mark.parametrize(
    "said",
    [
        answer(frame_message(1, FRAMES[0])[:-1] + b"\xc1"),
        answer(b"\xff\xff\xff\xff" + bytes(5)),
        b"no chunk",
        b"0\r\n\r\n",
        answer(message(Kind.ANSWER, 1, b"\xc1")),
    ],
    ids=["frame", "length", "http", "end", "answer"],
)
async def test_what_no_node_says_ends_the_stream_and_all_of_its_legs(
    stream: Stream, said: bytes
) -> None:
    legs = [stream.leg(lambda _: None) for _ in range(2)]
    await asyncio.sleep(0)
    stream.end.data_received(said)
    for leg in legs:
        with pytest.raises(AttemptFailed):
            await leg
    assert stream.end.broken
    assert stream.transport.aborted


async def test_what_is_raised_over_a_frame_ends_its_leg_only(stream: Stream) -> None:
    def take(_: Frame) -> None:
        raise LookupError("diverged")

    first, second = stream.leg(take), stream.leg(lambda _: None)
    await asyncio.sleep(0)
    stream.hear(frame_message(1, FRAMES[0]), frame_message(2, FRAMES[2]))
    with pytest.raises(LookupError):
        await first
    assert await second is FrameKind.END
    await asyncio.sleep(0)
    assert stream.transport.said()[-1][:2] == (1, Kind.CANCEL)


async def test_a_silent_stream_is_given_up(stream: Stream) -> None:
    leg = stream.leg(lambda _: None)
    await asyncio.sleep(0)
    stream.end.ping(10.0, 6.0)
    stream.end.ping(15.0, 6.0)
    stream.hear(message(Kind.PONG))
    stream.end.ping(16.0, 6.0)
    stream.end.ping(20.0, 6.0)
    assert not stream.end.broken
    stream.end.ping(22.5, 6.0)
    with pytest.raises(AttemptFailed) as why:
        await leg
    assert "silent for 6.5 s" in why.value.detail


async def test_a_stream_that_breaks_takes_its_legs_along_and_is_mended() -> None:
    async def cut(call: Call) -> None:
        if len(d.calls) > 2:
            await decode_ok(call)
            return
        await until(lambda: len(d.calls) == 2)
        call.cut()

    p, d = prefill(), decode(cut)
    async with cluster(p, d) as c:
        texts = await asyncio.gather(*(c.text(STREAM) for _ in range(2)))
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        await until(lambda: d.streams == 2 and bool(c.node(d).up))
        assert event("c").decode() in await c.text(STREAM)
        d.generation = "g2"  # another process
        await until(lambda: d.streams == 3)
        assert p.streams == 1  # of all its requests, behind many health checks


async def test_a_node_whose_stream_does_not_open_is_down_and_says_why() -> None:
    d = decode(stream_status=500)
    async with cluster(prefill(), d, ready=False) as c:
        await until(lambda: c.node(d).reason.startswith("its request stream does not open"))
        d.stream_status = 200
        await until(lambda: c.node(d).up)
        await c.text(STREAM)


async def test_a_node_that_does_not_answer_on_its_stream_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(*_: Any) -> Any:
        await asyncio.sleep(30)

    d = decode()
    monkeypatch.setattr(d, "leg_stream", silent)
    async with cluster(prefill(), d, ready=False, connect_deadline_s=0.2) as c:
        await until(lambda: c.node(d).reason.startswith("its request stream does not open"))


async def test_small_answers_of_nodes_are_bounded_and_lead_nowhere() -> None:
    async def large(_: web.Request) -> web.Response:
        return web.Response(body=bytes(4 << 20))

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound("/health")

    d = decode(posts={"/large": large, "/elsewhere": elsewhere})
    async with cluster(prefill(), d) as c:
        post = c.router.node_client.post
        assert len((await post(c.node(d), "/large", b"", 5.0))[1]) < 2 << 20
        assert (await post(c.node(d), "/elsewhere", b"", 5.0))[0] == 302


def test_a_hand_over_of_nothing_is_a_failure() -> None:
    with pytest.raises(AttemptFailed, match="without its parameters"):
        deliver_last(Frame(FrameKind.HANDOVER), lambda _: None)


async def test_the_highest_common_version_is_asked_for_and_told() -> None:
    p, d = prefill(), decode(versions=(LEGS.newest, LEGS.newest + 1))
    async with cluster(p, d) as c:
        assert [p.asked_versions, d.asked_versions] == [[str(LEGS.newest)]] * 2
        versions = {node["leg_version"] for node in (await c.ask("GET", "/health")).json["nodes"]}
        assert versions == {LEGS.newest}


async def test_a_node_without_a_common_version_is_kept_out_and_the_reason_names_both() -> None:
    far = prefill(versions=(LEGS.newest + 1, LEGS.newest + 2))
    p = prefill()
    async with cluster(p, far, decode(), ready=False) as c:
        await until(lambda: c.node(far).reason.startswith("it speaks") and c.node(p).up)
        assert c.node(far).reason == (
            f"it speaks version {LEGS.newest + 1} to {LEGS.newest + 2} of the request stream and this "
            f"router {LEGS}: "
            "upgrade the router, one release at a time"
        )
        await until(lambda: all(node.up for node in c.router.pool.nodes if node.url != far.url))
        for _ in range(3):
            await c.text(STREAM)
        assert (far.streams, len(far.calls), len(p.calls)) == (0, 0, 3)


async def test_a_client_that_does_not_read_holds_up_its_own_stream_only() -> None:
    sent = 0

    async def flood(call: Call) -> None:
        nonlocal sent
        for at in range(100):
            await call.send(
                Frame(FrameKind.TOKENS, b"data: " + b"x" * MEGABYTE + b"\n\n", [12 + at], 2 + at)
            )
            sent += 1
        await call.end()

    async def flood_or_not(call: Call) -> None:
        await (flood if call.body["max_tokens"] == 1000 else decode_ok)(call)

    asked = {"stream": True, "max_tokens": 1000}
    async with (
        cluster(prefill(), decode(flood_or_not)) as c,
        c.post(asked, read_bufsize=1 << 16) as answer,
    ):
        await until(lambda: sent > 0)
        before = -1
        while before != sent:  # until it stands still, others go on
            before = sent
            for _ in range(3):
                assert event("c").decode() in await c.text({"stream": True, "max_tokens": 9})
        # The window, what the router's and the client's sockets take, and one of each on its way.
        assert sent < 20, sent
        read = 0
        async for chunk in answer.content.iter_any():
            read += len(chunk)
        assert read > 100 * MEGABYTE
        assert sent == 100


async def test_after_a_large_read_others_have_their_turn_first(stream: Stream) -> None:
    taken: list[Frame] = []
    leg = stream.leg(taken.append)  # type: ignore[func-returns-value]
    await asyncio.sleep(0)
    stream.hear(frame_message(1, Frame(FrameKind.TOKENS, bytes(40_000))))
    assert (len(taken), stream.transport.reads) == (1, False)
    await asyncio.sleep(0)
    assert stream.transport.reads
    stream.hear(frame_message(1, FRAMES[2]))
    assert await leg is FrameKind.END


class Slow:
    """A node that says nothing on its streams until it is let."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.go = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        await self.go.wait()
        writer.write(HEAD + answer(message(Kind.PONG)))
        while await reader.read(1 << 16):
            pass
        self.closed += 1
        writer.close()


async def test_checks_that_are_cancelled_leave_no_stream_behind() -> None:
    slow = Slow()
    report = HealthReport(Role.DECODE, "tiny", leg_stream=LEGS.oldest)
    async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
        node = Node(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", role=Role.DECODE)
        client = NodeClient(RouterConfig())
        for at in (1, 2):  # the next one tries again
            check = asyncio.ensure_future(client.heard(node, report))
            await until(lambda at=at: slow.opened == at)  # type: ignore[misc]
            check.cancel()
            client.forget(node)
            await asyncio.wait([check])
        slow.go.set()
        await until(lambda: slow.closed == 2)
        assert await client.heard(node, report) is None
        await client.close()
        await until(lambda: slow.closed == 3)


@pytest.mark.parametrize(("backlog_ms", "seconds"), [(0.0, 1), (400.0, 1), (2_100.0, 3), (1e9, 60)])
def test_a_client_is_told_when_what_waits_is_computed(backlog_ms: float, seconds: int) -> None:
    full, load = ErrorBody("full", "overloaded_error"), Load(backlog_ms=backlog_ms)
    for status, kind, after_s in (
        (429, Refused, seconds),
        (503, AttemptFailed, seconds),
        (400, Refused, None),
    ):
        frame = Frame(FrameKind.ERROR, error=full, status=status, load=load)
        with pytest.raises(kind) as told:
            deliver_last(frame, lambda _: pytest.fail("it is no frame for a client"))
        assert told.value.retry_after_s == after_s
