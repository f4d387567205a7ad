"""The control channel with a secret: who has it talks, who has not is told so at once, and nobody
listens in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_node import AT_ONCE_S, CONFIG, FINGERPRINT, node, reason
from shared_backend import pattern

from kvrelay.kv_transfer import sockets
from kvrelay.kv_transfer.connector import PeerKey, Settled
from kvrelay.kv_transfer.control import ENDED_EARLY, ControlThread
from kvrelay.kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    HandshakeRequest,
    Message,
    Refused,
    decode,
    encode,
)
from kvrelay.kv_transfer.tickets import signed
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.transfer import Ticket

SECRET, OTHER = "sixteen letters!", "sixteen letters?"
HELLO = HandshakeRequest("me", FINGERPRINT)
SECURE = dataclasses.replace(CONFIG, cluster_secret=SECRET)


class Ears:
    """An engine that answers everything with `reply` and writes down what it hears."""

    def __init__(self, reply: Message) -> None:
        self.reply = reply
        self.asked: list[Message] = []
        self.news: queue.Queue[object] = queue.Queue()

    def answer(self, sender: bytes, message: Message) -> Message | None:
        self.asked.append(message)
        return self.reply

    def on_message(self, peer: PeerKey, message: Message) -> None:
        self.news.put(message)

    def on_disconnect(self, peer: PeerKey, how: str) -> None:
        self.news.put(how)

    def on_process_gone(self, peer: PeerKey) -> None:
        self.news.put("vanished")

    def tick(self, now: float) -> float:
        return 1.0

    def on_error(self, error: Exception) -> None:
        self.news.put(error)


@contextlib.contextmanager
def control(secret: str, reply: Message = HELLO) -> Iterator[tuple[ControlThread, Ears]]:
    ears = Ears(reply)
    thread = ControlThread(ears, "127.0.0.1", 0, secret)
    thread.start()
    try:
        yield thread, ears
    finally:
        thread.close(2.0)


# Frames.


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xff", b"hello", msgspec.msgpack.encode({"type": "renew"}), b"\x93\x01\x02\x03"],
)
def test_garbage_is_a_decode_error(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(frame)


def test_nesting_that_nobody_writes_is_a_value_error() -> None:
    depth = 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(b"\x82\xa4type\xa5renew\xa1x" + b"\x91" * depth + b"\xc0")


def test_messages_over_the_limit_are_neither_sent_nor_read() -> None:
    with pytest.raises(ValueError, match=f"over the limit of {MAX_MESSAGE_BYTES}"):
        encode(Refused("x" * MAX_MESSAGE_BYTES))
    with pytest.raises(ValueError, match=f"over the limit of {MAX_MESSAGE_BYTES}"):
        decode(b"x" * (MAX_MESSAGE_BYTES + 1))


# Connections.


def peer_of(thread: ControlThread) -> PeerKey:
    return PeerKey(*thread.address, "g")


@pytest.mark.parametrize("secret", [SECRET, ""])
def test_two_of_one_cluster_talk(secret: str) -> None:
    with control(secret) as (source, there), control(secret) as (reader, here):
        reader.dial(peer_of(source), HELLO)
        assert here.news.get(timeout=AT_ONCE_S) == HELLO
        assert there.asked == [HELLO]


def test_the_longest_message_passes_encrypted_too() -> None:
    longest = Refused("")
    longest = Refused(
        "x" * (MAX_MESSAGE_BYTES - len(encode(longest)) - 4)
    )  # 4: a longer text has a longer header
    assert MAX_MESSAGE_BYTES - 4 <= len(encode(longest)) <= MAX_MESSAGE_BYTES
    with control(SECRET, longest) as (source, _), control(SECRET) as (reader, here):
        reader.dial(peer_of(source), HELLO)
        assert here.news.get(timeout=AT_ONCE_S) == longest


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, OTHER), (SECRET, ""), ("", SECRET)])
def test_another_secret_or_none_is_told_at_once_with_the_remedy(theirs: str, ours: str) -> None:
    with control(theirs) as (source, there), control(ours) as (reader, here):
        reader.dial(peer_of(source), HELLO)
        assert here.news.get(timeout=AT_ONCE_S) == ENDED_EARLY
        assert "set the same KVRELAY_CLUSTER_SECRET on all nodes" in ENDED_EARLY
        assert there.asked == []
        with pytest.raises(queue.Empty):
            here.news.get(timeout=0.1)  # it is told once


def test_a_socket_has_its_linger_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection keeps the value of that moment; without one a lost reply would wait for good."""
    seen, listen = list[int](), sockets.listen

    def bound(listener: zmq.Socket[Any], host: str, port: int) -> int:
        seen.append(listener.linger)
        return listen(listener, host, port)

    monkeypatch.setattr(sockets, "listen", bound)
    with control(SECRET):
        assert seen == [sockets.LINGER_MS]


