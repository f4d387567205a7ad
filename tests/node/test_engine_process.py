"""The engine's loop over a connector that does what the test says: what one bad request ends."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.node.engine_process import EngineProcess
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.scheduler import Scheduler
from kvrelay.wire.engine_messages import RequestUpdate, Submit
from kvrelay.wire.outputs import Finish
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import Ticket
from tests.paged_engine.invariants import check_scheduler

TICKET = Ticket(remote_block_ids=[[1, 2]], num_tokens=20, remote_request_id="p")


class FakeConnector:
    """Refuses some; remembers what it cares for."""

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.watched: list[str] = []

    def watch(self, request_id: str, params: Ticket) -> None:
        if request_id in self.refuses or request_id in self.watched:
            raise ValueError(f"request {request_id!r} is already abandoned")
        self.watched.append(request_id)

    def cancel(self, request_id: str) -> None:
        self.watched.remove(request_id)


class _Engine(Engine):
    """The real one, as far as requests come in."""

    def __init__(self) -> None:
        self.max_model_len = 99
        self.adapters, self._weights = None, ""
        self.model = SimpleNamespace(vocab_size=300, eos_token_ids=())  # type: ignore[assignment]
        self.pool = SimpleNamespace(block_size=16)  # type: ignore[assignment]
        self.scheduler = Scheduler(
            BlockPool(33),
            block_size=16,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            max_model_len=99,
            eos_token_ids=(),
        )


class Process(EngineProcess):
    """Without sockets, device and model."""

    def __init__(self) -> None:
        self.fake = FakeConnector()
        self.connector = cast(TransferEngine, self.fake)
        self._updates = []
        self.engine = _Engine()

    def submit(self, request_id: str, fetch: Ticket | None = TICKET) -> list[RequestUpdate]:
        self._submit(
            Submit(request_id, [7] * 20, SamplingParams(max_tokens=4, seed=1), fetch=fetch)
        )
        updates, self._updates = self._updates, []
        return updates


@pytest.fixture
def process() -> Process:
    return Process()


def test_a_request_that_the_connector_does_not_watch_ends_alone(process: Process) -> None:
    process.fake.refuses.add("bad")
    (update,) = process.submit("bad")
    assert (update.request_id, update.finish) == ("bad", Finish.ERROR)
    assert update.error == "request 'bad' is already abandoned"
    assert process.engine.scheduler.get("bad") is None
    assert process.submit("good") == []
    assert process.engine.scheduler.get("good") is not None
    assert process.fake.watched == ["good"]
    check_scheduler(process.engine.scheduler)


@pytest.mark.parametrize(("ago_s", "waited"), [(2000.0, True), (-5000.0, False), (None, False)])
def test_a_request_has_waited_since_its_node_sent_it(
    process: Process, ago_s: float | None, *, waited: bool
) -> None:
    """An engine reads what comes between its steps, and a step may take long. Nothing comes from
    the future.
    """
    now = time.monotonic()
    at = 0.0 if ago_s is None else now - ago_s
    process._submit(Submit("r", [7] * 20, SamplingParams(max_tokens=4, seed=1), at=at))
    request = process.engine.scheduler.get("r")
    assert request is not None
    assert request.arrival_s == pytest.approx(now - (ago_s or 0.0) * waited, abs=100)


def test_a_request_that_cannot_be_queued_leaves_no_watched_lease(process: Process) -> None:
    assert process.submit("twice", fetch=None) == []
    (update,) = process.submit("twice")
    assert update.error == "request id 'twice' is in use"
    assert process.fake.watched == []
    assert process.engine.scheduler.get("twice") is not None


def test_a_second_request_of_one_id_does_not_touch_the_first_ones_lease(process: Process) -> None:
    assert process.submit("twice") == []
    (update,) = process.submit("twice")
    assert update.finish is Finish.ERROR
    assert process.fake.watched == ["twice"]
