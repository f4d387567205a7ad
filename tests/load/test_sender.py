"""Loads put on a server whose times are known: what is recorded is what happened."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os

import pytest
from openai_double import Double, Say, Told, begin, end, paced, serving, token

from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import inspect_server
from kvrelay.load.measures import Failure, tpot_ms, ttft_ms
from kvrelay.load.sender import Load, Outcome, Server, send_load
from kvrelay.load.workloads import Arrival, Spelling, Work, agents_of, sessions

DEADLINE_S = 120.0


SERVER = Server("double", "", Spelling())


def asking(*doubles: Double, chat: bool = False, **more: object) -> BenchConfig:
    url, endpoint = ",".join(double.url for double in doubles), "chat" if chat else "completions"
    return BenchConfig(url, "key", endpoint=endpoint, rate="1", **more)  # type: ignore[arg-type]


async def sent(config: BenchConfig, load: Load) -> Outcome:
    async with asyncio.timeout(DEADLINE_S):
        return await send_load(config, SERVER, load)


def closed(requests: int, clients: int = 1, output: int = 4) -> Load:
    return Load(Work(16, output), Arrival(), "s", clients, requests)


def turns(count: int) -> Load:
    agents = agents_of(f"fleet,turns={count},branch=0,output=2,gap_s=0.01")
    return Load(Work(agents=agents), Arrival(), "s", 1, 1)


def constant(rate: float, output: int = 2, **more: float) -> Load:
    return Load(Work(16, output), Arrival("constant", rate), "s", **more)  # type: ignore[arg-type]


def failures(outcome: Outcome) -> list[str]:
    return [record.failure for record in outcome.records]


def after(count: int, then: Say) -> Say:
    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        answer = then if len(double.told) > count else paced(0, 0)
        await answer(double, told, writer)

    return say


async def test_what_is_measured_is_what_happened() -> None:
    """The server's clock is the same one, so a busy machine makes both late."""
    async with serving(paced(0.06, 0.02)) as double:
        outcome = await sent(asking(double), closed(12, clients=3, output=12))
    told = {each.came: each for each in double.told}
    assert len(outcome.records) == len(told) == 12
    assert double.connections == 3
    off_first, off_gap = [], []
    for record, came in zip(
        sorted(outcome.records, key=lambda each: each.sent_s), sorted(told), strict=True
    ):
        assert record.failure == ""
        assert (record.output_tokens, record.chunks, record.prompt_tokens) == (12, 12, 16)
        wrote = told[came].wrote
        off_first.append(abs(ttft_ms(record) - (wrote[0] - came) * 1e3))
        off_gap.append(abs((tpot_ms(record) or 0) - (wrote[-1] - wrote[0]) / 11 * 1e3))
        assert ttft_ms(record) >= 60
    # What is wrong with a clock is wrong each time; a busy machine only adds.
    assert min(off_first) < 10
    assert min(off_gap) < 2


async def test_the_requests_that_were_asked_for_follow_the_warm_up() -> None:
    async with serving(paced(0.05, 0.0)) as double:
        to = asking(double)
        assert len((await sent(to, closed(3, clients=2))).records) == 3
        work, poisson, steady = Work(16, 2), Arrival(), Arrival("constant", 20.0)
        for load in (
            Load(work, poisson, "s", clients=2, requests=3, warm_up_s=0.3),
            Load(work, steady, "s", requests=3, warm_up_s=0.3),
        ):
            outcome = await sent(to, load)
            assert sum(record.due_s >= 0.3 for record in outcome.records) == 3
        assert len(outcome.records) > 3


async def test_an_open_loop_sends_on_time_whatever_is_answered() -> None:
    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        while len(double.told) < 39:
            await asyncio.sleep(0.01)
        await paced(0, 0)(double, told, writer)

    async with serving(say) as double:
        outcome = await sent(asking(double), constant(20.0, sending_s=2.0, judged_s=2.0))
    dues = [record.due_s for record in outcome.records]
    assert dues == pytest.approx([0.05 * at for at in range(1, 40)])
    assert failures(outcome) == [""] * 39
    assert min(record.sent_s - record.due_s for record in outcome.records) < 0.1
    assert len({tuple(each.body["prompt"]) for each in double.told}) == 39


BEGUN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORD = b'data: {"choices": [{"index": 0, "text": " word", "finish_reason": null}]}\n\n'
NO_END = BEGUN + b"%x\r\n%b\r\n0\r\n\r\n" % (len(WORD), WORD)


STATUS = b"HTTP/1.1 503 X\r\ncontent-length: 7\r\n\r\nno room"


def saying(said: bytes | None) -> Say:
    """Say this and close the connection, unless it is whole; None says nothing."""

    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        if said is None:
            await asyncio.sleep(60)
        writer.write(said or b"")
        if said not in (STATUS, NO_END):
            writer.close()

    return say


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        (STATUS, Failure.STATUS),
        (None, Failure.DEADLINE),
        (b"what?\r\n\r\n", Failure.MALFORMED),
        (BEGUN + b"200000\r\ndata: " + b"x" * (1 << 21), Failure.MALFORMED),
        (BEGUN + b"40\r\ndata: ", Failure.EARLY_END),
        (b"", Failure.CONNECT),
        (NO_END, Failure.EARLY_END),
    ],
    ids=["status", "silent", "no http", "long line", "cut", "closed", "no end"],
)
async def test_a_failure_is_recorded_and_leaves_nothing_behind(
    how: bytes | None, failure: Failure
) -> None:
    bad = [how]

    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        await (saying(bad.pop()) if bad else paced(0.0, 0.0))(double, told, writer)

    async with serving(say) as double:
        outcome = await sent(asking(double, deadline_s=5.0), closed(2))
    assert failures(outcome) == [failure, ""]
    assert outcome.records[0].why
    assert len(double.told) == 2, "it may have reached the server, so it is not sent again"


