"""What a request tells of its stages, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import make_tiny

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Chunk, Request
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit, Timing
from kvrelay.wire.outputs import Load
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import Ticket

PROMPT = [5] * 20


def request(**submit) -> Request:
    return Request.from_submit(Submit("r", PROMPT, SamplingParams(9, seed=0), **submit), 10.0)


def step(req: Request, start: int, launched: float, token_at: float) -> None:
    """A step whose token is known some time after its launch."""
    req.mark_launched(start, launched)
    req.token_ids.append(7)
    req.mark_token(token_at)


def close(timing: Timing, **fields: float) -> bool:
    wanted = Timing(**fields)
    return all(
        getattr(timing, name) == pytest.approx(getattr(wanted, name), abs=1e-9)
        for name in Timing.__struct_fields__
    )


def test_a_request_that_is_served_whole() -> None:
    req = request()
    req.first_scheduled_s = 10.1
    step(req, 0, 10.1, 10.5)
    step(req, 20, 10.52, 10.6)
    step(req, 21, 10.6, 10.7)
    assert close(req.timing(10.8), queue_s=0.1, prefill_s=0.4, decode_s=0.3, first_step_s=0.08)


def test_a_step_that_was_launched_behind_another_begins_when_that_ends() -> None:
    req = request()
    req.first_scheduled_s = 10.0
    req.mark_launched(0, 10.0)
    req.mark_started(10.0, 10.3)
    req.mark_launched(20, 10.4)
    req.token_ids.append(7)
    req.mark_token(10.5)
    req.mark_started(10.4, 10.5)
    req.token_ids.append(7)
    req.mark_token(10.6)
    assert close(req.timing(10.6), queue_s=0.3, prefill_s=0.2, decode_s=0.1, first_step_s=0.1)


@pytest.mark.parametrize("early", [True, False])
def test_a_request_whose_kv_comes_from_elsewhere(early: bool) -> None:
    req = request(fetch=Ticket(), generated=[] if early else [7])
    req.first_scheduled_s = req.fetch_started_s = 10.2
    if early:  # token 1 comes with the KV
        req.token_ids.append(7)
        req.first_token_s = 10.9
    req.fetched_s, req.fetched_bytes, req.exposed_s, req.told_at_s = 10.9, 100, 0.3, 10.6
    step(req, 20, 10.95, 11.0)
    wanted = {"transfer_s": 0.7, "transfer_bytes": 100, "exposed_s": 0.3, "told_s": 0.4}
    wanted |= {"queue_s": 0.2, "decode_queue_s": 0.25, "first_step_s": 0.05, "decode_s": 0.3}
    assert close(req.timing(11.2), **wanted)


def test_a_prompt_that_is_computed_after_a_failed_fetch_is_prefill() -> None:
    req = request(fetch=Ticket())
    req.first_scheduled_s = req.fetch_started_s = 10.2
    req.fetched_s, req.fetch_error = 10.5, "PeerLost: gone"
    step(req, 16, 10.6, 10.8)
    step(req, 20, 10.8, 10.9)
    wanted = {"queue_s": 0.2, "transfer_s": 0.3, "prefill_s": 0.3, "decode_queue_s": 0.2}
    assert close(req.timing(11.0), decode_s=0.2, first_step_s=0.1, **wanted)


class Device:
    """The CPU's runner as a GPU's, on a clock of its own: a launch takes `launch_s`, and then the
    device `step_s`.
    """

    runs_ahead = True

    def __init__(self, engine: Engine, launch_s: float, step_s: float) -> None:
        self.now = self.free_at = 0.0
        self._runner, self._launch_s, self._step_s = engine._runner, launch_s, step_s
        engine._runner, engine._clock = self, lambda: self.now  # type: ignore[assignment]

    def launch(self, chunks: Sequence[Chunk]) -> Later:
        self.now += self._launch_s
        self.free_at = max(self.free_at, self.now) + self._step_s
        return Later(self, self.free_at, [chunk.request for chunk in chunks if chunk.samples])


class Later:
    def __init__(self, device: Device, ends: float, requests: list[Request]) -> None:
        self.requests, self._device, self._ends = requests, device, ends

    @property
    def is_done(self) -> bool:
        return self._device.now >= self._ends

    def sample(self) -> None:
        pass

    def wait(self) -> tuple[list[int], list[None]]:
        self._device.now = max(self._device.now, self._ends)
        return [7] * len(self.requests), [None] * len(self.requests)

    def scores(self) -> list[object]:
        return []


def behind(folder: Path, launch_s: float) -> tuple[Engine, Device, Request, Request]:
    """An engine whose steps take 0.1 s, with one request, and another that is not there yet."""
    make_tiny("Qwen3ForCausalLM", folder)
    small = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 8 << 20}
    engine = Engine(EngineConfig(str(folder), device="cpu", **small))
    device = Device(engine, launch_s, 0.1)
    first, second = (
        Request.from_submit(Submit(name, PROMPT, SamplingParams(1, seed=0, ignore_eos=True)), 0.0)
        for name in ("a", "b")
    )
    engine.scheduler.add(first)
    return engine, device, first, second


@pytest.mark.parametrize(
    ("launch_s", "queue_s", "prefill_s"),
    [(0.01, 0.1, 0.1), (0.3, 0.0, 0.4)],
    ids=["the device is waited for", "the launch is waited for"],
)
def test_behind_a_step_that_runs_a_prompt_waits_for_its_turn(
    tmp_path: Path, launch_s: float, queue_s: float, prefill_s: float
) -> None:
    engine, device, _, second = behind(tmp_path, launch_s)
    engine.step()
    second.arrival_s = device.now
    engine.scheduler.add(second)
    while engine.has_work:
        engine.step()
    assert close(second.timing(device.now), queue_s=queue_s, prefill_s=prefill_s)


def test_who_arrives_while_a_step_runs_is_launched_behind_it(tmp_path: Path) -> None:
    engine, device, first, second = behind(tmp_path, 0.01)
    assert engine.step(wait=False) == []
    assert not engine.idles
    for _ in range(3):  # nothing to launch, and the step is not done
        device.now += 0.02
        assert engine.step(wait=False) == []
        assert engine.idles
        assert not engine.is_done
    second.arrival_s = device.now
    engine.scheduler.add(second)
    assert engine.step(wait=False) == [first]
    assert (device.now, device.free_at) == pytest.approx(
        (0.11, 0.21)
    )  # the second began as the first ended
    assert not engine.idles
    assert engine.step(wait=False) == []
    assert engine.idles
    device.now = 0.5  # nobody looked for a while
    assert engine.is_done
    assert engine.step(wait=False) == [second]
    assert not engine.has_work
    assert engine.counters.step_s == pytest.approx(
        0.5 - 0.02
    )  # between the first two calls nobody counted


def test_the_load_told_with_an_offer_counts_the_step_that_runs(tmp_path: Path) -> None:
    engine, device, _, second = behind(tmp_path, 0.01)
    costs = StepCosts(0.0, 0.0, 0.0, 0.0, 100 / len(PROMPT), 0.0)
    engine.scheduler.budget = replace(engine.scheduler.budget, costs=costs)
    told: list[Load] = []
    offers = SimpleNamespace(offer=lambda _: told.append(engine.load(device.now)))
    second.hold = True
    engine.step(offers, wait=False)  # type: ignore[arg-type]
    device.now = 0.06
    engine.scheduler.add(second)
    engine.step(offers, wait=False)  # type: ignore[arg-type]
    assert [load.backlog_ms for load in told] == pytest.approx([40.0 + 100.0])


def test_a_step_that_takes_long_is_waited_for_in_one_piece(tmp_path: Path) -> None:
    """Where a rank is lost it never ends, and the wait has a deadline."""
    engine, device, first, _ = behind(tmp_path, 0.01)
    device._step_s = 3.0
    engine.step(wait=False)
    device.now += 0.1
    assert engine.step(wait=False) == []
    device.now += 1.0
    assert engine.step(wait=False) == [first]
    assert device.now == pytest.approx(3.01)
