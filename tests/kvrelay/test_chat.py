"""The terminal client: it streams, keeps the conversation, and tells failures in one line."""

from __future__ import annotations

import io
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import aiohttp
import pytest
from stand_in_server import StandIn

from kvrelay import chat as chat_module
from kvrelay import cli

ANSWER = "A cache of keys and values."


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.mark.parametrize(
    ("typed", "code", "out", "err"),
    [
        ("one\ntwo\n", 0, [f"{ANSWER} (1)", f"{ANSWER} (3)"], ""),
        ("\none\n\n/exit\ntwo\n", 0, [f"{ANSWER} (1)"], ""),
        ("think\n", 0, [f"Let me see.{ANSWER} (1)"], ""),
        ("refuse\none\n", 1, [], "the server refused with 429: "),
        ("break\n", 1, ["A"], "the answer broke off: "),
    ],
)
def test_piped_questions_are_answered_line_by_line_with_history(
    typed: str,
    code: int,
    out: list[str],
    err: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert cli.run(["chat", "--url", url]) == code
    told = capsys.readouterr()
    assert told.out.splitlines() == out
    assert err in told.err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--url", "ftp://r"], 2, "'ftp://r' is not a server's address"),
        (["--url", "10.0.0.1/v1"], 2, "not a server's address; give one like 10.0.0.1:8000"),
        (["--url", ""], 2, "'' is not a server's address"),
        (["--url", "127.0.0.1:1"], 1, "no OpenAI server answers at http://127.0.0.1:1 ("),
    ],
)
def test_what_is_wrong_is_one_line_and_no_question_is_asked(
    flags: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["chat", *flags]) == code
    told = capfd.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_server_that_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat_module, "_DEADLINE", aiohttp.ClientTimeout(total=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert cli.run(["chat", "--url", url]) == 1
    assert f"no OpenAI server answers at {url} (TimeoutError())" in capfd.readouterr().err