@pytest.mark.parametrize(
    ("number", "failure"),
    [
        (errno.EMFILE, Failure.CLIENT),
        (errno.EADDRNOTAVAIL, Failure.CLIENT),
        (errno.ECONNREFUSED, Failure.CONNECT),
    ],
)
async def test_too_few_files_or_ports_are_the_clients_fault(
    number: int, failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    async with serving(paced(0, 0)) as double:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
        assert failures(await sent(asking(double), closed(1))) == [failure]


async def test_turns_hold_what_was_really_answered() -> None:
    answers = iter(["Hello", " there", "Well", " now"])

    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        begin(writer)
        for _ in range(2):
            token(told, writer, next(answers))
        end(told, writer, 2)

    async with serving(say) as double:
        outcome = await sent(asking(double, chat=True), turns(2))
    first, second = (each.body["messages"] for each in double.told)
    assert [each["role"] for each in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first
    assert second[2]["content"] == "Hello there"
    assert second[3]["content"] != first[1]["content"]
    assert [(record.turn, record.failure) for record in outcome.records] == [(0, ""), (1, "")]
    assert double.told[0].path == "/v1/chat/completions"


async def test_sub_agents_say_what_their_parent_had_heard_and_it_waits_for_them() -> None:
    work = Work(agents=agents_of("fleet,turns=3,branch=1,branches=2,branch_turns=2,gap_s=0.01"))
    async with serving(paced(0.01, 0.0)) as double:
        outcome = await sent(
            asking(double, chat=True), Load(work, Arrival(), "s", requests=1, clients=1)
        )
    (session,) = itertools.islice(sessions(work, Arrival(), "s"), 1)
    assert not any(failures(outcome))
    assert len(outcome.records) == len(double.told) == len(session.all_turns) == 3 + 2 * 2 * 2
    said = [each.body["messages"] for each in double.told]
    assert all(each[0] == said[0][0] and each[0]["role"] == "system" for each in said)
    whole = said[-1]  # the last turn of the parent
    assert [each["role"] for each in whole] == ["system", *["user", "assistant"] * 2, "user"]
    theirs = [each for each in said if each != whole[: len(each)]]
    shared = [len(each) - 1 for each in theirs if each[:-1] == whole[: len(each) - 1]]
    branches = [branch for turn in session.turns for branch in turn.branches]
    assert sorted(shared) == sorted(1 + 2 * each.keeps for each in branches)
    spawned, heard = (double.told[at] for at in (1, 5))
    assert heard.body["messages"] == whole[:4], "its second turn, after both sub-agents"
    assert heard.came >= max(each.wrote[-1] for each in double.told[1:5])
    assert spawned.body["max_tokens"] == session.turns[1].branches[0].turns[0].output


async def test_turns_that_a_failure_has_left_unsent_have_failed_too() -> None:
    async with serving(after(1, saying(NO_END))) as double:
        outcome = await sent(asking(double, chat=True), turns(3))
    assert len(double.told) == 2
    found = sorted((record.turn, record.failure) for record in outcome.records)
    assert found == [(0, ""), (1, Failure.EARLY_END), (2, Failure.UNSENT)]


async def test_a_request_is_cut_unless_it_may_still_meet_its_targets() -> None:
    """The run is over before the answers: without end, or after 600 ms of the 2 s they have."""
    async with serving(saying(None)) as double:
        load = constant(10.0, sending_s=0.55, judged_s=0.55, drain_s=0.2)
        assert failures(await sent(asking(double), load)) == [Failure.CUT] * 5
    async with serving(paced(0.6, 0)) as double:
        load = constant(
            10.0, 4, sending_s=0.55, judged_s=0.55, drain_s=0.0, first_s=1.0, token_s=0.25
        )
        assert failures(await sent(asking(double), load)) == [""] * 5


async def test_requests_after_the_counted_time_are_not_waited_for() -> None:
    async with serving(after(5, saying(None))) as double:
        outcome = await sent(asking(double), constant(10.0, sending_s=0.95, judged_s=0.55))
    assert failures(outcome) == [""] * 5
    assert len(double.told) > 5


async def test_a_server_is_asked_what_it_is() -> None:
    """The double makes two tokens of a word, and seven more of a template."""
    async with serving(paced(0, 0)) as double:
        server = await inspect_server(double.url, "", "", chat=True)
        assert (server.model, server.version, server.spelling) == ("double", "", Spelling(0.5, 7))


async def test_nothing_is_sent_after_an_interruption() -> None:
    async with serving(paced(30, 0)) as double:
        running = asyncio.create_task(send_load(asking(double), SERVER, constant(20.0)))
        async with asyncio.timeout(DEADLINE_S):
            while not double.told:
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait({running})
        left = [task for task in asyncio.all_tasks() if "Sender." in repr(task)]
    assert running.cancelled()
    assert not left


async def test_several_servers_are_asked_in_turn_and_told_the_targets() -> None:
    async with serving(paced(0, 0)) as one, serving(paced(0, 0)) as two:
        to = asking(one, two, tell_targets=True)
        assert failures(await sent(to, closed(12, clients=3))) == [""] * 12
    assert (len(one.told), len(two.told)) == (6, 6)
    headers = [each.headers for each in (*one.told, *two.told)]
    assert {each.get("x-slo-ttft-ms") for each in headers} == {"200"}
    assert {each.get("authorization") for each in headers} == {"Bearer key"}
