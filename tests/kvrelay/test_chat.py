"""The terminal client: streams, keeps the conversation, and tells every failure in a sentence."""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import aiohttp
import pytest
from rich.console import Console
from stand_in_server import StandIn

from kvrelay import chat as chat_module
from kvrelay import cli
from kvrelay.chat import Answer, ChatFailed, Endpoint, chat, open_session, proof, stream_answer


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A stand-in server on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Endpoint(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join(10)
    server.server_close()


async def ask(endpoint: Endpoint, question: str) -> tuple[Answer, list[str]]:
    """One question; the answer and its pieces as they came."""
    pieces: list[str] = []
    async with open_session() as session:
        messages = [{"role": "user", "content": question}]
        return await stream_answer(
            session, endpoint, "stand-in", messages, pieces.append, pieces.append
        ), pieces


async def test_an_answer_is_given_piece_by_piece_and_as_a_whole(endpoint: Endpoint) -> None:
    answer, pieces = await ask(endpoint, "what?")
    assert pieces == ["A", " cache", " of", " keys", " and", " values.", " (1)"]
    assert answer.text == "".join(pieces)
    assert answer.tokens == 7
    assert 0 < answer.ttft_s <= answer.total_s


async def test_the_summary_counts_the_rate_after_the_first_token() -> None:
    assert (
        Answer("x", 11, ttft_s=0.5, total_s=1.5).summary == "11 tokens, TTFT 500 ms, 10.0 tokens/s"
    )
    assert Answer("x", 1, ttft_s=0.5, total_s=0.5).summary == "1 tokens, TTFT 500 ms"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("refuse", "the server refused with 429: not today"),
        ("break", "the answer broke off: node lost"),
    ],
)
async def test_a_failed_answer_is_told_in_a_sentence(
    question: str, said: str, endpoint: Endpoint
) -> None:
    with pytest.raises(ChatFailed) as caught:
        await ask(endpoint, question)
    assert caught.value.message == said


async def test_a_server_that_is_not_there_is_told_with_the_remedy() -> None:
    with pytest.raises(
        ChatFailed, match=r"no server answers at http://127\.0\.0\.1:1 .*`kvrelay up`"
    ):
        async with open_session() as session:
            await Endpoint("http://127.0.0.1:1").model(session)


async def test_the_proof_shows_question_answer_and_figures(endpoint: Endpoint) -> None:
    console = Console(file=io.StringIO(), highlight=False)
    async with open_session() as session:
        await proof(session, endpoint, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "> In one or two sentences" in shown
    assert "A cache of keys and values." in shown
    assert "7 tokens, TTFT" in shown


def test_piped_questions_are_answered_line_by_line_with_history(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nnever\n"))
    out = Console(file=io.StringIO(), highlight=False)
    assert chat(endpoint, out, "", "", {}) == 0
    text = "A cache of keys and values."
    assert out.file.getvalue().splitlines() == [f"{text} (1)", f"{text} (3)", f"{text} (1)"]  # type: ignore[attr-defined]
    assert capsys.readouterr().err.count("TTFT") == 3


def test_reasoning_is_shown_beside_the_answer_and_counts_as_its_beginning(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("think\n"))
    out = Console(file=io.StringIO(), highlight=False)
    assert chat(endpoint, out, "", "", {}) == 0
    assert out.file.getvalue() == "A cache of keys and values. (1)\n"  # type: ignore[attr-defined]
    told = capsys.readouterr().err
    assert told.startswith("Let me see.\n\n7 tokens, TTFT ")
    assert "TTFT 0 ms" not in told


def test_a_piped_question_that_fails_is_exit_code_1_and_the_rest_is_asked(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("refuse\none\n"))
    out = Console(file=io.StringIO(), highlight=False)
    assert chat(endpoint, out, "", "", {}) == 1
    assert out.file.getvalue() == "A cache of keys and values. (1)\n"  # type: ignore[attr-defined]
    assert "not today" in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bodies that the stand-in server gets."""
    bodies: list[dict[str, Any]] = []
    answered = StandIn.do_POST

    def keep(self: StandIn) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        bodies.append(json.loads(raw))
        self.rfile = io.BytesIO(raw)
        answered(self)

    monkeypatch.setattr(StandIn, "do_POST", keep)
    return bodies


@pytest.mark.parametrize(
    "typed", ["{url}", "{url}/", "{url}/v1", "{url}/v1/", "{host}", "{host}/v1"]
)
def test_an_address_may_be_typed_as_people_have_it(
    typed: str, endpoint: Endpoint, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    host = endpoint.url.removeprefix("http://")
    assert cli.run(["chat", "--url", typed.format(url=endpoint.url, host=host)]) == 0
    assert asked == [
        {
            "model": "stand-in",
            "messages": [{"role": "user", "content": "one"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_what_is_given_goes_into_every_request(
    endpoint: Endpoint, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n/reset\ntwo\n"))
    flags = [
        "--temperature",
        "0",
        "--max-tokens",
        "5",
        "--system",
        "Be brief.",
        "--model",
        "stand-in",
    ]
    assert cli.run(["chat", "--url", endpoint.url, *flags]) == 0
    for body, question in zip(asked, ("one", "two"), strict=True):
        assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 5, "stand-in")
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": question},
        ]


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--url", "ftp://r"], 2, "'ftp://r' is no address of a server"),
        (
            ["--url", "nowhere"],
            2,
            "'nowhere' is no address of a server; give one like nowhere:8000",
        ),
        (
            ["--url", "10.0.0.1/v1"],
            2,
            "'10.0.0.1/v1' is no address of a server; give one like 10.0.0.1:8000",
        ),
        (["--url", ""], 2, "'' is no address of a server"),
        (["--url", "127.0.0.1:1"], 1, "no server answers at http://127.0.0.1:1"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--max-tokens", "0"], 2, "max-tokens"),
        (["--model", "other"], 1, "does not serve 'other'; it serves stand-in"),
    ],
)
def test_what_is_wrong_is_one_line_and_no_question_is_asked(
    flags: list[str], code: int, said: str, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["chat", "--url", endpoint.url, *flags]) == code
    told = capfd.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_server_that_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An open port of something else, for which a question waited ten minutes."""
    monkeypatch.setattr(chat_module, "_MODELS_DEADLINE", aiohttp.ClientTimeout(total=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert cli.run(["chat", "--url", url]) == 1
    assert capfd.readouterr().err == f"{url}/v1/models did not answer within 0.2 s\n"
