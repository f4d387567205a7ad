"""`kvrelay plan`: what is asked, what it prints, and what it answers to nonsense."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.roles import H200, slowed
from kvrelay import sizing
from kvrelay.cli import run
from kvrelay.load.measures import Targets
from kvrelay.planner.goodput import Served
from kvrelay.planner.rate_card import write_card
from kvrelay.planner.setting import Setting, Stream
from kvrelay.sizing import Wanted, sized, workload_of
from kvrelay.wire.errors import ConfigError


@pytest.fixture
def card(tmp_path: Path) -> str:
    path = tmp_path / "card.json"
    write_card(slowed(H200, 20.0), path)
    return str(path)


def test_the_simulated_best_is_below_its_bound_and_never_breaks_the_goal() -> None:
    targets = Targets(2_500.0, 400.0)
    found = sized(Wanted(2, slowed(H200, 20.0), workload_of("2048:64"), targets, 0.0))
    assert {each.setting.name for each in found} == {"2 colocated", "1P1D"}
    assert [each.goodput for each in found] == sorted(
        (each.goodput for each in found), reverse=True
    )
    apart = next(each for each in found if each.setting.name == "1P1D")
    assert apart.served is not None
    assert apart.served.attained >= 0.9
    assert 0.5 * apart.bound <= apart.served.rate <= 1.1 * apart.bound
    assert apart.short == "prefill"


def test_splits_without_time_for_the_rate_of_another_are_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[int, list[object]] = {}

    def tried(asks: list[object], setting: Setting, rate: float) -> Served:
        asked[setting.prefill] = asks
        return Served(rate, 0.9, *(1.0,) * 3)

    monkeypatch.setattr(sizing, "at_rate", tried)
    found = sized(Wanted(8, H200, workload_of("512:256"), Targets(200.0, 15.0), 0.0))
    assert max(asked.values(), key=len) == min(asked.values(), key=len)  # all the same requests
    assert 2 < len(asked) < len(found)
    best = found[0].goodput
    assert all(each.bound <= best for each in found if each.served is None)
    assert [each.served is None for each in found] == sorted(each.served is None for each in found)


def plan_of_two(card: str, workload: str, *, ttft_ms: int, tpot_ms: int) -> list[str]:
    asked = ["plan", "--gpus", "2", "--card", card, "--workload", workload]
    return [*asked, "--ttft-ms", f"{ttft_ms}", "--tpot-ms", f"{tpot_ms}"]


def test_it_prints_the_best_split_why_and_how_to_start_it(
    card: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = plan_of_two(card, "1000:40", ttft_ms=4000, tpot_ms=400)
    assert run([*asked, "--rate=1"]) == 0
    out = capsys.readouterr().out
    assert "1P1D" in out
    assert "2 colocated" in out
    assert "it is short of prefill first" in out
    assert (
        "kvrelay compose --model '8 billion parameters, bf16' --prefill 1 --decode 1 --gpus 0,1"
        in out
    )
    assert "deployment/kvrelay-prefill --replicas=1" in out
    assert "--ttft-target-ms 4000 --tpot-target-ms 400" in out
    assert run([*asked, "--rate=40", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["keeps_targets"] is False
    assert {each["split"] for each in told["splits"]} == {"1P1D", "2 colocated"}
    assert all(each["simulated"]["rate"] == 40 for each in told["splits"])


def test_a_split_that_does_not_keep_the_targets_is_not_started(
    card: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One prefill node is too few for what two colocated servers serve."""
    asked = plan_of_two(card, "8000:2", ttft_ms=12000, tpot_ms=9000)
    assert run([*asked, "--rate=0.35"]) == 0
    out = capsys.readouterr().out
    assert "Best: 2 colocated" in out
    assert "kvrelay compose" not in out


