"""`python -m benchmarks.chaos`: what it draws, how it reads answers, and what it calls a broken promise."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from benchmarks.chaos.asks import KINDS, asks
from benchmarks.chaos.crowd import Seen
from benchmarks.chaos.faults import LONGEST_S, SHORTEST_S, drawn
from benchmarks.chaos.streams import Heard, difference
from benchmarks.chaos.verdict import MARGIN_S, broken_legs, judged, none_up


def event(*choices: dict[str, object], **fields: object) -> bytes:
    every = [{"index": 0, "text": "", "finish_reason": None, **choice} for choice in choices]
    return b"data: " + json.dumps({"id": "x", "created": 1, "choices": every, **fields}).encode() + b"\n"


DONE = b"data: [DONE]\n"
END = event({"finish_reason": "length"})


def heard(*lines: bytes) -> Heard:
    found = Heard()
    for line in lines:
        found.line(line)
    return found


def test_a_seed_draws_the_same_faults_again_and_all_of_their_kinds_in_time() -> None:
    faults = drawn(3, 300, 3, range(5))
    assert faults == drawn(3, 300, 3, range(5)) != drawn(4, 300, 3, range(5))
    assert {fault.kind for fault in faults} == {"kill", "stop", "restart", "kill engine", "stop engine"}
    assert {len(fault.nodes) for fault in faults} == {1, 2}
    assert {node for fault in faults for node in fault.nodes} == set(range(5))
    for fault in faults:
        assert 0 < fault.at < 300
        assert fault.for_s == 0 or SHORTEST_S <= fault.for_s <= LONGEST_S
        assert fault.at + fault.for_s <= 300 + SHORTEST_S


def test_asks_are_of_all_kinds_and_stand_behind_what_they_build_on() -> None:
    made = asks(1, 2, 1000)
    assert made == asks(1, 2, 1000) or [ask.fields for ask in made] == [ask.fields for ask in asks(1, 2, 1000)]
    assert {ask.kind for ask in made} == set(KINDS)
    assert [ask.number for ask in made] == list(range(len(made)))
    for ask in made:
        assert (ask.after is None) == (ask.then is None)
        assert ask.after is None or ask.after == ask.number - 1
    turn = next(ask for ask in made if ask.kind == "conversation" and ask.then is not None)
    assert turn.then is not None
    assert turn.after is not None
    said = turn.then(made[turn.after].fields, "Yes.")["messages"]
    assert [message["role"] for message in said] == ["user", "assistant", "user"]
    assert said[1]["content"] == "Yes."


def test_answers_are_equal_however_they_were_cut() -> None:
    one = heard(event({"text": "ab", "token_ids": [1, 2], "logprobs": {"tokens": ["a", "b"]}}), END, DONE)
    parts = [
        event({"text": text, "token_ids": [at], "logprobs": {"tokens": [text]}}) for at, text in ((1, "a"), (2, "b"))
    ]
    other = heard(*parts, b": keep-alive\n", b"\n", END, DONE)
    assert (one.end, other.end, one.pieces, other.pieces) == ("done", "done", 1, 2)
    assert difference(one.answer(), other.answer()) == ""


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ((event({"text": "a"}),), ""),  # silently
        ((event({"text": "a"}), DONE), "[DONE] before the end of choices [0]"),
        ((DONE,), "[DONE] before the end"),
        ((event({"text": "a"}), END, DONE, DONE), "came behind the end (done)"),
        ((event({"text": "a"}), END, event({"text": "b"}), DONE), "goes on behind its end"),
        ((event({"delta": {"role": "assistant"}}), event({"delta": {"role": "assistant"}})), "begins twice"),
        ((event({"text": "a"}), event({"text": "b"}, id="y")), "it changes from ('x', 1) to ('y', 1)"),
        ((b'data: {"error": {"message": "no"}}\n', DONE), "error"),
        ((b'data: {"error": {"message": "no"}}\n', DONE, DONE), "came behind the end"),
    ],
)
def test_what_an_answer_may_not_do_is_named(lines: tuple[bytes, ...], end: str) -> None:
    assert end in heard(*lines).end
    assert bool(end) == bool(heard(*lines).end)


@pytest.mark.parametrize(
    ("text", "says"),
    [("abd", "other from 2 on: 'd', not 'c'"), ("ab", "2 instead of 3 long"), ("abbc", "4 instead of 3 long")],
)
def test_a_token_that_is_lost_or_doubled_is_named(text: str, says: str) -> None:
    twin = heard(event({"text": "abc", "token_ids": [1, 2, 3]}), END, DONE)
    got = heard(event({"text": text, "token_ids": [1, 2, 3]}), END, DONE)
    assert says in difference(twin.answer(), got.answer())


def test_no_node_is_up_where_all_are_down_at_once() -> None:
    down = {"prefill": [[(0.0, 10.0)], []], "decode": [[(1.0, 5.0), (20.0, 30.0)], [(4.0, 9.0), (25.0, 26.0)]]}
    assert none_up(down) == {"prefill": [], "decode": [(4.0, 5.0 + MARGIN_S), (25.0, 26.0 + MARGIN_S)]}


def seen(end: str, began: float, ended: float, **fields: object) -> Seen:
    return Seen(1, "greedy", began, id="r1", end=end, ended=ended, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "broken"),
    [
        (seen("done", 0, 9, times=[1.0, 8.0]), ""),
        (seen("refused", 4, 6, status=503), ""),
        (seen("error", 4, 6, status=200), ""),
        (seen("refused", 50, 51, status=503), "though nodes were up"),
        (seen("silent", 4, 6), "silent"),
        (seen("hung", 4, 6), "hung"),
        (seen("unequal", 4, 6), "unequal"),
        (seen("done", 50, 99, times=[51.0, 60.0]), "nothing came for 39.0 s"),
        (seen("done", 0, 42, times=[3.0]), ""),  # waited while no decode node was up
    ],
)
def test_what_breaks_a_promise(one: Seen, broken: str) -> None:
    verdict = judged([one], {}, [], [(5.0, 35.0)], 30.0)
    assert bool(verdict.broken) == bool(broken)
    assert broken in "".join(verdict.broken)


def test_the_gap_at_a_fail_over_is_that_of_streams_of_which_a_decode_leg_broke() -> None:
    at, clock_s = datetime(2031, 5, 6, 7, 8, 9), datetime(2031, 5, 6, 7, 8, 7).timestamp()
    says = f"{at:%Y-%m-%d %H:%M:%S},500 WARNING router id="
    log = [f"{says}r1: the decode leg broke on http://n: cut", f"{says}r2: the prefill leg broke on http://n: cut", "y"]
    legs = broken_legs(log, clock_s)
    assert legs == {"r1": [(2.5, "decode", "http://n")], "r2": [(2.5, "prefill", "http://n")]}
    blows = [(0.5, "stop", "http://n"), (2.0, "kill", "http://n"), (3.0, "stop", "http://m"), (9.0, "stop", "http://n")]
    verdict = judged([seen("done", 0, 9, times=[1.0, 4.0, 8.0])], legs, blows, [], 30.0)
    assert (verdict.gap_ms.max, verdict.failed_over) == (3000.0, 1)
    assert verdict.gap_ms_by_fault == {"kill": verdict.gap_ms}
