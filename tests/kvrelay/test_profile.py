"""`kvrelay profile`: a card that can be read, single steps, and what is refused before anything is
loaded.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvrelay import profile
from kvrelay.cli import run
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.timed_steps import TimedSteps
from kvrelay.planner.grid import plan
from kvrelay.planner.rate_card import read_card
from kvrelay.profile import spread_of
from tests.cluster.real_cluster import tiny_model

pytestmark = pytest.mark.cluster

ON_CPU = (
    "--cpu",
    "--load-format=dummy",
    "--threads=1",
    f"--kv-cache-memory-bytes={8 << 20}",
    "--max-num-seqs=16",
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_NOISY", 100.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("profile"))[1]


def test_a_card_has_prefill_decode_and_mixed_steps_and_is_shown(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "spread_of", lambda times: 101.0)
    # However long it takes on a busy machine, with the fewest runs of each.
    monkeypatch.setattr(profile, "plan", lambda limits: [(0, steps) for _, steps in plan(limits)])
    file = tmp_path / "card.json"
    arguments = (
        "--seconds=0.01",
        f"--out={file}",
        "--served-model-name=mine",
    )
    assert run(["profile", *ON_CPU, f"--model={model}", *arguments]) == 1
    card = read_card(file)
    assert (card.model, card.gpus, card.max_num_seqs, card.block_size) == ("mine", 1, 16, 16)
    assert card.step_tokens == 128
    assert card.hardware.endswith("1 threads")
    prefill = {(point.tokens, point.context) for point in card.prefill}
    assert {(16, 0), (128, 0)} <= prefill
    assert max(context for _, context in prefill) > 0
    assert {1, 16} <= {point.requests for point in card.decode}
    assert card.fetch_ms(1_000) > card.fetch_ms(0) > 0  # not measured
    assert {(1, 16), (8, 16)} <= {(point.requests, point.tokens) for point in card.mixed}
    everything = [*card.prefill, *card.decode, *card.mixed]
    assert all(point.ms > 0 for point in everything)
    assert card.prompt_ms(300) > card.prompt_ms(128) > 0
    shown = capsys.readouterr().out
    for title in (
        "prefill: ms of a step",
        "decode: ms of a step",
        "decodes beside a chunk",
    ):
        assert title in shown
    assert f"written to {file}" in shown
    assert "too noisy to believe these times" in shown  # and so its exit code is 1


def test_a_step_does_not_take_longer_on_a_card_because_it_waited_for_a_core(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step = Engine.step

    def step(engine: Engine, handover: TimedSteps) -> list[Request]:
        if all(each.params.max_tokens == 1 for each in engine.scheduler.live):
            time.sleep(0.05)  # another process computes while prompts are measured
        return run_step(engine, handover)

    monkeypatch.setattr(Engine, "step", step)
    file = tmp_path / "card.json"
    assert run(["profile", *ON_CPU, f"--model={model}", "--seconds=1", f"--out={file}"]) == 0
    card = read_card(file)
    assert card.prompt_ms(16) < 4 * card.step_ms(1, 32)


def test_the_spread_is_the_middle_half_of_runs_of_the_step_that_three_in_four_stay_below() -> None:
    alike, unlike = [10.0, 10.1, 9.9, 10.0, 90.0], [10.0, 14.0, 6.0]
    assert spread_of({(0, 0, 16): alike}) == pytest.approx(0.01)
    steps = {(requests, 32, 0): alike for requests in (1, 2, 4)}
    assert spread_of({**steps, (8, 32, 0): unlike, (16, 32, 0): unlike}) == pytest.approx(0.4)
    assert spread_of({(0, 0, 16): [9.0]}) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seconds=-1"], "--seconds must be a number from 0 on"),
        (["--seconds=nan"], "--seconds must be a number from 0 on"),
        (["--out=/no/such/folder/card.json"], "choose another --out"),
    ],
)
def test_what_is_typed_wrong_is_refused(
    arguments: list[str], says: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", *ON_CPU, f"--model={model}", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_a_whole_card_within_its_time(repository: Path, tmp_path: Path) -> None:
    shape = repository / "benchmarks" / "models" / "llama-3.1-8b.json"
    file = tmp_path / "card.json"
    small = ["--max-model-len=8192", "--gpu-memory-utilization=0.5", "--max-num-seqs=32"]
    assert (
        run(
            [
                "profile",
                f"--model={shape}",
                "--load-format=dummy",
                "--seconds=40",
                f"--out={file}",
                *small,
            ]
        )
        == 0
    )
    card = read_card(file)
    assert card.prompt_ms(4096) > card.prompt_ms(64)
    assert card.step_ms(32, 32 * 2048) > card.step_ms(1, 2048)
