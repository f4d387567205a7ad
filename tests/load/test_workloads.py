"""What is asked and when: arrivals, lengths, files; and that equal names are equal beginnings."""

from __future__ import annotations

import itertools
import json
import math
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
    Work,
    agents_of,
    arrival_times,
    sessions,
)
from kvrelay.wire.errors import ConfigError


@pytest.mark.parametrize(("kind", "varies"), [("constant", 0.0), ("poisson", 1.0), ("bursty", 2.0)])
def test_arrivals_have_their_rate_and_their_variation(kind: str, varies: float) -> None:
    times = itertools.islice(arrival_times(Arrival(kind, 8.0), random.Random(7)), 20_000)
    found = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(varies, abs=0.1)


RATE = Arrival(rate=4.0)


def take(work: Work, arrival: Arrival = RATE, seed: str = "s", count: int = 50) -> list[Session]:
    return list(itertools.islice(sessions(work, arrival, seed), count))


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
    # It makes 1.25 tokens of a word, and 5 more of a template.
    assert len(texts[3].split()) == round((512 - 5) * 0.8)
    shared = " ".join(texts[0].split()[: 2 * 410])  # 0.8 words for each of 512 tokens
    assert texts[1].startswith(shared + " ")
    assert not texts[3].startswith(texts[0][:40])
    assert prompts("other").ids(asked[0].turns[0])[:50] != ids[0][:50]


def test_a_trace_has_its_times_and_may_be_stretched(tmp_path: Path) -> None:
    work = Work(trace=trace(tmp_path, ROWS))
    assert [each.at for each in take(work, Arrival("trace"))] == [0.0, 0.5, 2.0, 4.0]
    assert [each.at for each in take(work, Arrival("trace", 2.0))] == [0.0, 0.25, 1.0, 2.0]
    assert [each.at for each in take(work, Arrival("constant", 2.0))] == [0.5, 1.0, 1.5, 2.0]


def fleet(spec: str, **more: object) -> list[Session]:
    return take(Work(agents=agents_of(spec)), **more)  # type: ignore[arg-type]


def test_agents_work_with_gaps_of_seconds_to_minutes_and_share_system_prompts() -> None:
    asked = fleet("fleet,systems=3,gap_s=1:120", count=600)
    assert asked == fleet("fleet,systems=3,gap_s=1:120", count=600)
    assert asked != fleet("fleet,systems=3,gap_s=1:120", count=600, seed="t")
    gaps = [turn.think_s for each in asked for turn in each.turns[1:] if not turn.branches]
    logs = [math.log(each) for each in gaps]
    assert statistics.median(gaps) == pytest.approx(math.sqrt(120), rel=0.1)
    assert statistics.pstdev(logs) == pytest.approx(math.log(120) / 4, rel=0.1)
    assert 1 <= min(gaps) < 2
    assert 60 < max(gaps) <= 120
    assert len({each.system for each in asked}) == 3
    assert all(4 <= len(each.turns) <= 40 for each in asked)
    names = [name for each in asked for turn in each.all_turns for name, _ in turn.pieces]
    assert len(set(names)) == len(names), "only system prompts are shared"
    assert max(names) < 0


def test_sub_agents_begin_with_a_part_of_their_parents_context_and_return_short_results() -> None:
    asked = fleet("fleet,branch=0.3,result=20:80,output=200:300", count=200)
    turns = [(at, turn) for each in asked for at, turn in enumerate(each.turns)]
    branching = [(at, turn) for at, turn in turns if turn.branches]
    assert len(branching) / sum(at > 0 for at, _ in turns) == pytest.approx(0.3, abs=0.03)
    kept = set()
    for at, turn in branching:
        assert turn.think_s == turn.branches[0].turns[0].think_s == 0.0
        results = [branch.turns[-1].output for branch in turn.branches]
        assert all(20 <= each <= 80 for each in results)
        assert turn.prompt == sum(results)
        assert all(0 <= branch.keeps <= at for branch in turn.branches)
        kept |= {branch.keeps / at for branch in turn.branches}
    assert min(kept) == 0.0
    assert max(kept) == 1.0


def test_agents_are_sent_at_the_rate_of_all_their_turns() -> None:
    asked = fleet("fleet", arrival=Arrival("constant", 10.0), count=800)
    turns = sum(len(each.all_turns) for each in asked)
    assert turns / asked[-1].at == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize(
    "spec",
    [
        "many",
        "fleet,turns",
        "fleet,turns=9:4",
        "fleet,tools=3",
        "fleet,gap_s=a:b",
        "fleet,branch=2",
    ],
)
def test_agents_that_are_not_there_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=spec):
        agents_of(spec)


ROW = '{"timestamp": 1, "input_length": %s, "output_length": %s, "hash_ids": %s}'


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "[]", "{}", '{"timestamp": 1}', ROW % (-5, 5, "[]"), ROW % (600, 5, '"ab"')),
        *(ROW % (600, "1e400", "[1, 2]"), ROW % (10**11, 5, "[1, 2]")),
    ],
)
def test_files_of_another_kind_are_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"file\.json"):
        take(Work(trace=str(path)), Arrival("trace"))
