"""What is asked and when: arrivals, lengths, files; and that equal names are equal beginnings."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path

import pytest

from kvrelay.load.workloads import (
    FIRST_TOKEN,
    Arrival,
    Prompts,
    Session,
    Spelling,
    Turn,
    Work,
    arrival_times,
    sessions,
)
from kvrelay.wire.errors import ConfigError


def gaps(kind: str, rate: float, variation: float = 2.0) -> list[float]:
    times = list(
        itertools.islice(arrival_times(Arrival(kind, rate, variation), random.Random(7)), 20_000)
    )
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize(("kind", "varies"), [("constant", 0.0), ("poisson", 1.0), ("bursty", 2.0)])
def test_arrivals_have_their_rate_and_their_variation(kind: str, varies: float) -> None:
    found = gaps(kind, 8.0)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(varies, abs=0.1)


RATE = Arrival(rate=4.0)


def take(work: Work, arrival: Arrival = RATE, seed: str = "s", count: int = 50) -> list[Session]:
    return list(itertools.islice(sessions(work, arrival, seed), count))


def test_turns_count_as_requests_of_the_rate() -> None:
    asked = take(Work(turns=4), Arrival("constant", 8.0), count=10)
    assert [session.at for session in asked[:3]] == pytest.approx([0.5, 1.0, 1.5])
    assert [len(session.turns) for session in asked] == [4] * 10
    assert asked[0].turns[0].think_s == 0
    assert all(turn.think_s > 0 for session in asked for turn in session.turns[1:])


def trace(folder: Path, rows: list[tuple[int, int, list[int]]]) -> str:
    lines = [
        json.dumps({"timestamp": at, "input_length": tokens, "output_length": 9, "hash_ids": ids})
        for at, tokens, ids in rows
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


ROWS = [
    (1_000, 1_300, [0, 1, 2]),
    (1_500, 1_400, [0, 1, 3]),
    (3_000, 1_300, [0, 1, 2]),
    (5_000, 512, [7]),
]


def prompts(seed: str = "s") -> Prompts:
    return Prompts(seed, 32_000, Spelling(0.8, 5))


def test_equal_hashes_are_equal_beginnings(tmp_path: Path) -> None:
    asked = take(Work(trace=trace(tmp_path, ROWS)), Arrival("trace"))
    ids = [prompts().ids(session.turns[0]) for session in asked]
    assert [len(each) for each in ids] == [1_300, 1_400, 1_300, 512]
    assert ids[0][:1_024] == ids[1][:1_024]
    assert ids[0][1_024:1_100] != ids[1][1_024:1_100]
    assert ids[0] == ids[2]
    assert ids[3][:100] != ids[0][:100]
    assert all(FIRST_TOKEN <= each < 32_000 for each in ids[0])
    texts = [prompts().text(session.turns[0]) for session in asked]
    shared = " ".join(texts[0].split()[: 2 * 410])  # 0.8 words for each of 512 tokens
    assert texts[1].startswith(shared + " ")
    assert not texts[3].startswith(texts[0][:40])
    assert prompts("other").ids(asked[0].turns[0])[:50] != ids[0][:50]


def test_a_trace_has_its_times_and_may_be_stretched(tmp_path: Path) -> None:
    work = Work(trace=trace(tmp_path, ROWS))
    assert [each.at for each in take(work, Arrival("trace"))] == [0.0, 0.5, 2.0, 4.0]
    assert [each.at for each in take(work, Arrival("trace", 2.0))] == [0.0, 0.25, 1.0, 2.0]
    assert [each.at for each in take(work, Arrival("constant", 2.0))] == [0.5, 1.0, 1.5, 2.0]


def test_texts_are_as_long_as_the_server_counts() -> None:
    """It makes 1.25 tokens of a word, and 5 more of a template."""
    text = prompts().text(Turn(1, ((1, 512), (-1, 105))))
    assert len(text.split()) == round(512 * 0.8) + round(100 * 0.8)


def test_conversations_are_asked_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    said = [
        {"from": "human", "value": "one"},
        {"from": "gpt", "value": "a" * 40},
        {"from": "human", "value": "two"},
        {"from": "gpt", "value": "b" * 80},
    ]
    path.write_text(
        json.dumps([{"conversations": said}, {"conversations": said[:1]}]), encoding="utf-8"
    )
    (asked,) = take(Work(sharegpt=str(path), turns=5), count=1)
    assert [(turn.text, turn.output) for turn in asked.turns] == [("one", 10), ("two", 20)]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"timestamp": 1}', '[{"conversations": [{"from": "gpt"}]}]']
)
def test_files_of_another_kind_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    for work in (
        Work(trace=str(path)),
        Work(sharegpt=str(path)),
        Work(trace=str(tmp_path / "none")),
    ):
        with pytest.raises(ConfigError, match=r"file\.json|none"):
            take(work, Arrival("trace"))