def test_times_are_left_out_where_nothing_was_answered(
    card: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = plan_of_two(card, "8000:2", ttft_ms=1, tpot_ms=1)
    assert run([*asked, "--rate=0.35", "--json"]) == 1
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert {each["simulated"]["ttft_p90"] for each in splits} == {None}


def test_a_trace_that_is_too_short_is_said_to_be(
    card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * at, "input_length": 600, "output_length": 5, "hash_ids": [at, 0]}
        for at in range(30)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    asked = plan_of_two(card, str(trace), ttft_ms=9000, tpot_ms=900)
    assert run([*asked, "--rate=1"]) == 0
    said = capsys.readouterr().out
    assert "The trace has 30 requests, and at 1.0 requests/s a run needs 400" in said


def test_a_workload_is_a_name_lengths_or_a_trace(tmp_path: Path) -> None:
    def asking(workload: str, count: int = 50) -> list[Stream]:
        wanted = Wanted(2, H200, workload_of(workload), Targets(200.0, 15.0), 0.0)
        return wanted.asking(count)

    for name in ("chat", "512:256"):
        fixed = asking(name)
        assert [(each.prompt, each.output, each.blocks) for each in fixed] == [(512, 256, ())] * 50
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n' * 3
    )
    first, second = (each.blocks for each in asking(str(trace), 2))
    assert first == second
    assert len(first) == 1
    trace.write_text('{"timestamp": 1, "input_length": 0, "output_length": 0, "hash_ids": []}\n')
    assert [(each.prompt, each.output) for each in asking(str(trace))] == [(1, 2)]
    for wrong in ("0:5", "songs"):
        with pytest.raises(ConfigError, match=r"is not one of chat.*, and not IN:OUT in tokens"):
            asking(wrong)


def test_sessions_of_agents_are_planned_with_the_host_memory_that_pays(
    card: str, capsys: pytest.CaptureFixture[str]
) -> None:
    agents = "fleet,turns=2,system=500,prompt=60,output=10,gap_s=1,branch=0"
    asked = plan_of_two(card, agents, ttft_ms=4000, tpot_ms=400)
    assert run([*asked, "--rate=0.4"]) == 0
    assert "1.0 sessions in time" in capsys.readouterr().out
    assert run([*asked, "--rate=2"]) == 0
    out = capsys.readouterr().out
    assert "2 sessions: TTFT within 4000 ms" in out
    assert "2.0 sessions in time, 1.00 for each GPU" in out
    assert "Host memory of 97.66 GiB for each node does not pay: 2 sessions in time" in out


MEMORY = ("--kv-host-memory",)


def test_a_trace_is_replayed_with_several_policies_and_sizes_of_tiers(
    card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 9_000 * at,
            "input_length": 1100,
            "output_length": 5,
            "hash_ids": [99, at + 1, at],
        }
        for at in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))

    def replayed(*flags: str, code: int = 0) -> str:
        assert run(["replay", str(trace), "--card", card, *flags]) == code
        told = capsys.readouterr()
        return told.err if code else told.out

    settings = "--policy", "price", "--policy", "round_robin", *MEMORY, "0", *MEMORY, "1GiB"
    lines_out = replayed("--nodes", "2:2", *settings).splitlines()
    out = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines_out]
    shown = {row[0]: row[1:] for row in out if row}
    assert out[2][1:] == ["price", "price", "round_robin", "round_robin"]
    assert out[3][1:] == ["0.00 GiB host", "1.00 GiB host"] * 2
    assert shown["found"] == ["100.00%"] * 4
    assert shown["capacity"] == ["0.00%"] * 4
    assert shown["peer"] == ["0.00%", "0.00%", "20.00%", "20.00%"]
    assert re.search(r"│ peer +│ +0\.00% │", replayed("--kv-pull", "never", "--nodes", "1:1"))
    for wrong in (("--policy", "price", "--policy"), ("--kv-pull",)):
        assert "'best' is not one of" in replayed(*wrong, "best", code=2)
    store = *MEMORY, "1GiB", "--kv-store-size"
    assert re.search(r"1\.00 GiB host ┃\n.* 2\.00 GiB store ┃", replayed(*store, "2GiB"))
    assert "kv-store-size" in replayed(*store, "much", code=2)
    trace.write_text(json.dumps(lines[0] | {"input_length": 10**7}))
    for name in ("found", "TTFT p50, ms"):  # where nothing is repeated or answered
        assert re.search(rf"│ {name} +│ +- │", replayed())
    write_card(msgspec.structs.replace(H200, kv_token_bytes=0), Path(card))
    assert "kv_token_bytes" in replayed(*MEMORY, "1GiB", code=2)


def test_what_cannot_be_planned_is_one_sentence(
    card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.json"
    write_card(msgspec.structs.replace(H200, tensor_parallel_size=2), pairs)
    for file, gpus, ttft_ms, says in (
        (str(pairs), 1, 9, "takes 2 GPUs"),
        (card, 2, 0, "above 0 milliseconds"),
        ("nowhere.json", 2, 9, "make one with kvrelay profile"),
    ):
        asked = plan_of_two(file, "10:10", ttft_ms=ttft_ms, tpot_ms=400)
        asked[2] = f"{gpus}"
        assert run(asked) == 2
        assert says in capsys.readouterr().err
