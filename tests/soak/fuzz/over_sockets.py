"""Everything but HTTP: bytes on every TCP port, datagrams, ZMQ messages, of strangers and of
members gone mad.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import time
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvrelay.kv_transfer.connector import LeaseId
from kvrelay.kv_transfer.control import _keys
from kvrelay.kv_transfer.messages import (
    End,
    Follow,
    HandshakeReply,
    HandshakeRequest,
    LeaseCached,
    Message,
    Renew,
    Renewed,
    decode,
    encode,
)
from kvrelay.wire.heartbeat import Heartbeat, NodeState, _mac, sealed
from kvrelay.wire.outputs import Load
from kvrelay.wire.transfer import KvFacts
from tests.soak.chaos.processes import Node
from tests.soak.fuzz.examples import LEADS_AWAY
from tests.soak.fuzz.mutations import as_msgpack, garbled, mutated, noise
from tests.soak.fuzz.stand import Stand

__all__ = [
    "control",
    "every_port",
    "heartbeats",
    "holds",
    "open_planes",
]

_CONNECT_S = 2.0
_HEAR_S = 0.05
_READ_S = 0.002
_LONGEST_DATAGRAM = 65_507  # of UDP over IPv4
_SEND_S = 3.0
_ANSWER_S = 20.0
_GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00"
_NULL = _GREETING + b"NULL".ljust(20, b"\0") + b"\0" * 32
_CURVE = _GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32
_FIRST = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    _NULL,
    _CURVE,
    _NULL + b"\x04\x19\x05READY" + b"\xff" * 200,
    _NULL + b"\x02" + b"\xff" * 8,
    _CURVE + b"\x04\xc8\x05HELLO\x01\x00" + b"\0" * 192,
    b"\0" * 4096,
    b"\xff" * 4096,
    b"\x01" + b"\0" * 7 + b"\x7f" + b"\0" * 40,
)


async def open_planes(stand: Stand) -> None:
    """Have every node open all its data planes, as changed Hellos will later.

    Then it has what it will always have. Raises RuntimeError if one does not.
    """
    for node in stand.nodes:
        facts, opens = await _kv_of(stand, node), list[str]()
        until = time.monotonic() + _ANSWER_S
        async with _Peer(zmq.DEALER, facts.address, node.ports[1], stand.secret) as peer:
            while True:
                await peer.send(encode(HandshakeRequest("reader-0", facts.fingerprint, opens)))
                heard = await peer.hear()
                said = None if heard is None else decode(heard[-1])
                if not isinstance(said, HandshakeReply) or time.monotonic() > until:
                    raise RuntimeError(f"{node.role} does not open its data planes: {said}")
                if not said.on_request:
                    break
                opens = said.on_request
                await asyncio.sleep(_HEAR_S)


async def holds(stand: Stand, lease: LeaseId) -> bool:
    """Ask whether the prefill node still holds KV under this lease, as it says on its control
    channel.
    """
    node = stand.nodes[0]
    facts = await _kv_of(stand, node)
    async with _Peer(zmq.DEALER, facts.address, node.ports[1], stand.secret) as peer:
        await peer.send(encode(Renew(1.0, [lease])))
        heard = await peer.hear()
    said = None if heard is None else decode(heard[-1])
    return isinstance(said, Renewed) and lease in said.kept


async def every_port(stand: Stand, rng: random.Random, cases: int) -> list[str]:
    """Bytes on every port that any process listens on, whatever its protocol; what comes back is
    nobody's concern.
    """
    for port in stand.ports():
        host = "127.0.0.1" if port.address in ("0.0.0.0", "::", "::1") else port.address
        for _ in range(cases):
            data = rng.choice(_FIRST)
            if rng.random() < 0.7:
                data = garbled(rng, data) + noise(rng, rng.choice((3, 300, 20_000)))
            reset = rng.random() < 0.5
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_connection(host, port.number)
                try:
                    async with asyncio.timeout(_HEAR_S):
                        writer.write(data)
                        await writer.drain()
                        await reader.read(4096)
                finally:
                    writer.transport.abort() if reset else writer.close()
    return []


async def heartbeats(stand: Stand, rng: random.Random, cases: int) -> list[str]:
    """Announcements: of strangers, forged, old, changed. Returns what those of strangers have
    changed.
    """
    before, key = await stand.state(), stand.keys["node"]
    of_kind: Any = "decode"
    gone = Heartbeat(
        stand.nodes[1].url, of_kind, "tiny", "f" * 32, Load(), time.time(), NodeState.LEAVING
    )
    changing = partial(msgspec.structs.replace, gone)
    theirs = changing(url="http://127.0.0.1:9", state=NodeState.OK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:

        async def send(said: bytes) -> None:
            ours.sendto(said[:_LONGEST_DATAGRAM], ("127.0.0.1", stand.heartbeat_port))
            await asyncio.sleep(_READ_S)

        for _ in range(cases):
            late_s = rng.choice((-time.time(), -90, 90))
            changed = as_msgpack(mutated(rng, msgspec.to_builtins(theirs), LEADS_AWAY))
            ways = (
                noise(rng, 5000),
                rng.randbytes(60_000),
                sealed(gone, secrets.token_hex()),
                sealed(gone, ""),
                garbled(rng, sealed(gone, key)[:32] + noise(rng, 9)),
                sealed(changing(sent_at=time.time() + late_s), key),
                _mac(changed, key) + changed,
            )
            await send(rng.choice(ways))
        # One of ours may be there now, and would be for three more beats.
        leaves = changing(url=theirs.url, sent_at=time.time() + 5)
        await send(sealed(leaves, key))
        now = time.time()
        for wrong_key in (secrets.token_hex(), ""):
            await send(sealed(changing(sent_at=now), wrong_key))
        await send(sealed(changing(sent_at=now - 90), key))
        mark = changing(url="http://127.0.0.1:10", sent_at=now, state=NodeState.OK)
        await send(sealed(mark, key))
        until = time.monotonic() + _ANSWER_S
        while mark.url not in (seen := await stand.state()):
            if time.monotonic() > until:
                return ["a heartbeat with the key is not heard any more"]
        await send(sealed(changing(url=mark.url, sent_at=now + 0.001), key))
    return [
        f"strangers' heartbeats have made {seen.get(node.url)} of {before.get(node.url)}"
        for node in stand.nodes
        if seen.get(node.url) != before.get(node.url)
    ]


async def control(stand: Stand, rng: random.Random, cases: int, held: LeaseId) -> list[str]:
    """The control channel of the hand-over: without the secret, with another, and with it."""
    wrong = []
    for node in stand.nodes:
        facts = await _kv_of(stand, node)
        host, port = facts.address, node.ports[1]
        messages: list[Message] = [
            LeaseCached(1, "g", 0, b"x" * 32),
            HandshakeRequest("reader-1", facts.fingerprint, []),
            Renew(1.0, [LeaseId("x", 1)]),
            End(LeaseId("x", 2), 1),
            Follow(LeaseId("x", 1)),
        ]
        async with contextlib.AsyncExitStack() as stack:
            strangers = [
                await stack.enter_async_context(_Peer(zmq.DEALER, host, port, secret))
                for secret in ("", secrets.token_urlsafe())
            ]
            for peer in strangers:
                for said in (*messages, End(held, 1), Renew(1.0, [held])):
                    await peer.send(encode(said))
            async with _Peer(zmq.DEALER, host, port, stand.secret) as peer:
                for _ in range(cases):
                    changed = as_msgpack(
                        mutated(
                            rng, msgspec.to_builtins(rng.choice(messages), builtin_types=(bytes,))
                        )
                    )
                    frames = [garbled(rng, changed) if rng.random() < 0.3 else changed]
                    await peer.send(*(frames * rng.choice((1, 1, 1, 1, 3))))
                await peer.send(encode(End(LeaseId("last", 77), 123_456)))
                if not await peer.heard_of(b"\xce\x00\x01\xe2\x40"):
                    wrong.append(f"{node.role}: the control channel does not answer any more")
            # It answers one after the other, and these were there first.
            if any([await peer.hear(_HEAR_S) for peer in strangers]):
                wrong.append(
                    f"{node.role}: the control channel answers who has not the cluster's secret"
                )
    return wrong


class _Peer:
    def __init__(self, kind: int, host: str, port: int, secret: str = "") -> None:
        self.socket = zmq.asyncio.Context.instance().socket(kind)
        self.socket.setsockopt(zmq.LINGER, 200)
        self._cut = False
        if secret:
            key, mine = _keys(secret)
            self.socket.curve_publickey, self.socket.curve_secretkey = key, mine
            self.socket.curve_serverkey = key
        self.socket.connect(f"tcp://{host}:{port}")

    async def __aenter__(self) -> _Peer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, *frames: bytes) -> None:
        """Send; who has cut the connection, or does not take it, is waited for once."""
        if not self._cut and not await self.socket.poll(_SEND_S * 1000, zmq.POLLOUT):  # type: ignore[call-arg]
            self._cut = True
        with contextlib.suppress(zmq.Again):
            await self.socket.send_multipart(frames, zmq.NOBLOCK)

    async def hear(self, within_s: float = _ANSWER_S) -> list[bytes] | None:
        return (
            await self.socket.recv_multipart() if await self.socket.poll(within_s * 1000) else None
        )

    async def heard_of(self, mark: bytes) -> bool:
        """Wait for a message with these bytes, and tell if it came."""
        until = time.monotonic() + _ANSWER_S
        while (left_s := until - time.monotonic()) > 0:
            heard = await self.hear(left_s)
            if heard is not None and mark in heard[-1]:
                return True
        return False


async def _kv_of(stand: Stand, node: Node) -> KvFacts:
    _, told = await stand.ask(node, "/health", "")
    return msgspec.convert(told["kv"], KvFacts)
