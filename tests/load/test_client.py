"""The client against a server whose times are known: it measures what happened, and no failure
passes for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai_double import Double, Told, begin, end, event, over, paced, serving, token, whole

from kvrelay.load.client import Answer, Connections
from kvrelay.load.conductor import Outcome, conduct, cores
from kvrelay.load.experiment import ServerUnusable, ask_server
from kvrelay.load.measures import tpot_ms, ttft_ms
from kvrelay.load.records import Asking, Failure, Load
from kvrelay.load.sessions import Arrival, Spelling, Work

DEADLINE_S = 120.0


def asking(double: Double, *, chat: bool = False, **more: object) -> Asking:
    return Asking(double.url, "key", "double", chat, Spelling(), **more)  # type: ignore[arg-type]


async def put(how: Asking, load: Load, processes: int = 1) -> Outcome:
    async with asyncio.timeout(DEADLINE_S):
        return await conduct(how, load, processes)


def closed(requests: int, clients: int = 1, output: int = 4, **more: object) -> Load:
    return Load(Work(16, output, **more), Arrival(), "s", clients, requests)  # type: ignore[arg-type]


async def test_what_is_measured_is_what_happened() -> None:
    """By the server's own clock, which is the same: a busy machine makes both late."""
    async with serving(paced(0.06, 0.02)) as double:
        outcome = await put(asking(double), closed(12, clients=3, output=12))
    told = {each.came: each for each in double.told}
    assert len(outcome.records) == len(told) == 12
    off_first, off_gap = [], []
    for record, true in zip(
        sorted(outcome.records, key=lambda r: r.sent_s), sorted(told), strict=True
    ):
        assert (record.failure, record.output_tokens, record.chunks, record.prompt_tokens) == (
            "",
            12,
            12,
            16,
        )
        wrote = told[true].wrote
        off_first.append(abs(ttft_ms(record) - (wrote[0] - told[true].came) * 1e3))
        mean = (wrote[-1] - wrote[0]) / 11 * 1e3
        off_gap.append(abs((tpot_ms(record) or 0) - mean))
        assert ttft_ms(record) >= 60
    assert statistics.median(off_first) < 10
    assert statistics.median(off_gap) < 2


@pytest.mark.parametrize("processes", [1, 2])
async def test_the_requests_that_were_asked_for_come_behind_the_warm_up(processes: int) -> None:
    async with serving(paced(0.05, 0.0)) as double:
        alone = await put(asking(double), closed(3, clients=2), processes)
        assert len(alone.records) == 3
        several = await put(
            asking(double), msgspec.structs.replace(closed(3, clients=2), warm_up_s=0.3), processes
        )
        rate = Arrival("constant", 20.0)
        load = Load(Work(16, 2), rate, "s", requests=3, warm_up_s=0.3)
        arriving = await put(asking(double), load, processes)
    for outcome in (several, arriving):
        assert len(outcome.records) > 3
        assert sum(record.due_s >= 0.3 for record in outcome.records) == 3


async def test_an_open_loop_sends_on_time_whatever_is_answered() -> None:
    """Answers take a second, requests come every 50 ms; two processes share them."""
    load = Load(Work(16, 2), Arrival("constant", 20.0), "s", sending_s=2.0, judged_s=2.0)
    async with serving(paced(1.0, 0.01)) as double:
        outcome = await put(asking(double), load, processes=2)
    dues = [record.due_s for record in outcome.records]
    assert dues == pytest.approx([0.05 * at for at in range(1, 40)])
    assert all(record.failure == "" for record in outcome.records)
    assert statistics.median(record.sent_s - record.due_s for record in outcome.records) < 0.1
    assert len(outcome.cpu_shares) == 2
    prompts = {tuple(each.body["prompt"]) for each in double.told}
    assert len(prompts) == 39
    assert outcome.lags_s