def test_a_stranger_with_a_key_pair_of_its_own_gets_no_word_in_or_out() -> None:
    """He does not know the server's public key, which is made of the secret like the other one."""
    with control(SECRET) as (source, there), zmq.Context() as context:
        host, port = source.address
        public, secret = zmq.curve_keypair()
        for server_key in (public, zmq.curve_keypair()[0]):
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                stranger.curve_publickey, stranger.curve_secretkey = public, secret
                stranger.curve_serverkey = server_key
                stranger.connect(f"tcp://{host}:{port}")
                stranger.send(encode(HELLO))
                assert stranger.poll(200) == 0
        with socket.create_connection((host, port), timeout=2.0) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with control(SECRET) as (reader, here):  # and the others go on
            reader.dial(peer_of(source), HELLO)
            assert here.news.get(timeout=AT_ONCE_S) == HELLO
        assert there.asked == [HELLO]


def test_a_libzmq_without_curve_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: False)
    with pytest.raises(ConfigError, match=r"cluster_secret needs CURVE, .* pip install"):
        ControlThread(Ears(HELLO), "127.0.0.1", 0, SECRET)


# The same over whole engines: what a ticket leads to, and what it does not.


def fetch(reader: Any, ticket: Ticket) -> list[Any]:
    reader.fetch("r", ticket, [1], [3])
    return list(reader.wait(2))


def test_kv_moves_by_a_signed_ticket_and_nothing_is_dialled_for_a_forged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A listener of a stranger, to which forged tickets lead: nobody ever connects."""
    caplog.set_level(logging.DEBUG)
    with (
        socket.create_server(("127.0.0.1", 0)) as stranger,
        node("source", tmp_path, SECURE) as source,
        node("reader", tmp_path, SECURE) as reader,
    ):
        good, port = source.engine.offer("r", [1], 16), stranger.getsockname()[1]
        moved = msgspec.structs.replace(good, remote_port=port)
        bare = msgspec.structs.replace(moved, signature=None)
        old = signed(moved, SECRET, time.time() - 3600)
        for ticket, word in ((moved, "altered"), (bare, "not signed"), (old, "expired")):
            assert word in reason(fetch(reader, ticket)[0])
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.accept()
        reader.fetch("good", good, [1], [3])
        reader.fetched()
        assert reader.backend.read(3) == pattern(1)
    assert SECRET not in caplog.text


def test_without_a_secret_an_engine_listens_and_dials_on_this_machine_only(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"kv_host must be a loopback address, got '10.1.2.3'; set the same KVRELAY_",
    ):
        TransferConfig(kv_host="10.1.2.3")
    with node("source", tmp_path) as source, node("reader", tmp_path) as reader:
        away = msgspec.structs.replace(source.engine.offer("r", [1], 16), remote_host="10.1.2.3")
        failed, settled = fetch(reader, away)
        assert "a ticket may lead to a loopback address only, not to '10.1.2.3'" in reason(failed)
        assert settled == Settled("r")


def test_a_knock_tells_a_process_that_is_gone_from_one_that_is_there() -> None:
    with control("") as (source, there), control("") as (reader, here):
        reader.probe(peer_of(source))
        with pytest.raises(queue.Empty):
            here.news.get(timeout=0.2)
        source.close(2.0)
        reader.probe(peer_of(source))
        assert here.news.get(timeout=AT_ONCE_S) == "vanished"
        reader.probe(PeerKey("no such host.invalid", 1, "g"))
        with pytest.raises(queue.Empty):
            here.news.get(timeout=0.2)
        assert there.asked == []