async def said(how: str, told: Told, writer: asyncio.StreamWriter) -> None:
    """An answer that is no good."""
    if how == "status":
        whole(writer, {"error": {"message": "no room"}}, 503)
        return
    if how == "silent":
        await asyncio.sleep(60)
        return
    if how == "no http":
        writer.write(b"what?\r\n\r\n")
        return
    if how == "cut":
        begin(writer)
        token(told, writer)
        writer.write(b"40\r\ndata: ")
        writer.close()
        return
    if how == "closed":
        writer.close()
        return
    begin(writer)
    if how == "in band":
        token(told, writer)
        event(writer, {"error": {"message": "the engine has ended", "code": 500}})
    elif how == "no end":
        token(told, writer)
    elif how == "empty":
        end(told, writer, 0)
        return
    elif how == "short":
        token(told, writer)
        end(told, writer, 1)
        return
    over(writer)


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("status", Failure.STATUS),
        ("silent", Failure.DEADLINE),
        ("no http", Failure.MALFORMED),
        ("cut", Failure.EARLY_END),
        ("closed", Failure.CONNECT),
        ("in band", Failure.IN_BAND),
        ("no end", Failure.EARLY_END),
        ("empty", Failure.EMPTY),
        ("short", Failure.SHORT),
    ],
)
async def test_every_kind_of_failure_is_one(how: str, failure: Failure) -> None:
    """And the next request is a good one: nothing is left of the failed one."""
    answers = iter([how])

    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        first = next(answers, "")
        await (said(first, told, writer) if first else paced(0.0, 0.0)(double, told, writer))

    async with serving(say) as double:
        outcome = await put(asking(double, deadline_s=5.0), closed(2))
    assert [record.failure for record in outcome.records] == [failure, ""]
    assert outcome.records[0].why


async def test_nobody_there_is_a_failure() -> None:
    async with serving(paced(0, 0)) as double:
        pass
    outcome = await put(asking(double), closed(2))
    assert [record.failure for record in outcome.records] == [Failure.CONNECT] * 2


async def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        await paced(0, 0)(double, told, writer)
        await writer.drain()
        writer.close()

    async with serving(say) as double:
        outcome = await put(asking(double), closed(4))
    assert [record.failure for record in outcome.records] == [""] * 4
    assert double.connections == 4


async def test_a_connection_that_dies_under_a_request_is_a_failure() -> None:
    """The second request is not asked again in secret: it was with the server for a while."""

    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        if len(double.told) == 1:
            await paced(0, 0)(double, told, writer)
            return
        await asyncio.sleep(0.3)
        writer.close()

    async with serving(say) as double:
        outcome = await put(asking(double), closed(2))
    assert [record.failure for record in outcome.records] == ["", Failure.CONNECT]
    assert (len(double.told), double.connections) == (2, 1)


async def test_there_is_a_file_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual limit is a soft one."""
    spawn, usual = asyncio.create_subprocess_exec, resource.getrlimit(resource.RLIMIT_NOFILE)

    async def with_few(*command: str, **more: Any) -> asyncio.subprocess.Process:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, usual[1]))
        try:
            return await spawn(*command, **more)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", with_few)
    async with serving(paced(1.0, 0)) as double:
        outcome = await put(asking(double), closed(160, clients=160, output=1))
    assert [record.failure for record in outcome.records] == [""] * 160


@pytest.mark.parametrize(
    ("number", "failure"),
    [
        (errno.EMFILE, Failure.CLIENT),
        (errno.EADDRNOTAVAIL, Failure.CLIENT),
        (errno.ECONNREFUSED, Failure.CONNECT),
    ],
)
async def test_what_the_client_has_too_few_of_is_its_own(
    number: int, failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    answer = Answer()
    await Connections("http://127.0.0.1:1", "", False, {}).ask(b"{}", answer, 1, exact=True)
    assert answer.failure == failure


async def test_a_pause_of_the_client_is_as_long_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1.5 s, stopped for 0.6: two fifths of the ticks were late."""
    load = Load(Work(16, 2), Arrival("constant", 10.0), "s", sending_s=1.5, judged_s=1.5)
    stopped: list[int] = []
    spawn = asyncio.create_subprocess_exec

    async def known(*command: str, **more: Any) -> asyncio.subprocess.Process:
        child = await spawn(*command, **more)
        stopped.append(child.pid)
        return child

    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        if len(double.told) == 2:
            os.kill(stopped[0], signal.SIGSTOP)
            await asyncio.sleep(0.6)
            os.kill(stopped[0], signal.SIGCONT)
        await paced(0, 0)(double, told, writer)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", known)
    async with serving(say) as double:
        outcome = await put(asking(double), load, processes=2)
    assert 40 < len(outcome.lags_s) < 80  # of one process, each 20 ms
    assert max(outcome.lags_s) > 0.5
    assert sum(lag > 0.1 for lag in outcome.lags_s) > 20


async def test_connections_are_kept() -> None:
    async with serving(paced(0, 0)) as double:
        await put(asking(double), closed(12, clients=2))
    assert double.connections == 2
    assert len(double.told) == 12


async def test_turns_hold_what_was_really_answered() -> None:
    answers = iter(["Hello", " there", "Well", " now"])

    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        begin(writer)
        for _ in range(2):
            token(told, writer, next(answers))
        end(told, writer, 2)

    async with serving(say) as double:
        outcome = await put(asking(double, chat=True), closed(1, output=2, turns=2, think_s=0.01))
    first, second = (each.body["messages"] for each in double.told)
    assert [each["role"] for each in second] == ["user", "assistant", "user"]
    assert second[0] == first[0]
    assert second[1]["content"] == "Hello there"
    assert second[2]["content"] != first[0]["content"]
    assert [(record.turn, record.failure) for record in outcome.records] == [(0, ""), (1, "")]
    assert double.told[0].path == "/v1/chat/completions"


async def test_turns_that_a_failure_has_left_unsent_have_failed_too() -> None:
    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        await (
            paced(0, 0)(double, told, writer)
            if len(double.told) == 1
            else said("no end", told, writer)
        )

    async with serving(say) as double:
        outcome = await put(asking(double, chat=True), closed(1, turns=4, think_s=0.01))
    assert len(double.told) == 2
    found = sorted((record.turn, record.failure) for record in outcome.records)
    assert found == [(0, ""), (1, Failure.EARLY_END), (2, Failure.UNSENT), (3, Failure.UNSENT)]
    assert "turn 4 of 4 was not sent" in {record.why for record in outcome.records}


async def test_who_is_not_answered_when_the_run_is_over_is_cut() -> None:
    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    load = Load(
        Work(16, 2), Arrival("constant", 10.0), "s", sending_s=0.55, judged_s=0.55, drain_s=0.2
    )
    async with serving(say) as double:
        outcome = await put(asking(double), load)
    assert [record.failure for record in outcome.records] == [Failure.CUT] * 5


async def test_who_may_still_meet_the_targets_is_not_cut() -> None:
    """Answers take 600 ms, of 2 s that they have; the run is over before."""
    load = Load(
        Work(16, 4),
        Arrival("constant", 10.0),
        "s",
        sending_s=0.55,
        judged_s=0.55,
        drain_s=0.0,
        first_s=1.0,
        token_s=0.25,
    )
    async with serving(paced(0.6, 0)) as double:
        outcome = await put(asking(double), load)
    assert [record.failure for record in outcome.records] == [""] * 5


async def test_a_closed_loop_does_not_go_by_the_times_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at * 60_000, "input_length": 16, "output_length": 2, "hash_ids": [at]}
        for at in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    load = Load(Work(trace=str(path)), Arrival(), "s", clients=2, sending_s=30.0)
    async with serving(paced(0, 0)) as double:
        outcome = await put(asking(double), load)
    assert [record.failure for record in outcome.records] == [""] * 6


async def test_those_that_only_keep_the_load_up_are_not_waited_for() -> None:
    """Due after the time that counts; their answers take a minute, and the run does not."""

    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        await (asyncio.sleep(60) if len(double.told) > 5 else paced(0, 0)(double, told, writer))

    load = Load(Work(16, 2), Arrival("constant", 10.0), "s", sending_s=0.95, judged_s=0.55)
    async with serving(say) as double:
        outcome = await put(asking(double), load)
    assert [record.failure for record in outcome.records] == [""] * 5
    assert len(double.told) > 5


async def test_a_server_is_asked_what_it_is() -> None:
    """It makes two tokens of a word, and seven more of a template."""
    async with serving(paced(0, 0)) as double:
        server = await ask_server(double.url, "", "", chat=True)
        assert (server.model, server.version, server.spelling) == ("double", "", Spelling(0.5, 7))
    with pytest.raises(ServerUnusable, match="cannot be reached"):
        await ask_server(double.url, "", "", chat=False)


async def test_no_process_is_left_when_the_command_is_interrupted() -> None:
    async with serving(paced(30, 0)) as double:
        running = asyncio.create_task(conduct(asking(double), closed(2), 2))
        async with asyncio.timeout(DEADLINE_S):
            while not double.told:
                await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(DEADLINE_S):
                await running
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [command for command in commands if b"kvrelay.load.sender" in command]


@pytest.mark.parametrize(
    ("said", "least"), [("max 100000", 0), ("150000 100000", 1), ("5000 100000", 1), ("?", 0)]
)
def test_a_containers_limit_counts_as_cores(said: str, least: int, tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text(f"{said}\n", encoding="ascii")
    assert cores(limit) == (least or len(os.sched_getaffinity(0)))
    assert cores(tmp_path / "none") == len(os.sched_getaffinity(0))


async def test_several_servers_are_asked_in_turn_and_told_the_targets() -> None:
    async with serving(paced(0, 0)) as one, serving(paced(0, 0)) as two:
        how = asking(one, others=[two.url], headers={"x-slo-ttft-ms": "200"})
        outcome = await put(how, closed(12, clients=3), processes=2)
    assert [record.failure for record in outcome.records] == [""] * 12
    assert (len(one.told), len(two.told)) == (6, 6)
    assert {each.headers.get("x-slo-ttft-ms") for each in (*one.told, *two.told)} == {"200"}
